"""`sgd`: the hot loop of every method."""

import math
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from raylt.core.client import Client
from raylt.core.graphs import Repeated
from raylt.core.optimisers import make_optimiser
from raylt.core.terms import Objective, Terms
from raylt.data.samples import Batch


def learning_rate(client: Client) -> float:
    """`local.lr` as far as it has decayed by the client's round."""
    local, passed = client.config.local, max(client.round - 1, 0)
    if local.schedule == "cosine":
        rounds = client.config.federation.rounds
        # what follows the last round goes on at its rate, not at none
        return local.lr * 0.5 * (1 + math.cos(math.pi * min(passed, rounds - 1) / rounds))
    return local.lr * (1 - local.lr_decay) ** (passed // local.lr_decay_every)


def autocast(client: Client) -> torch.autocast:
    """The precision that `local.precision` asks for, of what is computed inside the block."""
    return torch.autocast(client.device.type, torch.bfloat16, enabled=client.config.local.precision == "bfloat16")


def sgd(client: Client, objective: Objective, params: Iterable[Tensor] | None = None, epochs: int | None = None,
        lr: float | None = None, rows: Iterable[Tensor] | None = None,
        make: Callable[[Tensor], Batch] | None = None) -> float:
    """Trains a client's model on its own batches and returns the mean loss per sample.

    On a GPU the steps are recorded once and replayed where objective and batches are `recordable`, see `Repeated`.

    Args:
        objective: the loss of a batch, a scalar. Where it has a function `unlike`, this is called before each step with
            its number, from 1, and says whether the step launches something else than the others.
        params: what is trained; all parameters of the client's model by default.
        epochs, lr: `local.epochs` of the configuration and `learning_rate` by default.
        rows: the places of each batch's samples, as many batches as `client.rows` gives, whose they are by default.
        make: the batch of the samples at some places; by default the client's, augmented.
    """
    local, model = client.config.local, client.model
    model.train()
    optimiser = make_optimiser(local, model.parameters() if params is None else params,
                               learning_rate(client) if lr is None else lr)
    total, seen = torch.zeros((), device=client.device), 0
    epochs, make = local.epochs if epochs is None else epochs, make or client.batch

    def step(rows: Tensor, objective: Objective = objective) -> None:
        batch = make(rows)
        with autocast(client):
            loss = objective(batch)
        optimiser.step(loss)
        total.add_(loss.detach() * len(rows))       # stays on the device: reading it here would stop a GPU every step

    parts: list[object] = [objective, make, optimiser, *([] if client.augment is None else [client.augment])]
    repeated = Repeated(step, client.device, parts, [model], client.noise)
    last, unlike = client.steps(epochs), getattr(objective, "unlike", None)
    for number, places in enumerate(client.rows(epochs, local.batch) if rows is None else rows, start=1):
        if number == last and isinstance(objective, Terms):
            step(places, objective.measured)
        elif unlike is not None and unlike(number):
            step(places)
        else:
            repeated(places)
        seen += len(places)
    return total.item() / max(seen, 1)


@torch.no_grad()
def take_statistics(client: Client) -> None:
    """Where the client keeps its model's running statistics (federation.batchnorm = local) and never took any, takes
    them from its samples, in as many batches as a round has; else does nothing.

    Samples come in their order and as they are: nothing is drawn, so the model that is judged is the one exported.
    """
    model, local = client.model, client.config.local
    if not model.stays or any(value for name, value in model.state_dict().items()
                              if name in model.stays and name.endswith("num_batches_tracked")):
        return
    model.train()
    for _ in range(local.epochs):
        for batch in client.samples.in_order(local.batch):
            if len(batch.y) > 1:
                with autocast(client):
                    model(batch.x)


def balanced(client: Client, epochs: int | None = None, size: int | None = None) -> Iterator[Tensor]:
    """The places of as many batches as `client.rows` gives, drawn so that each owned class is equally likely.

    Args:
        epochs, size: `local.epochs` and `local.batch` by default.
    """
    local, y = client.config.local, client.samples.y
    weight = (1 / client.counts.double())[y].cpu()                              # [n]
    for _ in range(local.epochs if epochs is None else epochs):
        drawn = torch.multinomial(weight, len(y), replacement=True, generator=client.order).to(client.device)
        yield from (rows for rows in drawn.split(size or local.batch) if len(rows) > 1)
