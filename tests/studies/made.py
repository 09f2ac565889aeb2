"""Run folders and records made by hand: as files they are what a run leaves, without the seconds of running it."""

import json
from pathlib import Path
from typing import Any

import yaml

from raylt.runs import provenance
from raylt.studies.definition import Planned
from raylt.studies.records import Record

GROUPS = ("many", "medium", "few")


def line(step: int, accuracy: float, phase: str = "round") -> dict[str, Any]:
    """A line of metrics.jsonl: groups all alike, 10 bytes up and 20 down, two seconds."""
    return {"schema": 1, "date": "2026-01-01T00:00:00+00:00", "step": step, "phase": phase, "seconds": 1.5,
            "evaluation_seconds": 0.5, "accuracy": accuracy, "groups": dict.fromkeys(GROUPS, accuracy),
            "traffic": {"train": {"down": 20, "up": 10, "replies": 1}}}


def summary(accuracy: float, rounds: int, best: float, split: str = "ab" * 32) -> dict[str, Any]:
    figures = {"mean": accuracy, "worst_decile": accuracy}
    return {"schema": 1, "method": "fedavg", "split_sha256": split, "rounds": rounds,
            "accuracy": {"last": accuracy, "last10": accuracy, "best": best}, "macro": accuracy, "miou": accuracy,
            "groups": dict.fromkeys(GROUPS, accuracy), "clients": figures | {"by": {"matched": figures}},
            "bytes": {"up": 10 * rounds, "down": 20 * rounds}, "seconds": 2.0 * rounds}


def write_run(folder: Path, plan: Planned, accuracies: list[float], split: str = "ab" * 32, done: bool = True,
              code: str | None = None) -> None:
    """A run folder after so many rounds; with its summary when it is done."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(plan.config.model_dump(mode="json"), sort_keys=False))
    (folder / "split.json").write_text(json.dumps({"sha256": split}))
    made = {"code": code or provenance.code_sha256(), "torch": "2"}
    (folder / "provenance.jsonl").write_text(json.dumps(made) + "\n")
    lines = [json.dumps(line(step, value)) + "\n" for step, value in enumerate(accuracies, 1)]
    (folder / "metrics.jsonl").write_text("".join(lines))
    if done:
        content = summary(accuracies[-1], len(accuracies), max(accuracies), split)
        (folder / "summary.json").write_text(json.dumps(content))


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
