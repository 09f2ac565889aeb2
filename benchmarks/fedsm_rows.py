"""FedAvg, FedSM (semantic mixup) with each of its parts alone, and Table III's partners, over one split.

    python benchmarks/fedsm_rows.py raylt/recipes/fedsm/cifar10_if100_alpha0.5_k20.yaml [SETTING=VALUE ...] --out FOLDER

Rows that differ only in the last `method.rounds` rounds, in which classifiers are re-trained, go on from one checkpoint
taken before these, so the table costs two long runs, not six: without distillation and with it. The figures of a row
are those that `raylt run` gives for it.

Prints a line per row: accuracy, and that of the many-, medium- and few-shot classes; writes each row's last report to
FOLDER/ROW.json; a row whose file is there is not run again.
"""

import argparse
import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from raylt.config import Config, load
from raylt.core import checkpoint
from raylt.core.experiment import Experiment
from raylt.core.host import Host
from raylt.core.in_process import LocalFleet
from raylt.core.report import Report
from raylt.data.task import build_task
from raylt.errors import ConfigError, RayltError
from raylt.methods import make_method
from raylt.methods.fedsm.method import FedSM
from raylt.registry import resolve

# first stages, and the rows that go on from each
STAGES: dict[str, tuple[dict[str, Any], dict[str, dict[str, Any]]]] = {
    "plain": ({"kd": 0.0}, {"FedAvg": {"rounds": 0}, "mixup": {}}),
    "distilled": ({}, {"distillation": {"rounds": 0}, "both": {}, "deterministic": {"partner": "deterministic"},
                       "random": {"partner": "random"}}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("settings", nargs="*")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--stage", choices=STAGES, help="only this one")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.out.mkdir(parents=True, exist_ok=True)
    config = load(arguments.recipe, arguments.settings)
    for stage in [arguments.stage] if arguments.stage else STAGES:
        measure(stage, config, arguments.out)
        for name in STAGES[stage][1]:
            show(name, json.loads(file_of(arguments.out, name).read_text()))


def file_of(out: Path, row: str) -> Path:
    return out / f"{row}.json"


def measure(stage: str, config: Config, out: Path) -> None:
    """Takes the rows of a stage that have no file yet from their common checkpoint to the last round."""
    first, rows = STAGES[stage]
    rows = {name: row for name, row in rows.items() if not file_of(out, name).exists()}
    if not rows:
        return
    first = {**config.method, **first}
    method = make_method(first)
    if not isinstance(method, FedSM):
        raise ConfigError(f"method = {method.name}: this compares the parts of fedsm")
    last, common = method.rounds, config.federation.rounds - method.rounds
    if last < 1 or common < 1:
        raise ConfigError(f"method.rounds = {last}: must be from 1 to federation.rounds - 1, "
                          f"{config.federation.rounds - 1}")
    task, device = build_task(config.data), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    setup = resolve(config.model_copy(update={"method": first}))
    method.prepare(task, config, setup.check(task.facts))
    fleet = LocalFleet(config, task, Host(setup, task.facts, task.test, device))
    with tempfile.TemporaryDirectory() as folder:
        experiment = Experiment(setup, task, fleet, device, Path(folder))
        reports = [told(stage, experiment.step()) for _ in range(common)]
        experiment.save(reports[-1])
        saved = checkpoint.at(Path(folder) / "checkpoints", common)
        for name, row in rows.items():
            experiment.method = make_method(first | row)
            experiment.load(saved)
            reports = [told(name, experiment.step()) for _ in range(last)]
            file_of(out, name).write_text(json.dumps(asdict(reports[-1]), indent=1))


def told(row: str, report: Report) -> Report:
    figures = {name: figure for name, figure in report.figures.items() if name != "teacher"}
    print(f"{row} {report.step}  {figures}  {report.seconds:.1f} s  {report.accuracy}", flush=True)
    return report


def show(name: str, report: dict[str, Any]) -> None:
    groups = "  ".join(f"{group} {100 * value:6.2f}" for group, value in report["groups"].items() if value is not None)
    print(f"{name:14s} {100 * report['accuracy']:6.2f}  {groups}", flush=True)


if __name__ == "__main__":
    try:
        main()
    except RayltError as error:
        raise SystemExit(f"error: {error}") from None
