"""`Record`: what a conclusion needs of one run, read off its folder; a run that is not whole says so and why.

Only a record whose state is "done" has figures that are compared. The states:

    missing     no folder
    running     a process holds it
    stopped     begun, held by nobody, can go on
    failed      its last attempt ended with an error
    damaged     its files contradict each other, were changed or cannot be read
    done        every round and the summary are there and agree
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter
from typing_extensions import TypedDict

from raylt import store
from raylt.errors import RayltError
from raylt.runs import provenance
from raylt.runs.files import Files
from raylt.typed import as_json, closed

State = Literal["missing", "running", "stopped", "failed", "damaged", "done"]
GROUPS = ("many", "medium", "few")


@closed
class _Record(TypedDict):
    """A record as JSON."""

    cell: str
    arm: str
    seed: int
    folder: str
    state: State
    problem: str | None
    steps: int
    planned_steps: int
    config: dict[str, Any]
    summary: dict[str, Any] | None
    curve: dict[str, list[float | None]]
    made: dict[str, Any]
    by_client: dict[str, list[float | None]]


_RECORD = TypeAdapter(_Record)


@dataclass(frozen=True)
class Record:
    """One run of a study.

    Attributes:
        folder: of the run, relative to the study's where it is one of a study.
        steps: committed ones; `planned_steps` without what a method does after the last round.
        problem: why it is failed or damaged.
        config: as config.yaml has it.
        summary: as summary.json has it; None unless done.
        curve: lists by step: "step", "accuracy", the groups, "validation" (accuracy on the validation part), cumulated
            "up", "down" (bytes) and "seconds"; values of rounds that were not judged are None.
        made: of the last process that worked at it, see `raylt.runs.provenance`, and under "codes" all their codes.
        by_client: accuracies of each client by id, of the last evaluation; None for one that is not judged.
    """

    cell: str
    arm: str
    seed: int
    folder: str
    state: State = "missing"
    problem: str | None = None
    steps: int = 0
    planned_steps: int = 0
    config: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] | None = None
    curve: dict[str, list[Any]] = field(default_factory=dict)
    made: dict[str, Any] = field(default_factory=dict)
    by_client: dict[str, list[float | None]] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Of all committed steps, training and evaluation."""
        return self.curve["seconds"][-1] if self.curve.get("seconds") else 0.0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, tree: Mapping[str, Any], what: str = "record") -> "Record":
        """The inverse of `to_json`.

        Raises:
            CheckpointError: it is none; `what` is what the error calls it.
        """
        return cls(**as_json(json.dumps(tree), _RECORD, what))


def read_run(folder: Path, cell: str = "", arm: str = "", seed: int = 0, name: str | None = None) -> Record:
    """The record of a run folder, whatever state it is in; nothing is raised for a broken one.

    Args:
        name: what the record calls the folder.
    """
    known: dict[str, Any] = {"cell": cell, "arm": arm, "seed": seed, "folder": name or str(folder)}
    files, failure = Files(folder), failure_file(folder)
    state = files.state
    try:
        if state == "missing":              # at most what a process left that died while it made the folder
            return _not_done(known, "missing", failure)
        config = files.config()
        known |= {"config": config.model_dump(mode="json"), "planned_steps": config.federation.rounds,
                  "made": _made(folder)}
        lines = files.lines()
        known |= {"curve": _curve(lines.reports), "steps": len(lines.reports)}
        if state == "running":
            return Record(**known, state="running")
        if state == "stopped":
            return _not_done(known, "stopped", failure)
        files.split()
        summary = files.summary()
    except RayltError as error:
        known["curve"] = {}
        return Record(**known, state="damaged", problem=str(error))
    by_client = lines.reports[-1]["by_client"] or {}
    known["by_client"] = {kind: by_client[kind] for kind in ("local", "owned", "matched") if kind in by_client}
    return Record(**known, state="done", summary=summary)


def failure_file(folder: Path) -> Path:
    """Where a study notes what a run ended with; beside the folder, which a run that cannot start does not leave."""
    return folder.with_name(folder.name + ".failed")


def _not_done(known: dict[str, Any], state: State, failure: Path) -> Record:
    """The record of a run that nobody is at, failed where a study noted so."""
    if not failure.parent.is_dir():
        return Record(**known, state=state)
    with store.Folder.open(failure.parent) as folder:
        if failure.name not in folder.names():
            return Record(**known, state=state)
        return Record(**known, state="failed", problem=folder.read(failure.name).decode(errors="replace").strip())


def age(folder: Path) -> float | None:
    """Seconds since the run last wrote a line, or was made; None where there is nothing."""
    for name in ("summary.json", "metrics.jsonl", "config.yaml"):
        if (folder / name).exists():
            return max(0.0, datetime.now().timestamp() - (folder / name).stat().st_mtime)
    return None


def _made(folder: Path) -> dict[str, Any]:
    lines = provenance.read(folder)
    return lines[-1] | {"codes": sorted({str(line.get("code")) for line in lines})} if lines else {}


def _curve(reports: list[dict[str, Any]]) -> dict[str, list[Any]]:
    keys = "step", "accuracy", *GROUPS, "validation", "up", "down", "seconds"
    curve: dict[str, list[Any]] = {key: [] for key in keys}
    up = down = 0
    seconds = 0.0
    for report in reports:
        up += sum(call["up"] for call in report["traffic"].values())
        down += sum(call["down"] for call in report["traffic"].values())
        seconds += report["seconds"] + report["evaluation_seconds"]
        groups, validation = report["groups"] or {}, report["figures"].get("validation") or {}
        for key, value in [("step", report["step"]), ("accuracy", report["accuracy"]), ("up", up), ("down", down),
                           ("seconds", round(seconds, 3)), ("validation", validation.get("accuracy")),
                           *((group, groups.get(group)) for group in GROUPS)]:
            curve[key].append(value)
    return curve
