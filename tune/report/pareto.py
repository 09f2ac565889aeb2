"""Computation of the Pareto front: the trials that no other trial dominates by several metrics."""

from collections.abc import Mapping, Sequence
from typing import Any


def pareto_front(trials: Sequence[Mapping[str, Any]], metrics: Sequence[str]) -> list[int]:
    """Return the indices of the trials that no other trial dominates.

    A trial dominates another if it is at least as good by all metrics and better by one.

    Args:
        trials: Metrics of each trial by name, as in `result.metrics` of a `ResultGrid`; higher is better. Trials
            without one of the metrics are left out.
        metrics: Names of the metrics to compare.

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


def _dominates(one: Sequence[float], other: Sequence[float]) -> bool:
    """Return whether one point is at least as good as the other by every metric, and better by one."""
    return all(a >= b for a, b in zip(one, other, strict=True)) and tuple(one) != tuple(other)
