"""`Record`: what a conclusion needs of one run, read off its folder; a run that is not whole says so and why.

Only a record whose state is "done" has figures that are compared. The states:

    missing     no folder
    running     a process holds it
    stopped     begun, held by nobody, can go on
    failed      its last attempt ended with an error
    damaged     its files contradict each other or cannot be read
    done        every round and the summary are there and agree
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import yaml

from raylt.runs import journal, provenance

State = Literal["missing", "running", "stopped", "failed", "damaged", "done"]
GROUPS = ("many", "medium", "few")


@dataclass(frozen=True)
class Record:
    """One run of a study.

    Attributes:
        folder: of the run, relative to the study's where it is one of a study.
        steps: committed ones; `planned_steps` without what a method does after the last round.
        problem: why it is failed or damaged.
        config: as config.yaml has it.
        summary: as summary.json has it; None unless done.
        curve: lists by step: "step", "accuracy", the groups, cumulated "up", "down" (bytes) and "seconds"; values of
            rounds that were not judged are None.
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
    def from_json(cls, tree: Mapping[str, Any]) -> "Record":
        return cls(**tree)


def read_run(folder: Path, cell: str = "", arm: str = "", seed: int = 0, name: str | None = None) -> Record:
    """The record of a run folder, whatever state it is in; nothing is raised for a broken one.

    Args:
        name: what the record calls the folder.
    """
    known: dict[str, Any] = {"cell": cell, "arm": arm, "seed": seed, "folder": name or str(folder)}
    failure = failure_file(folder)
    if not (folder / "config.yaml").is_file():          # at most what a process left that died while it made the folder
        if failure.is_file():
            return Record(**known, state="failed", problem=failure.read_text().strip())
        return Record(**known)
    try:
        known["config"] = yaml.safe_load((folder / "config.yaml").read_text())
        known["planned_steps"] = known["config"]["federation"]["rounds"]
        known["made"] = _made(folder)
        held = journal.held(folder)
        reports = _reports(folder, forgiving=held or not (folder / "summary.json").exists())
        known["curve"] = _curve(reports)
        known["steps"] = len(reports)
        if held:
            return Record(**known, state="running")
        if not (folder / "summary.json").exists():
            if failure.is_file():
                return Record(**known, state="failed", problem=failure.read_text().strip())
            return Record(**known, state="stopped")
        summary = json.loads((folder / "summary.json").read_text())
        _agree(known["config"], summary, reports, folder)
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError, yaml.YAMLError) as error:
        text = " ".join(str(error).split())
        if isinstance(error, KeyError):
            text = f"{text} is missing"
        known["curve"] = {}
        return Record(**known, state="damaged", problem=text)
    by_client = reports[-1].get("by_client") or {}
    known["by_client"] = {kind: by_client[kind] for kind in ("owned", "matched") if kind in by_client}
    return Record(**known, state="done", summary=summary)


def failure_file(folder: Path) -> Path:
    """Where a study notes what a run ended with; beside the folder, which a run that cannot start does not leave."""
    return folder.with_name(folder.name + ".failed")


def age(folder: Path) -> float | None:
    """Seconds since the run last wrote a line, or was made; None where there is nothing."""
    for name in ("summary.json", "metrics.jsonl", "config.yaml"):
        if (folder / name).exists():
            return max(0.0, datetime.now().timestamp() - (folder / name).stat().st_mtime)
    return None


def _made(folder: Path) -> dict[str, Any]:
    lines = provenance.read(folder)
    return lines[-1] | {"codes": sorted({str(line.get("code")) for line in lines})} if lines else {}


def _reports(folder: Path, forgiving: bool) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl.

    Args:
        forgiving: whether a last line that was cut off is nothing to speak of, as in a run that is not done.

    Raises:
        ValueError: a line cannot be read, or is not that of the next step.
    """
    file = folder / "metrics.jsonl"
    reports: list[dict[str, Any]] = []
    lines = file.read_text().splitlines() if file.exists() else []
    for number, line in enumerate(lines, 1):
        try:
            report = json.loads(line)
        except ValueError:
            if forgiving and number == len(lines):
                break
            raise ValueError(f"metrics.jsonl, line {number} is not JSON") from None
        if report["step"] != number:
            raise ValueError(f"metrics.jsonl, line {number} is of step {report['step']}")
        reports.append(report)
    return reports


def _curve(reports: list[dict[str, Any]]) -> dict[str, list[Any]]:
    curve: dict[str, list[Any]] = {key: [] for key in ("step", "accuracy", *GROUPS, "up", "down", "seconds")}
    up = down = 0
    seconds = 0.0
    for report in reports:
        up += sum(call["up"] for call in report["traffic"].values())
        down += sum(call["down"] for call in report["traffic"].values())
        seconds += report["seconds"] + report["evaluation_seconds"]
        groups = report["groups"] or {}
        for key, value in [("step", report["step"]), ("accuracy", report["accuracy"]), ("up", up), ("down", down),
                           ("seconds", round(seconds, 3)), *((group, groups.get(group)) for group in GROUPS)]:
            curve[key].append(value)
    return curve


def _agree(config: dict[str, Any], summary: dict[str, Any], reports: list[dict[str, Any]], folder: Path) -> None:
    """Raises a ValueError where the files of a finished run contradict each other."""
    rounds = sum(report["phase"] == "round" for report in reports)
    if rounds != config["federation"]["rounds"]:
        raise ValueError(f"metrics.jsonl has {rounds} of {config['federation']['rounds']} rounds beside a summary.json")
    if summary["rounds"] != rounds:
        raise ValueError(f"summary.json is of {summary['rounds']} rounds, metrics.jsonl of {rounds}")
    if summary["accuracy"]["last"] != reports[-1]["accuracy"]:
        raise ValueError(f"summary.json has accuracy {summary['accuracy']['last']}, the last line of metrics.jsonl "
                         f"{reports[-1]['accuracy']}")
    split = json.loads((folder / "split.json").read_text())
    if split["sha256"] != summary["split_sha256"]:
        raise ValueError(f"split.json is {split['sha256'][:12]}, summary.json is of {summary['split_sha256'][:12]}")
