"""`sgd`, the hot loop of every method; what else is computed over a client's own samples; `fit_classifier`."""
# pyright: reportPrivateImportUsage=false

import math
from collections.abc import Callable, Iterable
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from raylt.client import Client
from raylt.data.samples import IGNORED, Augmentation, Batch, Samples
from raylt.metrics import confusion
from raylt.ops.pixels import pixel_features

Objective = Callable[[Batch], Tensor]
Schedule = Literal["epoch", "iteration", "constant"]


class SGD:
    """Stochastic gradient descent with momentum and weight decay, equal to `torch.optim.SGD` to the bit.

    Our own, because the first `torch.optim` object of a process imports torch's compiler: 6 s and 20 % more memory in
    every client process.
    """

    def __init__(self, params: Iterable[Tensor], lr: float, momentum: float = 0.0, weight_decay: float = 0.0):
        self.params = [p for p in params if p.requires_grad]
        self.lr, self.momentum, self.weight_decay = lr, momentum, weight_decay
        self._velocity = [torch.zeros_like(p) for p in self.params] if momentum else []

    @torch.no_grad()
    def step(self, loss: Tensor) -> None:
        """One step along the gradient of a scalar loss; parameters that it does not depend on stay."""
        found = torch.autograd.grad(loss, self.params, allow_unused=True)
        used = [i for i, g in enumerate(found) if g is not None]
        params, grads = [self.params[i] for i in used], [g for g in found if g is not None]
        if self.weight_decay:
            # not in place: autograd may give one tensor as the gradient of two parameters
            grads = torch._foreach_add(grads, params, alpha=self.weight_decay)
        if self.momentum:
            velocity = [self._velocity[i] for i in used]
            torch._foreach_mul_(velocity, self.momentum)
            torch._foreach_add_(velocity, grads)
            grads = velocity
        torch._foreach_add_(params, grads, alpha=-self.lr)


def learning_rate(client: Client) -> float:
    """`local.lr` as far as it has decayed by the client's round."""
    local = client.config.local
    return local.lr * (1 - local.lr_decay) ** (max(client.round - 1, 0) // local.lr_decay_every)


def autocast(client: Client) -> torch.autocast:
    """The precision that `local.precision` asks for, of what is computed inside the block."""
    return torch.autocast(client.device.type, torch.bfloat16, enabled=client.config.local.precision == "bfloat16")


def sgd(client: Client, objective: Objective, params: Iterable[Tensor] | None = None, epochs: int | None = None,
        lr: float | None = None, batches: Iterable[Batch] | None = None) -> float:
    """Trains a client's model on its own batches and returns the mean loss per sample.

    Args:
        objective: the loss of a batch, a scalar.
        batches: what it is trained on, all epochs in a row; by default `epochs` passes over the client's samples.
        params: what is trained; all parameters of the client's model by default.
        epochs, lr: `local.epochs` of the configuration and `learning_rate` by default.
    """
    local, model = client.config.local, client.model
    model.train()
    optimiser = SGD(model.parameters() if params is None else params, learning_rate(client) if lr is None else lr,
                    local.momentum, local.weight_decay)
    total, seen = torch.zeros((), device=client.device), 0
    if batches is None:
        batches = client.batches(local.epochs if epochs is None else epochs, local.batch)
    for batch in batches:
        with autocast(client):
            loss = objective(batch)
        optimiser.step(loss)
        total += loss.detach() * len(batch.y)       # stays on the device: reading it here would stop a GPU every step
        seen += len(batch.y)
    return total.item() / max(seen, 1)


@torch.no_grad()
def features(client: Client, augment: Augmentation | None = None, pixels: int = 16) -> tuple[Tensor, Tensor]:
    """The features of all of a client's samples under its model as it is, in evaluation mode and the samples' order.

    Args:
        augment: drawn from the call's own generator; by default the images are taken as they are.
        pixels: of an image with a label map, so many features of each class that it shows, at random places, drawn
            from the call's own generator.

    Returns:
        z float32 [n, d] and y int64 [n], on the client's device.
    """
    encoder, size = client.model.encoder.eval(), client.config.evaluation.batch

    def encoded(x: Tensor) -> Tensor:
        with autocast(client):                      # the encoder alone: crops and means are of full precision
            return encoder(x).float()

    parts = [pixel_features(encoded(batch.x), batch.y, pixels, client.noise)
             for batch in client.samples.in_order(size, augment, client.noise)]
    z, y = zip(*parts, strict=True)
    return torch.cat(z), torch.cat(y)


def fit_classifier(classifier: nn.Module, z: Tensor, y: Tensor, *, epochs: int, batch: int, lr: float, momentum: float,
                   weight_decay: float, seed: int, schedule: Schedule = "epoch",
                   loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy) -> float:
    """Trains a classifier on features by SGD, in shuffled batches; returns the mean loss of the last epoch.

    Args:
        z: [n, d]; y: int64 [n], or soft labels [n, C]. On the classifier's device.
        seed: of the order of the samples, the same on every device.
        schedule: the learning rate falls along a cosine from `lr` towards 0 over the epochs; or it follows the cosine
            of period 2 * `epochs` *steps* that SFD's code computes; or it stays.
        loss: of logits and labels, the mean over a batch.
    """
    optimiser = SGD(classifier.parameters(), lr, momentum, weight_decay)
    generator = torch.Generator().manual_seed(seed)
    classifier.train()
    steps, total = 0, torch.zeros((), device=z.device)
    for epoch in range(epochs):
        total.zero_()
        for rows in torch.randperm(len(z), generator=generator).to(z.device).split(batch):
            if schedule != "constant":
                passed = epoch if schedule == "epoch" else steps
                optimiser.lr = lr * 0.5 * (1 + math.cos(math.pi * passed / epochs))
            value = loss(classifier(z[rows]), y[rows])
            optimiser.step(value)
            total += value.detach() * len(rows)
            steps += 1
    return total.item() / max(len(z), 1)


@torch.no_grad()
def confusion_of(predict: Callable[[Tensor], Tensor], samples: Samples, classes: int, size: int) -> Tensor:
    """Counts of (true class, predicted class) over all samples or labelled pixels, int64 [C, C] on the CPU.

    Args:
        predict: images [B, channels, H, W] to logits [B, C] or [B, C, H, W], in evaluation mode.
        size: images at a time.
    """
    total = torch.zeros(classes, classes, dtype=torch.int64, device=samples.y.device)
    for batch in samples.in_order(size):
        total += confusion(predict(batch.x).argmax(1), batch.y, classes, IGNORED)
    return total.cpu()
