"""Estimates of the time that `fit_classifier` takes."""

import math
import time

import torch
from torch import nn

from raylt.core.training.fit_classifier import fit_classifier

TIMED = 20  # steps from which the time of all is estimated


def fit_time(dim: int, classes: int, samples: int, epochs: int, batch: int) -> str:
    """Return the estimated time that `fit_classifier` takes on `samples` features, as text."""
    return about(fit_seconds(dim, classes, samples, epochs, batch))


def fit_seconds(dim: int, classes: int, samples: int, epochs: int, batch: int) -> float:
    """Return the seconds that `fit_classifier` takes on `samples` features, estimated from a few timed steps."""
    classifier = nn.Linear(dim, classes)
    rows = min(samples, TIMED * batch)
    z, y = torch.zeros(rows, dim), torch.zeros(rows, dtype=torch.long)

    def timed() -> float:
        start = time.perf_counter()
        fit_classifier(classifier, z, y, epochs=1, batch=batch, lr=0.0, momentum=0.9, weight_decay=0.0, seed=0)
        return time.perf_counter() - start

    timed()  # the first steps are slower
    steps = epochs * math.ceil(samples / batch)
    return timed() / math.ceil(rows / batch) * steps


def about(seconds: float) -> str:
    """Return a duration as text, such as `about 12 s on one core of this machine`."""
    return f"about {max(1, round(seconds))} s on one core of this machine"
