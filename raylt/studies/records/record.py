"""`RunRecord`: everything that a comparison needs about one run, read from the run folder.

Comparisons use only records with the state "done". The states:

    missing     the run folder does not exist
    running     a process is working on the run
    stopped     the run has started, no process is working on it, and it can continue
    failed      the last attempt ended with an error
    damaged     files contradict each other, were changed or cannot be read
    done        all rounds and the summary exist and agree
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired

from pydantic import AfterValidator, Field, TypeAdapter
from typing_extensions import TypedDict

from raylt import store
from raylt.core.report import shown_figure
from raylt.disk import named
from raylt.errors import RayltError, on_one_line
from raylt.metrics import GROUPS
from raylt.runs.folder import provenance
from raylt.runs.folder.reader import Files
from raylt.typed_json import as_json, closed, printable

RecordState = Literal["missing", "running", "stopped", "failed", "damaged", "done"]
# Client figures with a curve, by measure, and their keys under `clients` in a line of metrics.jsonl.
CLIENT_CURVES = {
    "local": ("local", "mean"),
    "matched": ("matched", "mean"),
    "owned": ("owned", "mean"),
    "clients": ("global", "mean"),
    "worst_decile": ("matched", "worst_decile"),
}
DIVERGED = ("training.diverged", "server.not-finite")  # error codes of diverged training
CURVES = ("step", "accuracy", "shown", *GROUPS, "validation", "up", "down", "seconds", *CLIENT_CURVES)
LATER_CURVES = {"validation", "shown", *CLIENT_CURVES}  # missing in records of some earlier versions
Finite = Annotated[float, Field(allow_inf_nan=False)]
Printable = Annotated[str, AfterValidator(printable)]


def _with_codes(made: dict[str, Any]) -> dict[str, Any]:
    """Check that the hashes of code and plugins in a record's provenance are strings, and return the provenance."""
    codes = made.get("codes", ["unknown"])
    if (
        not isinstance(codes, list)
        or not codes
        or not all(isinstance(code, str) and code.isprintable() for code in codes)
    ):
        raise ValueError("has codes that are not a list of hashes")
    plugins = made.get("plugins", {})
    if not isinstance(plugins, dict) or not all(
        isinstance(text, str) and text.isprintable() for text in [*plugins, *plugins.values()]
    ):
        raise ValueError("has plugins that are not names with hashes")
    return made


@closed
class _Record(TypedDict):
    """The JSON form of a `RunRecord`."""

    cell: Printable
    arm: Printable
    seed: int
    folder: Printable
    state: RecordState
    problem: Printable | None
    steps: int
    planned_steps: int
    config: dict[str, Any]
    summary: dict[str, Any] | None
    curve: dict[str, list[Finite | None]]
    made: Annotated[dict[str, Any], AfterValidator(_with_codes)]
    by_client: dict[str, list[Finite | None]]
    error: NotRequired[Printable]


_RECORD = TypeAdapter(_Record)


@dataclass(frozen=True)
class RunRecord:
    """The record of one run of a study: state, settings, results and provenance.

    Attributes:
        folder: The run's folder, relative to the study's folder if the run belongs to a study.
        problem: Reason why the run is failed or damaged.
        steps: Number of committed steps.
        planned_steps: Number of planned rounds, without the method's phase after the last round.
        config: Content of config.yaml.
        summary: Content of summary.json; None unless the run is done.
        curve: Lists with one value per step: "step", "accuracy", "shown" (the run's main figure), the class groups,
            "validation" (accuracy on the validation samples), the cumulative "up", "down" (bytes) and "seconds", and
            client figures by measure. Values are None in rounds without an evaluation.
        made: Provenance of the last process that worked on the run, see provenance.py. "codes" lists the code hashes of
            all processes; "plugins" has the hash of each plugin in a file, by kind and name, if there are any.
        by_client: Accuracies of the clients from the last evaluation, by kind and client id; None for clients that were
            not evaluated.
        error: Code of the error that ended a failed run, see `raylt.errors.CODES`; None if it had no code.
        sealed: Whether hashes link the record to its run. This is the case if it was read from a run folder, or from a
            results file that contains its seal (seal.py).
    """

    cell: str
    arm: str
    seed: int
    folder: str
    state: RecordState = "missing"
    problem: str | None = None
    steps: int = 0
    planned_steps: int = 0
    config: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] | None = None
    curve: dict[str, list[Any]] = field(default_factory=dict)
    made: dict[str, Any] = field(default_factory=dict)
    by_client: dict[str, list[float | None]] = field(default_factory=dict)
    error: str | None = None
    sealed: bool = True

    @property
    def rounds(self) -> int:
        """The number of rounds of a finished run, which federation.patience may have reduced."""
        return self.planned_steps if self.summary is None else self.summary["rounds"]

    @property
    def seconds(self) -> float:
        """The duration of all committed steps in seconds, including evaluation."""
        return self.curve["seconds"][-1] if self.curve.get("seconds") else 0.0

    @property
    def diverged(self) -> bool:
        """Return whether training diverged, which is a result of the run's settings."""
        # a record without a configuration means that the run folder was removed
        return self.state == "failed" and self.error in DIVERGED and bool(self.config)

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON values, which share the record's dictionaries and lists."""
        absent = {"sealed"} if self.error else {"sealed", "error"}
        return {key.name: getattr(self, key.name) for key in fields(self) if key.name not in absent}

    @classmethod
    def from_json(cls, tree: Mapping[str, Any], name: str = "record") -> "RunRecord":
        """Create a record from the JSON values that `to_json` returned.

        Args:
            tree: The JSON values.
            name: Name of the source in error messages.

        Raises:
            CheckpointError: The values are not a record.
        """
        return cls(**as_json(json.dumps(tree), _RECORD, name))


def read_run(folder: Path, cell: str = "", arm: str = "", seed: int = 0, name: str | None = None) -> RunRecord:
    """Return the record of a run folder in any state, even if it is damaged.

    Args:
        folder: The run's folder.
        cell: The run's cell in its study.
        arm: The run's arm in its study.
        seed: The run's seed in its study.
        name: The folder's name in the record; by default `folder`.
    """
    fields: dict[str, Any] = {"cell": cell, "arm": arm, "seed": seed, "folder": name or str(folder)}
    files = Files(folder)
    failure = failure_file(folder)
    try:
        state = files.state
        if state == "missing":  # files may be left from a process that died while it created the folder
            return _unfinished(fields, "missing", failure)
        config = files.config()
        fields["config"] = config.model_dump(mode="json")
        fields["planned_steps"] = config.federation.rounds
        fields["made"] = _made(files)
        lines = files.lines()
        fields["curve"] = _curve(lines.reports)
        fields["steps"] = len(lines.reports)
        if state == "running":
            return RunRecord(**fields, state="running")
        if state == "stopped":
            return _unfinished(fields, "stopped", failure, files.failure())
        files.split()
        summary = files.summary()
    except RayltError as error:
        fields["curve"] = {}
        return RunRecord(**fields, state="damaged", problem=str(error))
    by_client = lines.reports[-1]["by_client"] or {}
    fields["by_client"] = {kind: by_client[kind] for kind in ("local", "owned", "matched") if kind in by_client}
    return RunRecord(**fields, state="done", summary=summary)


def failure_file(folder: Path) -> Path:
    """Return the path of the file in which a study records the error that ended a run.

    The first line is the message, the second the error's code if it has one.

    The file is next to the run folder, because a run that cannot start leaves no folder.
    """
    folder = named(folder)
    return folder.parent / f"{folder.name}.failed"


def age(folder: Path) -> float | None:
    """Return the seconds since a run last wrote a step or was created, or None if there is no run."""
    for name in ("summary.json", "metrics.jsonl", "config.yaml"):
        if (folder / name).exists():
            return max(0.0, datetime.now().timestamp() - (folder / name).stat().st_mtime)
    return None


def _unfinished(
    fields: dict[str, Any], state: RecordState, file: Path, noted: tuple[str, str | None] | None = None
) -> RunRecord:
    """Return the record of an unfinished run that no process is working on.

    The run counts as failed if a study recorded an error, or if its notes end with one.

    Args:
        fields: Fields of the record.
        state: State of a run without an error.
        file: File in which a study records the error.
        noted: Message and code of the error in the run's notes.
    """
    problem, error = _recorded_failure(file) or noted or (None, None)
    return RunRecord(**fields, state=state if problem is None else "failed", problem=problem, error=error)


def _recorded_failure(file: Path) -> tuple[str, str | None] | None:
    """Return message and code of the error that a study recorded in a file, or None without the file."""
    if not file.parent.is_dir():
        return None
    with store.Folder.open(file.parent) as folder:
        if file.name not in folder.names():
            return None
        message, _, code = folder.read(file.name).decode(errors="replace").strip().partition("\n")
    return on_one_line(message), on_one_line(code) or None


def _made(files: Files) -> dict[str, Any]:
    lines = provenance.read(files.path)
    if not lines:
        return {}
    hidden = provenance.LINKS | {provenance.START}
    last = {key: value for key, value in lines[-1].items() if key not in hidden}
    plugins = {f"{each['kind']} {each['name']}": each["sha256"] for each in files.plugins() if each["sha256"]}
    codes = {"codes": sorted({str(line.get("code")) for line in lines})}
    return last | codes | ({"plugins": plugins} if plugins else {})


def _curve(reports: list[dict[str, Any]]) -> dict[str, list[Any]]:
    curve: dict[str, list[Any]] = {key: [] for key in CURVES}
    up = 0
    down = 0
    seconds = 0.0
    for report in reports:
        up += sum(call["up"] for call in report["traffic"].values())
        down += sum(call["down"] for call in report["traffic"].values())
        seconds += report["seconds"] + report["evaluation_seconds"]
        groups = report["groups"] or {}
        validation = report["figures"].get("validation") or {}
        curve["step"].append(report["step"])
        curve["accuracy"].append(report["accuracy"])
        curve["shown"].append(shown_figure(report)[1])
        for group in GROUPS:
            curve[group].append(groups.get(group))
        curve["validation"].append(validation.get("accuracy"))
        for measure, (kind, figure) in CLIENT_CURVES.items():
            curve[measure].append(((report["clients"] or {}).get(kind) or {}).get(figure))
        curve["up"].append(up)
        curve["down"].append(down)
        curve["seconds"].append(round(seconds, 3))
    return curve
