"""How unlike each other the clients of a task are, and its classes, in a few figures."""

from typing import NamedTuple

import numpy as np


class Heterogeneity(NamedTuple):
    """Figures of counts by client and class.

    Args:
        imbalance: samples of the largest class for each of the smallest that has any.
        sizes: samples of the largest client for each of the smallest that has any.
        distance: mean over the clients that hold samples of the total variation distance between their class mix and
            the mix of all, sum_c |p_c - q_c| / 2; 0 where all are alike, 1 where they share no class.
        classes: mean number of classes that such a client holds.
    """

    imbalance: float
    sizes: float
    distance: float
    classes: float

    def __str__(self) -> str:
        return (f"largest class : smallest = {self.imbalance:.4g}, largest client : smallest = {self.sizes:.4g}, "
                f"a client has {self.classes:.3g} classes, its class mix is {self.distance:.2f} from that of all "
                "(0 alike, 1 disjoint)")


def heterogeneity(counts: np.ndarray) -> Heterogeneity:
    """The figures of counts, int [K, C], of which one is not 0."""
    classes, clients = counts.sum(0), counts.sum(1)
    held = counts[clients > 0]
    mixes = held / held.sum(1, keepdims=True)
    distances = np.abs(mixes - classes / classes.sum()).sum(1) / 2
    return Heterogeneity(float(classes.max() / classes[classes > 0].min()),
                         float(clients.max() / clients[clients > 0].min()),
                         float(distances.mean()), float((held > 0).sum(1).mean()))
