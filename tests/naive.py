"""Helpers for the oracles of methods: a federation on the tiny task in plain torch, one client after the other.

An oracle computes whole rounds and last phases from pooled data by the papers' equations, without the methods' code.
From raylt it takes only parts with tests of their own: networks, the cropping of images, and the seeds by which all
parties draw the same random numbers. Rates and sizes are those of `tiny.configure`.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from raylt.data.task import Task
from raylt.models import build_model
from raylt.models.split import SplitModel
from raylt.seeds import seed_for, seeded

LR, MOMENTUM, EPOCHS, BATCH = 0.05, 0.9, 2, 8
Entries = dict[str, Tensor]


def pixels(x: Tensor) -> Tensor:
    """Return images in 0..255 [n, H, W, channels] as networks take them, [n, channels, H, W]."""
    return ((x.double() / 255 - 0.5) / 0.25).permute(0, 3, 1, 2).float()


def client_data(task: Task, id: int) -> tuple[Tensor, Tensor]:
    """Return the images and labels of one client."""
    shard = task.shards[id]
    return pixels(torch.from_numpy(shard.x)), torch.from_numpy(shard.y)


def clients_of(task: Task) -> list[int]:
    return [id for id, shard in enumerate(task.shards) if len(shard)]


def new_model(task: Task, change: Callable[[SplitModel], object] = lambda model: None) -> SplitModel:
    """Return the model that all clients start from, changed as the method requires."""
    with seeded(0, "model"):
        model = build_model("small", task.classes, task.shape)
        change(model)
    return model


def generator(*keys: str | int) -> torch.Generator:
    return torch.Generator().manual_seed(seed_for(0, *keys))


def epochs_of(n: int, order: torch.Generator, epochs: int = EPOCHS, size: int = BATCH) -> Iterator[Tensor]:
    """Yield the indices of the samples of each batch; a last batch of one sample is dropped."""
    for _ in range(epochs):
        for rows in torch.randperm(n, generator=order).split(size):
            if len(rows) > 1:
                yield rows


def descend(
    params: list[Tensor],
    losses: Iterator[Callable[[], Tensor]],
    lr: float,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
) -> list[float]:
    """Take an SGD step for each loss; return the losses."""
    velocity, seen = [torch.zeros_like(p) for p in params], []
    for loss in losses:
        value = loss()
        gradients = torch.autograd.grad(value, params, allow_unused=True)
        with torch.no_grad():
            for p, v, g in zip(params, velocity, gradients, strict=True):
                if g is not None:
                    v.mul_(momentum).add_(g + weight_decay * p)
                    p.sub_(lr * v)
        seen.append(value.item())
    return seen


def train(model: nn.Module, batches: Iterator[Tensor], loss: Callable[[Tensor], Tensor], lr: float = LR) -> None:
    """Train a model locally, with a step for each batch of indices."""
    model.train()
    descend(list(model.parameters()), ((lambda rows=rows: loss(rows)) for rows in batches), lr, MOMENTUM)


def entries(model: nn.Module) -> Entries:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def average(models: list[Entries], weights: list[float]) -> Entries:
    """Return the weighted mean of float entries, and the largest of each counter."""
    return OrderedDict(
        (
            name,
            sum(w / sum(weights) * model[name].double() for w, model in zip(weights, models, strict=True)).float()
            if models[0][name].is_floating_point()
            else max(model[name] for model in models),
        )
        for name in models[0]
    )


@torch.no_grad()
def features(model: SplitModel, x: Tensor) -> Tensor:
    return model.encoder.eval()(x)


def differences(ours: Entries, theirs: Entries, atol: float = 1e-5) -> dict[str, float]:
    """Return the entries that differ, with their largest distances; the names must be equal."""
    assert ours.keys() == theirs.keys(), ours.keys() ^ theirs.keys()
    far = {name: (ours[name].double() - theirs[name].double()).abs().max().item() for name in ours}
    return {name: distance for name, distance in far.items() if not distance < atol}


def copies(values: Entries) -> list[Tensor]:
    return [value.clone() for value in values.values()]
