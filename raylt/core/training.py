"""`sgd`: the hot loop of every method."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from raylt.core.client import Client
from raylt.core.optimisers import SGD
from raylt.data.samples import Batch

Objective = Callable[[Batch], Tensor]


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
