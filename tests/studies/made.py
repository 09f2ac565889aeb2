"""Run folders and records made by hand: as files they are what a run leaves, without the seconds of running it."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from raylt.core.report import Report
from raylt.data.split import Split
from raylt.runs import provenance
from raylt.runs.journal import Journal
from raylt.studies.definition import Planned
from raylt.studies.records import Record

GROUPS = ("many", "medium", "few")


def report(step: int, accuracy: float, phase: str = "round") -> Report:
    """Of a step: groups all alike, 10 bytes up and 20 down, two seconds."""
    return Report(step, phase, 1.5, 0.5, accuracy, accuracy, dict.fromkeys(GROUPS, accuracy), None,
                  {"train": {"down": 20, "up": 10, "replies": 1}})


def summary(accuracy: float, rounds: int, best: float, split: str = "ab" * 32) -> dict[str, Any]:
    figures = {"mean": accuracy, "worst_decile": accuracy}
    return {"schema": 2, "date": "2026-01-01T00:00:00+00:00", "made": {}, "method": "fedavg", "split_sha256": split,
            "model_sha256": "cd" * 32, "task": "classification", "rounds": rounds,
            "accuracy": {"last": accuracy, "last10": accuracy, "best": best}, "macro": accuracy, "miou": accuracy,
            "global_accuracy": accuracy, "global_macro": accuracy, "global_miou": accuracy, "others": {},
            "before_finish": None, "groups_before_finish": None,
            "groups": dict.fromkeys(GROUPS, accuracy), "clients": figures | {"by": {"matched": figures}},
            "bytes": {"up": 10 * rounds, "down": 20 * rounds}, "seconds": 2.0 * rounds, "seconds_per_round": 2.0,
            "figures": {}, "troubles": {}}


def write_run(folder: Path, plan: Planned, accuracies: list[float], split: int = 0, done: bool = True,
              code: str | None = None, finish: float | None = None) -> None:
    """A run folder after so many rounds; with its summary when it is done.

    Args:
        split: runs with another one have another split.
        finish: the accuracy after what follows the last round.
    """
    drawn = Split((np.array([split]),), "0" * 64, "digits", 1.0, "iid", 0.5, 0)
    with Journal.create(folder, plan.config, drawn, {"training images": "1" * 64}) as journal:
        made = {"code": code or provenance.code_sha256(), "torch": "2"}
        (folder / "provenance.jsonl").write_text(json.dumps(made) + "\n")
        for step, value in enumerate(accuracies, 1):
            journal.append(report(step, value))
        last = accuracies[-1]
        if finish is not None:
            last = finish
            journal.append(report(len(accuracies) + 1, finish, "finish"))
        if done:
            journal.conclude(summary(last, len(accuracies), max(accuracies), drawn.sha256))


def record(arm: str, seed: int, accuracy: float, cell: str = "", **more: Any) -> Record:
    """A finished run of ten rounds whose accuracy rises evenly to its last."""
    curve = [accuracy * step / 10 for step in range(1, 11)]
    config = {"federation": {"rounds": 10, "participation": 1.0}, "local": {"epochs": 1, "batch": 32},
              "evaluation": {"every": 1, "personal": 0}}
    content: dict[str, Any] = {
        "state": "done", "steps": 10, "planned_steps": 10, "config": config,
        "summary": summary(accuracy, 10, accuracy, split=f"{cell}{seed}".ljust(64, "0")),
        "curve": {"step": list(range(1, 11)), "accuracy": curve, **dict.fromkeys(GROUPS, curve),
                  "up": [10 * s for s in range(1, 11)], "down": [20 * s for s in range(1, 11)],
                  "seconds": [2.0 * s for s in range(1, 11)]},
        "made": {"codes": ["c" * 64]}}
    return Record(cell, arm, seed, f"{cell}/{arm}/seed-{seed}", **(content | more))
