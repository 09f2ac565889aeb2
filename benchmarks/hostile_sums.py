"""Measures how hostile clients degrade methods that sum over samples, for each robust rule and class group.

    python benchmarks/hostile_sums.py [--clients 10] [--rounds 10] [--seeds 1] [--imbalance 20] [--alpha 1]
        [--record | --page | --picture FILE]

Each method's rounds are trained once by honest clients with the plain mean. Then the method takes its statistics from
all clients, of which 0, 1 or 2 are hostile. They claim no wrong count, which would be rejected: they send what features
of -10 times their own would give. The encoder ends in a layer that hides its ReLU, behind which that is rejected too
(sum_lies.py). Table: accuracy on the balanced test set for the many-, medium- and few-shot classes, means over the
seeds, in percent.
`--record` keeps the means in benchmarks/results/hostile_sums.json and writes the table of docs/privacy.md from it;
`--page` measures nothing and writes the table; `--picture` draws the accuracy of the few-shot classes.
"""

import argparse
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import recorded
from torch import Tensor, nn

from raylt import tree
from raylt.config import load
from raylt.core.checkpoint import checkpoint
from raylt.core.client import Client, Message, Reply
from raylt.core.device import one_thread
from raylt.core.method import Method
from raylt.data.task import Task, TaskSpec, build_task
from raylt.models import SplitModel
from raylt.ops.moments import pack, unpack
from raylt.registry import resolve
from raylt.runs.in_process import open_in_process

RULES = None, "median", "trimmed_mean", "norm_clipped_mean"
HOSTILE = 0, 1, 2
GROUPS = "many", "medium", "few"
SMALL = {"virtual": 200, "retrain_epochs": 20}
METHODS: dict[str, dict[str, Any]] = {
    "ccvr": SMALL,
    "sfd": {"m_min": 160, "m_max": 300, "retrain_epochs": 20, "synthesis_steps": 20, "rf_dim": 512},
    "fed3r": {},
    "fedncm": {},
    "bpfed": {},
}
NAME = "hostile_sums"
FACTOR = -10.0


def main() -> None:
    parser = options(__doc__, METHODS)
    parser.add_argument("--picture", type=Path)
    arguments = parser.parse_args()
    if arguments.picture:
        draw(recorded.kept(NAME), arguments.picture)
        return
    if arguments.page:
        recorded.write(NAME, table(recorded.kept(NAME)))
        return
    cells = [cell for name in arguments.methods for cell in measure(name, arguments)]
    if arguments.record:
        keep(NAME, arguments, cells)
        recorded.write(NAME, table(recorded.kept(NAME)))


def options(about: str | None, methods: Iterable[str]) -> argparse.ArgumentParser:
    """Return the command line parser that this script and sum_lies.py share."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--imbalance", type=float, default=20.0)
    parser.add_argument("--alpha", type=float, default=1.0)
    parser.add_argument("--methods", nargs="*", default=list(methods))
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--page", action="store_true")
    return parser


def keep(name: str, arguments: argparse.Namespace, cells: list[dict[str, Any]]) -> None:
    """Store the measured figures with the options of the measurement."""
    figures = {name: getattr(arguments, name) for name in ("clients", "rounds", "seeds", "imbalance", "alpha")}
    recorded.keep(name, {"recorded": date.today().isoformat()} | figures | {"cells": cells})


def measure(name: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Train once per seed, then run the last phase with each rule and each number of hostile clients."""
    results: dict[tuple[str, int], list[list[float]]] = {}
    for seed in range(arguments.seeds):
        with tempfile.TemporaryDirectory() as folder, one_thread():
            task = build_task(settings(name, seed, arguments).data)
            trained = open_in_process(resolve(settings(name, seed, arguments)), task, Path(folder), None)
            report = trained.step()
            while trained.server.round < arguments.rounds:
                report = trained.step()
            trained.save(report)
            for rule in RULES:
                for hostile in HOSTILE:
                    shares = finished(name, seed, rule, hostile, arguments, task, Path(folder))
                    results.setdefault((rule or "sum", hostile), []).append(shares)
                    print(name, seed, rule, hostile, shares, flush=True)
    return [
        {"method": name, "rule": rule, "hostile": hostile, "groups": (100 * np.mean(shares, 0)).round(1).tolist()}
        for (rule, hostile), shares in results.items()
    ]


def settings(name: str, seed: int, arguments: argparse.Namespace, rule: str | None = None) -> Any:
    """Return the configuration of one cell of the table."""
    return load(
        None,
        [
            f"method={name}",
            *(f"method.{field}={value}" for field, value in METHODS[name].items()),
            f"seed={seed}",
            f"data.seed={seed}",
            f"data.clients={arguments.clients}",
            f"data.imbalance={arguments.imbalance:g}",
            f"data.alpha={arguments.alpha:g}",
            f"federation.rounds={arguments.rounds}",
            "local.epochs=2",
            "local.batch=16",
            f"evaluation.every={arguments.rounds}",
            f"federation.robust={rule or 'null'}",
        ],
    )


def finished(
    name: str, seed: int, rule: str | None, hostile: int, arguments: argparse.Namespace, task: Task, folder: Path
) -> list[float]:
    """Run the last phase with hostile clients; return the accuracy of each class group."""
    setup = resolve(settings(name, seed, arguments, rule))
    holders = [k for k, size in enumerate(task.sizes) if size]
    liars = set(np.random.default_rng(seed).permutation(holders)[:hostile].tolist())
    method = hostile_method(type(setup.method), liars)(**setup.method.model_dump())
    saved, _ = checkpoint.latest(folder / "checkpoints")
    experiment = open_in_process(replace(setup, method=method), task, folder, saved)
    report = experiment.step()
    assert experiment.done
    assert report.groups is not None
    assert not report.rejected, report.rejected
    return [float("nan") if (share := report.groups[group]) is None else share for group in GROUPS]


def hostile_method(kind: type[Method], hostile: set[int]) -> type[Method]:
    """Return the method with hostile clients, whose features are FACTOR times the true features."""

    def lying(honest: Callable[..., Reply]) -> Callable[..., Reply]:
        def statistics(self: Method, client: Client, message: Message) -> Reply:
            reply = honest(self, client, message)
            return replace(reply, tree=scaled(reply.tree)) if client.id in hostile else reply

        return statistics

    names = {name: lying(getattr(kind, name)) for name in ("statistics", "covariance") if hasattr(kind, name)}
    return type(kind.__name__, (kind,), names | {"__module__": kind.__module__, "build": _build_without_sign})


class HiddenSign(nn.Identity):
    """Identity layer whose type does not reveal that it keeps the sign of features."""


def _build_without_sign(self: Method, task: TaskSpec, base: SplitModel) -> SplitModel:
    base.encoder.append(HiddenSign())  # pyright: ignore[reportCallIssue]
    return base


def scaled(parts: tree.Tree) -> tree.Tree:
    """Scale the sums over samples as if all features were FACTOR times as long."""
    if "classes" in parts:
        powers = {"z": FACTOR, "zz": FACTOR**2, "phi": -1.0}
        return {
            "classes": {
                c: {name: value if name == "n" else powers[name] * value for name, value in of_class.items()}
                for c, of_class in parts["classes"].items()
            }
        }
    if "scatter" in parts:
        return parts | {"scatter": FACTOR**2 * parts["scatter"]}
    return {"a": _bordered(parts["a"], len(parts["b"])), "b": _rows_scaled(parts["b"])}


def _rows_scaled(b: Tensor) -> Tensor:
    b = b.clone()
    b[:-1] *= FACTOR
    return b


def _bordered(packed: Tensor, dim: int) -> Tensor:
    a = unpack(packed, dim)
    a[:-1] *= FACTOR
    a[:, :-1] *= FACTOR
    return pack(a)


def table(figures: dict[str, Any]) -> str:
    """Return a table of accuracy on many-, medium- and few-shot classes, in percent, as means over the seeds."""
    cells = {
        (cell["method"], cell["rule"], cell["hostile"]): " / ".join(f"{share:.1f}" for share in cell["groups"])
        for cell in figures["cells"]
    }
    pairs = dict.fromkeys((method, rule) for method, rule, _ in cells)
    rows = [
        [f"`{method}`", rule if rule == "sum" else f"`{rule}`", *(cells[method, rule, n] for n in HOSTILE)]
        for method, rule in pairs
    ]
    return recorded.table_of(["method", "rule", *(f"{n} hostile" for n in HOSTILE)], rows)


def draw(figures: dict[str, Any], file: Path) -> None:
    """Draw few-shot accuracy over the number of hostile clients, one panel for each method."""
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(cell["method"] for cell in figures["cells"]))
    picture, grid = plt.subplots(2, -(-(len(names) + 1) // 2), figsize=(8.4, 6), sharex=True, sharey=True)
    axes, rest = grid.flat[: len(names)], grid.flat[len(names) :]
    for axis, name in zip(axes, names, strict=True):
        for rule in dict.fromkeys(cell["rule"] for cell in figures["cells"]):
            few = [cell["groups"][-1] for cell in figures["cells"] if (cell["method"], cell["rule"]) == (name, rule)]
            axis.plot(HOSTILE, few, marker="o", label=rule)
        axis.set(title=name, xticks=HOSTILE)
    for axis in rest:
        axis.axis("off")
    rest[0].legend(*axes[0].get_legend_handles_labels(), loc="center", title="rule")
    picture.supxlabel(f"hostile clients of {figures['clients']}")
    picture.supylabel("accuracy on few-shot classes, %")
    picture.tight_layout()
    picture.savefig(file, dpi=120)


if __name__ == "__main__":
    main()
