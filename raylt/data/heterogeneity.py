"""Measures of how much the class distributions of a task's clients differ."""

from typing import NamedTuple

import numpy as np


class Heterogeneity(NamedTuple):
    """Measures of heterogeneity, computed from sample counts per client and class.

    Attributes:
        imbalance: Ratio of the largest class to the smallest non-empty class.
        sizes: Ratio of the largest client to the smallest non-empty client.
        distance: Total variation distance between a client's class mix and the overall mix, sum_c |p_c - q_c| / 2,
            averaged over the clients that hold samples; 0 if all mixes are equal, 1 if clients share no class.
        classes: Mean number of classes of the clients that hold samples.
    """

    imbalance: float
    sizes: float
    distance: float
    classes: float

    def __str__(self) -> str:
        return (
            f"largest to smallest class: {self.imbalance:.4g}; largest to smallest client: {self.sizes:.4g}\n"
            f"classes of a client, mean: {self.classes:.3g}\n"
            f"distance of a client's class mix from the overall mix, mean: {self.distance:.2f} (0: equal, 1: disjoint)"
        )


def heterogeneity(counts: np.ndarray) -> Heterogeneity:
    """Compute the heterogeneity of clients from counts per client and class, int [K, C], not all 0."""
    classes = counts.sum(0)
    clients = counts.sum(1)
    nonempty = counts[clients > 0]
    mixes = nonempty / nonempty.sum(1, keepdims=True)
    distances = np.abs(mixes - classes / classes.sum()).sum(1) / 2
    return Heterogeneity(
        imbalance=float(classes.max() / classes[classes > 0].min()),
        sizes=float(clients.max() / clients[clients > 0].min()),
        distance=float(distances.mean()),
        classes=float((nonempty > 0).sum(1).mean()),
    )
