"""Run folders and records made without training, with the same files as real runs."""

import json
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import numpy as np

from raylt.core.report import RoundReport
from raylt.data.splits.split import Split
from raylt.runs.folder import provenance
from raylt.runs.folder.writer import Journal
from raylt.studies.definition import Planned
from raylt.studies.records.record import RunRecord
from raylt.typed_json import hash_json

GROUPS = ("many", "medium", "few")


def report(step: int, accuracy: float, phase: Literal["round", "finish"] = "round") -> RoundReport:
    """Return the report of a step with equal groups, 10 bytes up, 20 bytes down and two seconds."""
    return RoundReport(
        step=step,
        phase=phase,
        seconds=1.5,
        evaluation_seconds=0.5,
        accuracy=accuracy,
        global_accuracy=accuracy,
        groups=dict.fromkeys(GROUPS, accuracy),
        clients={"matched": {"mean": accuracy, "worst_decile": accuracy}},
        traffic={"train": {"down": 20, "up": 10, "replies": 1}},
    )


def summary(
    accuracy: float,
    rounds: int,
    best: float,
    split: str = "ab" * 32,
    last10: float | None = None,
    steps: int | None = None,
) -> dict[str, Any]:
    steps = steps or rounds
    figures = {"mean": accuracy, "worst_decile": accuracy}
    return {
        "schema": 2,
        "date": "2026-01-01T00:00:00+00:00",
        "made": {},
        "method": "fedavg",
        "split_sha256": split,
        "model_sha256": "cd" * 32,
        "task": "classification",
        "rounds": rounds,
        "accuracy": {"last": accuracy, "last10": accuracy if last10 is None else last10, "best": best},
        "macro": accuracy,
        "miou": accuracy,
        "global_accuracy": accuracy,
        "global_macro": accuracy,
        "global_miou": accuracy,
        "others": {},
        "before_finish": None,
        "groups_before_finish": None,
        "groups": dict.fromkeys(GROUPS, accuracy),
        "clients": figures | {"by": {"matched": figures}},
        "bytes": {"up": 10 * steps, "down": 20 * steps},
        "seconds": 2.0 * steps,
        "seconds_per_round": 2.0,
        "figures": {},
        "troubles": {},
    }


def write_run(
    folder: Path,
    plan: Planned,
    accuracies: list[float],
    split: int = 0,
    done: bool = True,
    code: str | None = None,
    finish: float | None = None,
    plugin: str | None = None,
) -> None:
    """Write a run folder with one round for each accuracy, and a summary if it is done.

    Args:
        split: runs with different numbers have different splits.
        finish: accuracy after the last phase, which follows the last round.
        plugin: hash of a model "own" that a plugin brought.
    """
    origins = [] if plugin is None else [{"kind": "model", "name": "own", "origin": "own.py", "sha256": plugin}]
    drawn = Split((np.array([split]),), "0" * 64, "digits", 1.0, "iid", 0.5, 0)
    with Journal.create(folder, plan.config, drawn, {"training images": "1" * 64}, origins) as journal:
        made = {"code": code or provenance.code_sha256(), "torch": "2"}
        (folder / "provenance.jsonl").write_text(json.dumps(made) + "\n")
        for step, value in enumerate(accuracies, 1):
            journal.append(report(step, value))
        last = accuracies[-1]
        if finish is not None:
            last = finish
            journal.append(report(len(accuracies) + 1, finish, "finish"))
        if done:
            steps = len(accuracies) + (finish is not None)
            best = max([*accuracies, last])
            last10 = fmean(accuracies[-10:])
            figures = summary(last, len(accuracies), best, drawn.sha256, last10, steps)
            journal.write_summary(figures | {"method": plan.config.method["name"]})


def record(arm: str, seed: int, accuracy: float, cell: str = "", **more: Any) -> RunRecord:
    """Return a finished run of ten rounds whose accuracy rises evenly to `accuracy`."""
    curve = [accuracy * step / 10 for step in range(1, 11)]
    config = {
        "seed": seed,
        "federation": {"rounds": 10, "participation": 1.0},
        "local": {"epochs": 1, "batch": 32},
        "evaluation": {"every": 1, "personal": 0},
    }
    content: dict[str, Any] = {
        "state": "done",
        "steps": 10,
        "planned_steps": 10,
        "config": config,
        "summary": summary(accuracy, 10, accuracy, hash_json([cell, seed]), fmean(curve)),
        "curve": {
            "step": list(range(1, 11)),
            "accuracy": curve,
            **dict.fromkeys(GROUPS, curve),
            "up": [10 * s for s in range(1, 11)],
            "down": [20 * s for s in range(1, 11)],
            "seconds": [2.0 * s for s in range(1, 11)],
        },
        "made": {"codes": ["c" * 64]},
    }
    return RunRecord(cell, arm, seed, f"{cell}/{arm}/seed-{seed}", **(content | more))
