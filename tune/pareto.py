"""Computes and draws the Pareto front: the trials that are best by several metrics at once."""

import io
from collections.abc import Mapping, Sequence
from typing import Any

from tune.report import COLOURS, INK, MUTED, PAPER, plain


def pareto_front(trials: Sequence[Mapping[str, Any]], metrics: Sequence[str]) -> list[int]:
    """Return the indices of the trials that no other trial dominates.

    A trial dominates another if it is at least as good by all metrics and better by one.

    Args:
        trials: figures by name, as in `result.metrics` of a `ResultGrid`; higher is better. Trials without one of the
            metrics are left out.

    Returns:
        Indices, by descending first metric.
    """
    points = {
        index: tuple(trial[name] for name in metrics)
        for index, trial in enumerate(trials)
        if all(trial.get(name) is not None for name in metrics)
    }
    front = [index for index, point in points.items() if not any(_dominates(other, point) for other in points.values())]
    return sorted(front, key=lambda index: points[index], reverse=True)


def draw_pareto(trials: Sequence[Mapping[str, Any]], metrics: tuple[str, str], names: Sequence[str]) -> bytes:
    """Draw the trials by two metrics, in percent, and the Pareto front as a labelled step line; return a PNG.

    Args:
        names: of the trials.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # without pyplot: no global state, no display
    from matplotlib.figure import Figure

    front = pareto_front(trials, metrics)
    figure = Figure(figsize=(6.4, 4.6), facecolor=PAPER, layout="constrained")
    FigureCanvasAgg(figure)
    panel = figure.add_subplot()
    for index, trial in enumerate(trials):
        if index not in front and all(trial.get(name) is not None for name in metrics):
            panel.plot(100 * trial[metrics[0]], 100 * trial[metrics[1]], "o", color=MUTED, markersize=5, alpha=0.7)
    x = [100 * trials[index][metrics[0]] for index in front]
    y = [100 * trials[index][metrics[1]] for index in front]
    panel.step(x, y, where="post", color=COLOURS[0], linewidth=1.4)
    panel.plot(x, y, "o", color=COLOURS[0], markersize=7)
    for index, left, height in zip(front, x, y, strict=True):
        panel.annotate(names[index], (left, height), xytext=(6, 6), textcoords="offset points", color=INK, fontsize=8)
    panel.margins(x=0.15, y=0.12)
    panel.set_xlabel(f"{metrics[0]}, %")
    panel.set_ylabel(f"{metrics[1]}, %")
    panel.set_title(f"{len(front)} of {len(trials)} trials are on the Pareto front", loc="left", fontsize=10, color=INK)
    plain(panel)
    picture = io.BytesIO()
    figure.savefig(picture, dpi=130)
    return picture.getvalue()


def _dominates(one: Sequence[float], other: Sequence[float]) -> bool:
    """Return whether one point is at least as good as the other by every metric, and better by one."""
    return all(a >= b for a, b in zip(one, other, strict=True)) and tuple(one) != tuple(other)
