"""`fit_classifier`: a classifier trained on features."""

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from raylt.core.graphs import Repeated
from raylt.core.optimisers import SGD
from raylt.recordable import recordable

Schedule = Literal["epoch", "iteration", "constant"]
WORTH = 10              # replays that a recording must be good for


@recordable
def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """torch's, the mean over a batch."""
    return F.cross_entropy(logits, y)


def fit_classifier(classifier: nn.Module, z: Tensor, y: Tensor, *, epochs: int, batch: int, lr: float, momentum: float,
                   weight_decay: float, seed: int, schedule: Schedule = "epoch",
                   loss: Callable[[Tensor, Tensor], Tensor] = cross_entropy) -> float:
    """Trains a classifier on features by SGD, in shuffled batches; returns the mean loss of the last epoch.

    Args:
        z: [n, d]; y: int64 [n], or soft labels [n, C]. On the classifier's device.
        seed: of the order of the samples, the same on every device.
        schedule: the learning rate falls along a cosine from `lr` towards 0 over the epochs; or it follows the cosine
            of period 2 * `epochs` *steps* that SFD's code computes; or it stays.
        loss: of logits and labels, the mean over a batch; where it is `recordable`, and the learning rate lasts for
            several steps, these are recorded once and replayed on a GPU, see `Repeated`.
    """
    optimiser = SGD(classifier.parameters(), lr, momentum, weight_decay)
    generator = torch.Generator().manual_seed(seed)
    classifier.train()
    steps, total = 0, torch.zeros((), device=z.device)

    def step(rows: Tensor) -> None:
        value = loss(classifier(z[rows]), y[rows])
        optimiser.step(value)
        total.add_(value.detach() * len(rows))

    # a recording holds one learning rate: it must last for some steps, or nothing is gained by it
    lasts = schedule == "constant" or (schedule == "epoch" and len(z) // batch >= WORTH)
    repeated = Repeated(step, z.device, [loss, optimiser], [classifier])
    for epoch in range(epochs):
        total.zero_()
        if schedule == "epoch":
            repeated.renew()
        for rows in torch.randperm(len(z), generator=generator).to(z.device, non_blocking=True).split(batch):
            if schedule != "constant":
                passed = epoch if schedule == "epoch" else steps
                optimiser.lr = lr * 0.5 * (1 + math.cos(math.pi * passed / epochs))
            repeated(rows) if lasts else step(rows)
            steps += 1
    return total.item() / max(len(z), 1)
