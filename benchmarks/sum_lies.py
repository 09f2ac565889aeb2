"""Measures the damage of one hostile client of ten, for each lie about its features and each robust rule.

The client has its true weight.

    python benchmarks/sum_lies.py [--clients 10] [--rounds 10] [--seeds 1] [--methods NAME ...] [--record | --page]

As in hostile_sums.py, honest clients train, and then one hostile client sends statistics too. It counts its samples
truly and lies about their features. Table: accuracy on all classes without the client's lie, and the points that the
lie takes from it under the same rule, or that it was rejected; means over the seeds. `--record` and `--page` are those
of hostile_sums.py.
"""

import argparse
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import hostile_sums
import numpy as np
import recorded
import torch

from raylt import tree
from raylt.core.checkpoint import checkpoint
from raylt.core.client import Client, Message, Reply
from raylt.core.device import one_thread
from raylt.core.method import Method
from raylt.data.task import Task, build_task
from raylt.ops.moments import pack, unpack
from raylt.registry import resolve
from raylt.runs.in_process import open_in_process

NAME = "sum_lies"
METHODS = "ccvr", "fed3r", "fedncm", "bpfed"


def main() -> None:
    arguments = hostile_sums.options(__doc__, METHODS).parse_args()
    if not arguments.page:
        cells = [cell for name in arguments.methods for cell in measure(name, arguments)]
        if not arguments.record:
            return
        hostile_sums.keep(NAME, arguments, cells)
    recorded.write(NAME, table(recorded.kept(NAME)))


def measure(name: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Train once per seed, then run the last phase with each rule and each lie."""
    results: dict[tuple[str, str], list[float | None]] = {}
    for seed in range(arguments.seeds):
        with tempfile.TemporaryDirectory() as folder, one_thread():
            config = hostile_sums.settings(name, seed, arguments)
            task = build_task(config.data)
            trained = open_in_process(resolve(config), task, Path(folder), None)
            report = trained.step()
            while trained.server.round < arguments.rounds:
                report = trained.step()
            trained.save(report)
            for rule in hostile_sums.RULES:
                for lie in ("none", *LIES):
                    accuracy = finished(name, seed, rule, lie, arguments, task, Path(folder))
                    results.setdefault((rule or "sum", lie), []).append(accuracy)
                    print(name, seed, rule, lie, accuracy, flush=True)
    return [
        {
            "method": name,
            "rule": rule,
            "lie": lie,
            "accuracy": None if None in values else round(100 * float(np.mean(values)), 1),  # pyright: ignore
        }
        for (rule, lie), values in results.items()
    ]


def finished(
    name: str, seed: int, rule: str | None, lie: str, arguments: argparse.Namespace, task: Task, folder: Path
) -> float | None:
    """Run the last phase with one lying client; return the accuracy, or None if the client's reply is rejected."""
    setup = resolve(hostile_sums.settings(name, seed, arguments, rule))
    holders = [k for k, size in enumerate(task.sizes) if size]
    liar = int(np.random.default_rng(seed).permutation(holders)[0])
    method = setup.method
    if lie != "none":
        method = lying_method(type(method), liar, LIES[lie])(**method.model_dump())
    saved, _ = checkpoint.latest(folder / "checkpoints")
    experiment = open_in_process(replace(setup, method=method), task, folder, saved)
    report = experiment.step()
    assert experiment.done
    return None if report.rejected else report.accuracy


def lying_method(kind: type[Method], liar: int, lie: Callable[[tree.Tree], tree.Tree]) -> type[Method]:
    """Return the method with a client that lies about its features."""

    def lying(honest: Callable[..., Reply]) -> Callable[..., Reply]:
        def statistics(self: Method, client: Client, message: Message) -> Reply:
            reply = honest(self, client, message)
            return replace(reply, tree=lie(reply.tree)) if client.id == liar else reply

        return statistics

    names = {name: lying(getattr(kind, name)) for name in ("statistics", "covariance") if hasattr(kind, name)}
    return type(kind.__name__, (kind,), names | {"__module__": kind.__module__})


def times(factor: float, parts: tree.Tree) -> tree.Tree:
    """Scale the sums over samples as if all features were `factor` times as long."""
    if "classes" in parts:
        powers = {"z": factor, "zz": factor**2}
        return {
            "classes": {
                c: {name: value if name == "n" else powers[name] * value for name, value in of_class.items()}
                for c, of_class in parts["classes"].items()
            }
        }
    if "scatter" in parts:
        return parts | {"scatter": factor**2 * parts["scatter"]}
    a, b = unpack(parts["a"], len(parts["b"])), parts["b"].clone()
    a[:-1] *= factor
    a[:, :-1] *= factor
    b[:-1] *= factor
    return {"a": pack(a), "b": b}


def exchanged(parts: tree.Tree) -> tree.Tree:
    """Return the sums over samples with each label exchanged for the next label that the client has."""
    if "classes" in parts:
        names = list(parts["classes"])
        return {"classes": dict(zip([*names[1:], names[0]], parts["classes"].values(), strict=True))}
    if "scatter" in parts:
        return parts  # which has no classes
    b = parts["b"].clone()
    present = b[-1].nonzero().flatten()
    b[:, present] = b[:, torch.roll(present, 1)]
    return parts | {"b": b}


LIES: dict[str, Callable[[tree.Tree], tree.Tree]] = {
    "features x -10": partial(times, -10.0),
    "features x -1": partial(times, -1.0),
    "features x 10": partial(times, 10.0),
    "classes exchanged": exchanged,
}


def table(figures: dict[str, Any]) -> str:
    """Return a table of the accuracy without a lie, and of the points that each lie takes from it."""
    cells = {(cell["method"], cell["rule"], cell["lie"]): cell["accuracy"] for cell in figures["cells"]}
    rows = []
    for method, rule in dict.fromkeys((method, rule) for method, rule, _ in cells):
        honest = cells[method, rule, "none"]
        lost = [cells[method, rule, lie] for lie in LIES]
        points = ["rejected" if value is None else f"{value - honest:+.1f}" for value in lost]
        rows.append([f"`{method}`", rule if rule == "sum" else f"`{rule}`", f"{honest:.1f}", *points])
    return recorded.table_of(["method", "rule", "no lie", *LIES], rows)


if __name__ == "__main__":
    main()
