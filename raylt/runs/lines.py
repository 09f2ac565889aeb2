"""metrics.jsonl: a line for each committed step, each bound to the one before it.

A line has under `previous` the SHA-256 of the line before, the first one that of the run (identity.py). A checkpoint
has the one that its step's line has, and the report that the line has; summary.json has that of the last line. So no
line can be changed, left out, swapped or come from elsewhere without being seen.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Annotated, Any, NotRequired

from pydantic import Field, TypeAdapter
from typing_extensions import TypedDict

from raylt.core.checkpoint import Checkpoint, Seal
from raylt.core.report import Report
from raylt.errors import CheckpointError
from raylt.runs.provenance import SCHEMA
from raylt.store import Folder
from raylt.typed import as_json, closed

FILE = "metrics.jsonl"
LIMIT = 4 * 2**30           # bytes

Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)] | None


@closed
class Line(TypedDict):
    """A line; what its figures are is told by `raylt.core.report.Report`."""

    schema: int
    previous: str
    date: str | None
    step: Annotated[int, Field(ge=1)]
    phase: Annotated[str, Field(pattern="^(round|finish)$")]
    seconds: Seconds
    evaluation_seconds: Seconds
    accuracy: Share
    global_accuracy: Share
    global_macro: Share
    global_miou: Share
    macro: Share
    miou: Share
    groups: dict[str, Share] | None
    clients: dict[str, dict[str, Share]] | None
    by_client: dict[str, list[Share]] | None
    others: dict[str, dict[str, Any]] | None
    quality: NotRequired[dict[str, Share] | None]
    confusion: NotRequired[str | None]
    traffic: dict[str, dict[str, Count]]
    participants: list[Count]
    lost: list[Count]
    retried: list[Count]
    rejected: dict[str, str]
    figures: dict[str, Any]
    stages: dict[str, float]


@closed
class _Seal(TypedDict):
    run: str
    line: str


@closed
class _Facts(TypedDict):
    """What the manifest of a checkpoint says of its run."""

    step: Annotated[int, Field(ge=1)]
    report: dict[str, Any]
    seal: _Seal


_LINE, _FACTS = TypeAdapter(Line), TypeAdapter(_Facts)


def write_line(report: dict[str, Any], previous: str, date: str | None) -> str:
    """The line of a report, without its end."""
    return json.dumps({"schema": SCHEMA, "previous": previous, "date": date, **report})


def restored(saved: Checkpoint, previous: str) -> str:
    """The line of a checkpoint's step, of a run that was killed before it was written; nobody knows when."""
    text = write_line(saved.facts["report"], previous, None)
    as_json(text, _LINE, f"{saved.folder}: its report")
    return text


def hash_line(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class Lines:
    """The lines of a run.

    Attributes:
        root: the run's SHA-256.
        texts: without their ends.
        reports: what they say.
        torn: what follows the last end of a line: of one that was cut off by a kill, or is being written.
    """

    root: str
    texts: list[str]
    reports: list[dict[str, Any]]
    torn: bool

    def head(self, step: int | None = None) -> str:
        """What the line after a step has under `previous`; by default after the last."""
        step = len(self.texts) if step is None else step
        return hash_line(self.texts[step - 1]) if step else self.root

    def check(self, saved: Checkpoint) -> None:
        """Raises a CheckpointError where these lines and a checkpoint are not of one run."""
        facts = as_json(json.dumps(saved.facts), _FACTS, str(saved.folder))
        step, there, seal = facts["step"], len(self.texts), Seal(**facts["seal"])
        place = saved.folder.parent.parent / FILE
        if seal.run != self.root:
            raise CheckpointError(f"{saved.folder}: is a checkpoint of another run ({seal.run[:12]}, this one is "
                                  f"{self.root[:12]}); put the run's own back")
        if there < step - 1:
            raise CheckpointError(f"{place}: has {there} lines, and the checkpoint after "
                                  f"step {step} follows {step - 1}; put the others back")
        if self.head(step - 1) != seal.line:
            raise CheckpointError(f"{place}: line {step - 1} was changed after the checkpoint after step {step} was "
                                  "written, or is of another run")
        if there >= step and (changed := _changed(facts["report"], self.reports[step - 1])):
            raise CheckpointError(f"{place}: line {step} was changed: {changed} is not what the checkpoint after that "
                                  "step has")


def read_lines(folder: Folder, root: str, most: int | None = None) -> Lines:
    """The lines of a run folder.

    Args:
        root: the run's SHA-256.
        most: lines that are read; None for all.

    Raises:
        CheckpointError: one is damaged, missing, was changed or is of another run; names its number.
    """
    content = folder.read(FILE, LIMIT) if FILE in folder.names() else b""
    *lines, rest = content.split(b"\n")
    texts: list[str] = []
    reports: list[dict[str, Any]] = []
    previous = root
    for number, line in enumerate(lines[:most], 1):
        here = f"{folder.path / FILE}, line {number}"
        report: dict[str, Any] = {**as_json(line, _LINE, here)}
        if report["schema"] != SCHEMA:
            raise CheckpointError(f"{here}: has schema {report['schema']}, this raylt reads {SCHEMA}; run it again")
        if report["step"] != number:
            raise CheckpointError(f"{here}: is of step {report['step']}; put the lines back in their order, each once")
        if report["previous"] != previous:
            who = f"line {number - 1} was changed, or this one is" if number > 1 else "is"
            raise CheckpointError(f"{here}: {who} of another run; put the original back")
        texts.append(line.decode())
        reports.append(report)
        previous = hash_line(texts[-1])
    return Lines(root, texts, reports, bool(rest))


def plain(report: Report) -> dict[str, Any]:
    """A report as JSON has it: keys are texts."""
    return json.loads(json.dumps(asdict(report)))


def _changed(saved: dict[str, Any], line: dict[str, Any], path: str = "") -> str | None:
    """The first figure of a checkpoint's report that its line has otherwise. The line may have more: the seconds that
    the checkpoint took, what a search judged."""
    for key, value in saved.items():
        here = f"{path}.{key}" if path else key
        if isinstance(value, dict) and isinstance(line.get(key), dict):
            if (inner := _changed(value, line[key], here)) is not None:
                return inner
        elif line.get(key) != value and value == value:         # NaN is not what it is
            return here
    return None
