"""Measures the accuracy lost to noise on one-shot statistics, by epsilon, overall and in the few-shot classes.

    python benchmarks/privacy_trade.py [--seeds 3] [--rounds 30] [--clip 3] [--picture trade.png] [--record | --page]

Rounds are run once for each seed, without noise; then SFD, CCVR and FedNCM finish on their statistics for each epsilon
(delta = 1e-4), once with all of the noise at every client and once with shares of it in a secure sum. Epsilon covers
the statistics of one finish alone: neither the rounds before, nor that this script finishes many times. All seeds share
one split of the digits. `--record` keeps the figures in benchmarks/results/privacy_trade.json and writes the table of
docs/privacy.md from it; `--page` measures nothing and writes the table.
"""

import argparse
import tempfile
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import recorded

from raylt.config import load
from raylt.core.checkpoint import checkpoint
from raylt.core.device import one_thread
from raylt.data.task import build_task
from raylt.registry import resolve
from raylt.runs.in_process import open_in_process

METHODS = {
    "sfd": [
        "method=sfd",
        "method.rf_dim=500",
        "method.synthesis_steps=20",
        "method.m_min=200",
        "method.m_max=400",
        "method.retrain_epochs=20",
    ],
    "ccvr": ["method=ccvr", "method.virtual=200", "method.retrain_epochs=20"],
    "fedncm": ["method=fedncm"],
}
EPSILONS = (None, 1000.0, 300.0, 100.0, 30.0, 10.0, 3.0, 1.0)
NAME = "privacy_trade"
Cell = tuple[str, bool, float | None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--clip", type=float, default=3.0)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--page", action="store_true")
    arguments = parser.parse_args()
    if arguments.page:
        recorded.write(NAME, table(recorded.kept(NAME)))
        return
    results: dict[Cell, list[tuple[float, float]]] = {}
    for seed in range(arguments.seeds):
        for method, settings in METHODS.items():
            for cell, figures in finishes(
                method,
                [
                    *settings,
                    f"seed={seed}",
                    f"federation.rounds={arguments.rounds}",
                    "local.batch=16",
                    f"privacy.clip={arguments.clip:g}",
                    f"evaluation.every={arguments.rounds}",
                ],
            ).items():
                results.setdefault(cell, []).append(figures)
    cells = [
        {
            "method": method,
            "secure": secure,
            "epsilon": epsilon,
            "all": round(float(all_), 1),
            "few": round(float(few), 1),
        }
        for (method, secure, epsilon), figures in results.items()
        for all_, few in [100 * np.array(figures).mean(0)]
    ]
    figures = {
        "recorded": date.today().isoformat(),
        "seeds": arguments.seeds,
        "rounds": arguments.rounds,
        "clip": arguments.clip,
        "cells": cells,
    }
    print(table(figures))
    if arguments.record:
        recorded.keep(NAME, figures)
        recorded.write(NAME, table(figures))
    if arguments.picture:
        draw(results, arguments.picture)


def finishes(method: str, settings: list[str]) -> dict[Cell, tuple[float, float]]:
    """Run the last phase for each cell after the same rounds; return the accuracy on all and on few-shot classes."""
    setup = resolve(load(None, [*settings, "privacy.delta=1e-4"]))
    task, figures = build_task(setup.config.data), {}
    with tempfile.TemporaryDirectory() as folder, one_thread():
        trained = open_in_process(setup, task, Path(folder), None)
        for _ in range(setup.config.federation.rounds):
            report = trained.step()
            if trained.server.round == setup.config.federation.rounds:
                trained.save(report)
        saved, _ = checkpoint.latest(Path(folder) / "checkpoints")
        for secure in (False, True):
            for epsilon in EPSILONS:
                config = load(
                    None,
                    [
                        *settings,
                        "privacy.delta=1e-4",
                        f"federation.secure={str(secure).lower()}",
                        f"privacy.epsilon={'null' if epsilon is None else f'{epsilon:g}'}",
                    ],
                )
                judged = open_in_process(replace(setup, config=config), task, Path(folder), saved).step()
                assert judged.accuracy is not None
                assert judged.groups is not None
                figures[method, secure, epsilon] = judged.accuracy, judged.groups["few"] or 0.0
    return figures


def table(figures: dict[str, Any]) -> str:
    """Return a table of accuracy on all and on few-shot classes, in percent, as means over the seeds."""
    cells = {
        (cell["method"], cell["secure"], cell["epsilon"]): f"{cell['all']:.1f} / {cell['few']:.1f}"
        for cell in figures["cells"]
    }
    rows = [
        [
            f"`{method}`, {'in a secure sum' if secure else 'at each client'}",
            *(cells[method, secure, epsilon] for epsilon in EPSILONS),
        ]
        for method in METHODS
        for secure in (False, True)
    ]
    return recorded.table_of(
        ["noise", *("none" if epsilon is None else f"ε = {epsilon:g}" for epsilon in EPSILONS)], rows
    )


def draw(results: dict[Cell, list[tuple[float, float]]], file: Path) -> None:
    """Draw few-shot accuracy over epsilon, solid if every client adds all noise, dashed for a secure sum."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.subplots()
    for number, method in enumerate(METHODS):
        for secure in (False, True):
            few = [100 * np.array(results[method, secure, epsilon]).mean(0)[1] for epsilon in EPSILONS[1:]]
            axes.plot(
                EPSILONS[1:],
                few,
                color=f"C{number}",
                linestyle="--" if secure else "-",
                marker="o",
                ms=3,
                label=f"{method}, {'secure sum' if secure else 'each client'}",
            )
        without = 100 * np.array(results[method, False, None]).mean(0)[1]
        axes.axhline(without, color=f"C{number}", linewidth=0.8, linestyle=":")
    axes.set(
        xscale="log", xlabel="epsilon of the statistics (delta = 1e-4); dotted: no noise", ylabel="few-shot accuracy, %"
    )
    axes.legend(fontsize=7)
    figure.savefig(file, dpi=130)


if __name__ == "__main__":
    main()
