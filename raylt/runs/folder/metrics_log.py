"""metrics.jsonl: one line per committed step, each with a hash that links it to the line before.

Each line contains the SHA-256 of the previous line under `previous`; the first line contains the SHA-256 of the run
(identity.py). A checkpoint contains the same hash as the line of its step, and that line's report. summary.json
contains the hash of the last line. Each line also contains a hash of its own content, since no other line follows the
last line of an unfinished run. So any line that is changed, left out, swapped or taken from another run is detected.

Each line, and each checkpoint, also contains the hash of its process's line in provenance.jsonl.
"""

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, NotRequired

from pydantic import ConfigDict, Field, TypeAdapter
from typing_extensions import TypedDict

from raylt.core.report import CHECKPOINT, JUDGED, Figure, RoundReport, Sha256
from raylt.errors import CheckpointError
from raylt.runs.folder import provenance
from raylt.runs.folder.provenance import NAMED, SCHEMA
from raylt.store import Folder
from raylt.typed_json import as_json, check_json, closed, hash_json, parse_json

if TYPE_CHECKING:
    from raylt.core.checkpoint.checkpoint import Checkpoint

FILE = "metrics.jsonl"
MAX_FILE_BYTES = 4 * 2**30
SELF = "sha256"  # key in a line: hash of the other fields


class MetricsLine(RoundReport):
    """A line of metrics.jsonl: one committed step of a run.

    `MetricsLine.model_json_schema()` is the JSON schema of a line.
    """

    model_config = ConfigDict(populate_by_name=False)

    version: Annotated[int, Field(alias="schema"), Figure("version of the format")]
    previous: Annotated[Sha256, Figure("SHA-256 of the line before; in the first line, that of the run")]
    date: Annotated[str | None, Figure("time in UTC; null if the line was restored from a checkpoint")]
    provenance: Annotated[
        Sha256 | None, Figure("SHA-256 of the process's line in provenance.jsonl; early versions wrote none")
    ] = None
    sha256: Annotated[Sha256 | None, Figure("SHA-256 of all other fields; early versions wrote none")] = None


@closed
class _Seal(TypedDict):
    run: str
    line: str
    provenance: NotRequired[str | None]


@closed
class _Facts(TypedDict):
    """The fields of a checkpoint's manifest that describe its run.

    `best` contains the step with the best accuracy on validation images so far, among the steps with a checkpoint, and
    this accuracy. With federation.patience, `peak` is the same over all evaluated rounds, and `last_round` is the
    number of the last round, if known.
    """

    step: Annotated[int, Field(ge=1)]
    report: dict[str, Any]
    seal: _Seal
    best: NotRequired[dict[str, int | float]]
    peak: NotRequired[dict[str, int | float]]
    last_round: NotRequired[Annotated[int, Field(ge=0)]]


_LINE, _FACTS = TypeAdapter(MetricsLine), TypeAdapter(_Facts)


@dataclass(frozen=True)
class Lines:
    """The lines of a run's metrics.jsonl.

    Attributes:
        root: The run's SHA-256.
        texts: The lines without line breaks.
        reports: The content of the lines.
        torn: Whether an incomplete line follows, which a kill cut off or a process is still writing.
        sealed: Whether the last line has a hash of itself. Lines of early versions have none.
    """

    root: str
    texts: list[str]
    reports: list[dict[str, Any]]
    torn: bool
    sealed: bool = True

    def head(self, step: int | None = None) -> str:
        """Return the hash of a step's line (by default the last), which the next line must contain."""
        step = len(self.texts) if step is None else step
        return hash_line(self.texts[step - 1]) if step else self.root

    def check(self, saved: "Checkpoint") -> None:
        """Check that this metrics.jsonl and a checkpoint belong to the same run.

        Raises:
            CheckpointError: They do not.
        """
        facts = as_json(json.dumps(saved.facts), _FACTS, str(saved.folder))
        step, seal, lines = facts["step"], facts["seal"], len(self.texts)
        file = saved.folder.parent.parent / FILE
        if seal["run"] != self.root:
            raise CheckpointError(
                f"{saved.folder}: the checkpoint belongs to another run ({seal['run'][:12]}, this one is "
                f"{self.root[:12]}). Put the run's own checkpoint back.",
                code="run.changed",
                path=str(saved.folder),
            )
        if lines < step - 1:
            raise _changed_log(
                f"{file}: the file has {lines} lines, but the checkpoint of step {step} needs {step - 1}. "
                "Put the missing lines back.",
                path=str(file),
            )
        if self.head(step - 1) != seal["line"]:
            raise _changed_log(
                f"{file}: line {step - 1} does not match the checkpoint of step {step}. It was edited, or belongs to "
                "another run. Put the original back.",
                path=str(file),
                line=step - 1,
            )
        with Folder.open(file.parent) as run:
            provenance.check_named(run, seal.get("provenance"), f"the checkpoint of step {step}")
        if lines >= step and (field := _difference(facts["report"], self.reports[step - 1])):
            raise _changed_log(
                f"{file}: line {step} was changed: {field} differs from the checkpoint after that step. Put the "
                "original back.",
                path=str(file),
                line=step,
                key=field,
            )


def as_record(report: RoundReport) -> dict[str, Any]:
    """Return a report in the form that JSON stores, with strings as keys."""
    return json.loads(json.dumps(report.record()))


def write_line(report: dict[str, Any], previous: str, date: str | None, made: str | None) -> str:
    """Return a report as one line of JSON for metrics.jsonl, without the line break.

    Args:
        report: The report of the step.
        previous: Hash of the line before.
        date: Time in UTC; None if the line is restored from a checkpoint.
        made: Hash of the process's line in provenance.jsonl; None if an early version took the step.
    """
    named = {} if made is None else {NAMED: made}
    content = json.loads(json.dumps({"schema": SCHEMA, "previous": previous, **named, "date": date, **report}))
    return json.dumps({**content, SELF: hash_json(content)})


def restored_line(saved: "Checkpoint", previous: str) -> str:
    """Return the line of metrics.jsonl for the step of a checkpoint, made from the checkpoint's report.

    A run that was killed right after its checkpoint has not written this line. The line's date is null.
    """
    text = write_line(saved.facts["report"], previous, None, saved.facts["seal"].get("provenance"))
    as_json(text, _LINE, f"{saved.folder}: its report")
    return text


def hash_line(text: str) -> str:
    """Return the SHA-256 of a line of metrics.jsonl."""
    return hashlib.sha256(text.encode()).hexdigest()


def read_lines(folder: Folder, root: str, most: int | None = None) -> Lines:
    """Read the lines of metrics.jsonl in a run folder.

    Args:
        folder: The run folder.
        root: The run's SHA-256.
        most: Number of lines to read; None for all.

    Raises:
        CheckpointError: A line is damaged, missing, changed or from another run. The message gives its number.
    """
    content = folder.read(FILE, MAX_FILE_BYTES) if FILE in folder.names() else b""
    *lines, rest = content.split(b"\n")
    texts: list[str] = []
    reports: list[dict[str, Any]] = []
    previous = root
    sealed = False
    for number, line in enumerate(lines[:most], 1):
        report = _read_line(line, number, f"{folder.path / FILE}, line {number}")
        own = report.pop(SELF, None)
        report.pop(NAMED, None)
        if own is None and sealed:
            raise _changed_log(
                f"{folder.path / FILE}, line {number}: has no hash, but the line before it has one. Put the original "
                "back.",
                path=str(folder.path / FILE),
                line=number,
            )
        sealed = own is not None
        if report["previous"] != previous:
            cause = f"line {number - 1} or this line was changed, or one" if number > 1 else "it"
            raise _changed_log(
                f"{folder.path / FILE}, line {number}: {cause} belongs to another run. Put the original back.",
                path=str(folder.path / FILE),
                line=number,
            )
        texts.append(line.decode())
        reports.append(report)
        previous = hash_line(texts[-1])
    return Lines(root, texts, reports, bool(rest), sealed or not texts)


def was_saved(lines: Lines) -> bool:
    """Return whether any step was saved in a checkpoint.

    A line that was restored from a checkpoint has no date.
    """
    return any(CHECKPOINT in report["stages"] or report["date"] is None for report in lines.reports)


def _read_line(line: bytes, number: int, where: str) -> dict[str, Any]:
    report: dict[str, Any] = parse_json(line, where)
    check_json(report, _LINE, where)
    if report.get(SELF) is not None and report[SELF] != hash_json({k: v for k, v in report.items() if k != SELF}):
        raise _changed_log(f"{where}: the line was changed. Put the original back.", line=number)
    for name in JUDGED:
        report.setdefault(name, None)  # a figure that was added after the line was written
    if report["schema"] != SCHEMA:
        raise CheckpointError(
            f"{where}: the schema is {report['schema']}, but this raylt reads {SCHEMA}. Run it again.",
            code="run.changed",
            schema=report["schema"],
        )
    if report["step"] != number:
        raise _changed_log(
            f"{where}: the line belongs to step {report['step']}. Put the lines back in order, each once.",
            line=number,
            step=report["step"],
        )
    return report


def _changed_log(message: str, **details: object) -> CheckpointError:
    return CheckpointError(message, code="run.changed", **details)


def _difference(saved: dict[str, Any], line: dict[str, Any], path: str = "") -> str | None:
    """Return the first figure that differs between a checkpoint's report and its line of metrics.jsonl.

    The line may have more fields: the duration of the checkpoint, and the decisions of a search.
    """
    for key, value in saved.items():
        inner = f"{path}.{key}" if path else key
        if isinstance(value, dict) and isinstance(line.get(key), dict):
            if (difference := _difference(value, line[key], inner)) is not None:
                return difference
        elif line.get(key) != value and value == value:  # NaN differs from itself
            return inner
    return None
