"""What the oracles of the methods share: a federation on the tiny task in plain torch, one client after the other.

An oracle computes whole rounds and what comes after them from pooled data, as the papers' equations say and without any
of the methods' code. Of raylt it takes what has tests of its own: networks, the cropping of images, and the seeds by
which every party draws the same random numbers. Rates and sizes are those of `tiny.configure`.
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
    """Images in 0..255 [n, H, W, channels] as networks take them, [n, channels, H, W]."""
    return ((x.double() / 255 - 0.5) / 0.25).permute(0, 3, 1, 2).float()


def client_data(task: Task, id: int) -> tuple[Tensor, Tensor]:
    """Images and labels of one client."""
    shard = task.shards[id]
    return pixels(torch.from_numpy(shard.x)), torch.from_numpy(shard.y)


def clients_of(task: Task) -> list[int]:
    return [id for id, shard in enumerate(task.shards) if len(shard)]


def new_model(task: Task, change: Callable[[SplitModel], object] = lambda model: None) -> SplitModel:
    """The model that everybody starts from, changed as the method says."""
    with seeded(0, "model"):
        model = build_model("small", task.classes, task.shape)
        change(model)
    return model


def generator(*keys: str | int) -> torch.Generator:
    return torch.Generator().manual_seed(seed_for(0, *keys))


def epochs_of(n: int, order: torch.Generator, epochs: int = EPOCHS, size: int = BATCH) -> Iterator[Tensor]:
    """Places of the samples of each batch; a last one alone is dropped."""
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
    """SGD by hand, a step for each loss; returns the losses."""
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
    """Local training: a step for each batch of places."""
    model.train()
    descend(list(model.parameters()), ((lambda rows=rows: loss(rows)) for rows in batches), lr, MOMENTUM)


def entries(model: nn.Module) -> Entries:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def average(models: list[Entries], weights: list[float]) -> Entries:
    """The weighted mean of float entries and the largest of the counters."""
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
    """The entries that are not close, with the largest distance of each; refuses other names."""
    assert ours.keys() == theirs.keys(), ours.keys() ^ theirs.keys()
    far = {name: (ours[name].double() - theirs[name].double()).abs().max().item() for name in ours}
    return {name: distance for name, distance in far.items() if not distance < atol}


def copies(values: Entries) -> list[Tensor]:
    return [value.clone() for value in values.values()]
