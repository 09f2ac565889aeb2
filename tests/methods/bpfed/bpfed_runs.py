"""Short runs of BPFed, and its loss written out."""

import tiny
import torch
from tiny import Recorder, configure, make_experiment
from torch import tensor
from torch.nn import functional as F

from raylt.core.client import Client
from raylt.methods.bpfed.method import BPFed, smooth_labels

COUNTS = tensor([8, 0, 4, 2])
GENERATOR = torch.Generator().manual_seed(0)


def features_of(counts, dim=5, seed=0):
    """Draw shuffled features with the given class sizes and well separated classes."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.repeat_interleave(torch.arange(len(counts)), torch.as_tensor(counts))
    y = y[torch.randperm(len(y), generator=generator)]
    return torch.randn(len(y), dim, generator=generator) + 3 * y[:, None], y


def loss_of(method: BPFed, logits, y, counts):
    """Compute Eq. 18-20 sample by sample, with the branches of the paper's text."""
    owned = [c for c in range(len(counts)) if counts[c] > 0]
    total = 0.0
    for row, c in zip(logits.double(), y.tolist(), strict=True):
        g = 0.0 if method.loss == "ce" else method.delta * (counts[c].item() / counts.max().item()) ** method.gamma
        others = [j for j in (range(len(counts)) if method.loss == "ls_all" else owned) if j != c]
        g = g if others else 0.0
        over = owned if method.softmax == "owned" else range(len(counts))
        log_p = {j: row[j] - torch.logsumexp(row[list(over)], 0) for j in over}
        total -= (1 - g) * log_p[c] + sum(g / len(others) * log_p[j] for j in others)
    return total / len(y)


def retrained_loss(method: BPFed, logits, y, counts):
    """Return the loss that `retrain` minimises, caught where it goes to the optimiser."""
    labels = smooth_labels(counts, 0.0 if method.loss == "ce" else method.delta, method.gamma, method.loss == "ls_all")
    classes = counts > 0 if method.softmax == "owned" else torch.ones_like(counts, dtype=torch.bool)
    return F.cross_entropy(logits[:, classes], labels[y][:, classes])


def open_client(task, id=0, method=None, **parts) -> Client:
    return tiny.open_client(task, method or BPFed(), id, configure(**parts))


def run(task, folder, method=None, until=None, **parts):
    experiment = make_experiment(configure(**parts), task, folder, method or BPFed(), host=Recorder)
    reports = []
    while not experiment.done and len(reports) != until:
        reports.append(experiment.step())
    return experiment, reports
