"""Measures the accuracy of each aggregation rule under attack, overall and in the rare classes.

    python benchmarks/attackers.py [--clients 10] [--rounds 15] [--seeds 3] [--imbalance 20] [--method fedavg]
        [--record | --page]

A tenth of the clients, drawn by the seed, send what passes every check of a reply:

    boosted     their own update, ten times as long
    flipped     their own update, reversed and four times as long
    constant    the same number, 0.1, in every parameter

and otherwise take part as honest ones do. Table: accuracy on the balanced test set and of its few-shot classes after
the last round, mean over the seeds, in percent, with the half-width of a 95 % t interval where there are seeds for one.
`--record` keeps the means in benchmarks/results/attackers.json and writes the table of docs/privacy.md from it;
`--page` measures nothing and writes the table.
"""

import argparse
import tempfile
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import recorded
import torch
from scipy import stats

from raylt.config import load
from raylt.core.client import Client, Message, Reply
from raylt.core.device import one_thread
from raylt.core.method import Method
from raylt.data.task import build_task
from raylt.registry import resolve
from raylt.runs.in_process import open_in_process

RULES = None, "median", "trimmed_mean", "norm_clipped_mean"
ATTACKS = "none", "boosted", "flipped", "constant"
NAME = "attackers"
BOOST, REVERSE, CONSTANT = 10.0, -4.0, 0.1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--imbalance", type=float, default=20.0)
    parser.add_argument("--method", default="fedavg")
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--page", action="store_true")
    arguments = parser.parse_args()
    if arguments.page:
        recorded.write(NAME, table(recorded.kept(NAME)))
        return
    means: list[dict[str, Any]] = []
    print(f"{'rule':18}" + "".join(f"{attack + ': all, few':>30}" for attack in ATTACKS))
    for rule in RULES:
        cells = []
        for attack in ATTACKS:
            results = np.array([accuracies(rule, attack, seed, arguments) for seed in range(arguments.seeds)])
            cells.append(", ".join(interval(column) for column in 100 * results.T))
            all_, few = (round(float(value), 1) for value in 100 * results.mean(0))
            means.append({"rule": rule or "mean", "attack": attack, "all": all_, "few": few})
        print(f"{rule or 'mean':18}" + "".join(f"{cell:>30}" for cell in cells), flush=True)
    if arguments.record:
        figures = {name: getattr(arguments, name) for name in ("clients", "rounds", "seeds", "imbalance", "method")}
        recorded.keep(NAME, {"recorded": date.today().isoformat()} | figures | {"cells": means})
        recorded.write(NAME, table(recorded.kept(NAME)))


def table(figures: dict[str, Any]) -> str:
    """Return a table of accuracy on all and on few-shot classes, in percent, as means over the seeds."""
    cells = {(cell["rule"], cell["attack"]): f"{cell['all']:.1f} / {cell['few']:.1f}" for cell in figures["cells"]}
    names = ["mean" if rule is None else rule for rule in RULES]
    rows = [[name if name == "mean" else f"`{name}`", *(cells[name, attack] for attack in ATTACKS)] for name in names]
    return recorded.table_of(
        ["rule", "no hostile client", f"boosted x {BOOST:g}", f"flipped x {-REVERSE:g}", "constant"], rows
    )


def interval(values: np.ndarray) -> str:
    """Return the mean of values and the half-width of its 95 % t interval."""
    if len(values) < 2:
        return f"{values.mean():.1f}"
    return f"{values.mean():.1f} ± {stats.t.ppf(0.975, len(values) - 1) * stats.sem(values):.1f}"


def accuracies(rule: str | None, attack: str, seed: int, arguments: argparse.Namespace) -> tuple[float, float]:
    """Train one run; return its accuracy on all classes and on the few-shot classes."""
    setup = resolve(
        load(
            None,
            [
                f"method={arguments.method}",
                f"seed={seed}",
                f"data.seed={seed}",
                f"data.clients={arguments.clients}",
                f"data.imbalance={arguments.imbalance:g}",
                f"federation.rounds={arguments.rounds}",
                "local.epochs=2",
                "local.batch=16",
                f"evaluation.every={arguments.rounds}",
                f"federation.robust={rule or 'null'}",
            ],
        )
    )
    task = build_task(setup.config.data)
    holders = [k for k, size in enumerate(task.sizes) if size]
    hostile = np.random.default_rng(seed).choice(holders, round(len(holders) / 10), replace=False)
    method = hostile_method(type(setup.method), attack, {int(id) for id in hostile})(**setup.method.model_dump())
    with tempfile.TemporaryDirectory() as folder, one_thread():
        experiment = open_in_process(replace(setup, method=method), task, Path(folder), None)
        reports = []
        while not experiment.done:
            reports.append(experiment.step())
    report = reports[-1]
    assert report.accuracy is not None
    assert report.groups is not None
    few = report.groups["few"]
    return report.accuracy, float("nan") if few is None else few


def hostile_method(kind: type[Method], attack: str, hostile: set[int]) -> type[Method]:
    """Return the method with some hostile clients, which send other models than they trained."""

    def train(self: Method, client: Client, message: Message) -> Reply:
        reply = kind.train(self, client, message)
        if client.id not in hostile or attack == "none":
            return reply
        model = {}
        for name, value in reply.tree["model"].items():
            change = value - message["model"][name]
            model[name] = (
                value
                if not value.is_floating_point()
                else torch.full_like(value, CONSTANT)
                if attack == "constant" and "running" not in name
                else message["model"][name] + (BOOST if attack == "boosted" else REVERSE) * change
                if "running" not in name
                else value
            )
        return replace(reply, tree=reply.tree | {"model": model})

    return type(kind.__name__, (kind,), {"train": train, "__module__": kind.__module__})


if __name__ == "__main__":
    main()
