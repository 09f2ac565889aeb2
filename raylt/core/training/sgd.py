"""`sgd`: the training loop of every method."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import islice

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from raylt.core.client import Client
from raylt.core.server import Server
from raylt.core.training.cuda_graphs import Repeated
from raylt.core.training.loss_terms import Objective, Terms
from raylt.core.training.optimisers import make_optimiser
from raylt.core.training.schedules import scheduled_rate
from raylt.data.samples import Batch
from raylt.errors import ConfigError, type_name
from raylt.models.split import StateDict, set_training

COUNTER = "num_batches_tracked"  # BatchNorm's buffer that counts the batches behind its running statistics


def learning_rate(party: Client | Server) -> float:
    """Return the learning rate of the current round for a client or the server.

    It follows from `local.schedule` and `local.warm_up`.
    """
    config = party.config
    # with zero rounds, training in the last phase has the rate of the first round
    return scheduled_rate(party.schedule, config.local, party.round, max(config.federation.rounds, 1))


def autocast(client: Client) -> AbstractContextManager[object]:
    """Return a context in which torch computes with the precision of `local.precision`."""
    if client.config.local.precision != "bfloat16":
        return nullcontext()  # a disabled autocast would take as long to enter
    return torch.autocast(client.device.type, torch.bfloat16)


def sgd(
    client: Client,
    objective: Objective,
    params: Iterable[Tensor] | None = None,
    epochs: float | None = None,
    lr: float | None = None,
    rows: Iterable[Tensor] | None = None,
    make: Callable[[Tensor], Batch] | None = None,
) -> float:
    """Train a client's model on its own batches.

    On a GPU the steps are recorded once and replayed if objective and batches are `recordable`, see `Repeated`.

    Args:
        client: The client.
        objective: Function from a batch to a scalar loss. If it has a function `unlike`, this is called before each
            step with the step's number, from 1, and returns whether the step launches other kernels than other steps.
        params: The parameters to train; by default all parameters of the client's model.
        epochs: Number of passes over the samples, possibly a fraction; by default `local.epochs` or `local.steps`.
        lr: Learning rate; by default `learning_rate(client)`.
        rows: Sample indices of each batch, for as many batches as `client.rows` yields; by default `client.rows`.
        make: Function from sample indices to a batch; by default the client's augmented batch.

    Returns:
        The mean loss per sample.

    Raises:
        ConfigError: The objective is not a function, or a loss is not a scalar with a gradient.
    """
    if not callable(objective):
        raise ConfigError(
            f"objective: returned {type_name(objective)}. Return a function from a batch to its loss.",
            code="method.wrong-argument",
            key="objective",
        )
    local, model = client.config.local, client.model
    set_training(model)
    optimiser = make_optimiser(
        local, model.parameters() if params is None else params, learning_rate(client) if lr is None else lr
    )
    total = torch.zeros((), device=client.device)
    seen = 0
    make = make or client.batch

    def step(rows: Tensor, objective: Objective = objective) -> None:
        batch = make(rows)
        with autocast(client):
            loss = objective(batch)
        optimiser.step(loss)
        total.add_(loss.detach() * len(rows))  # reading it here would synchronise with the GPU in each step

    parts: list[object] = [objective, make, optimiser, *([] if client.augment is None else [client.augment])]
    repeated = Repeated(step, client.device, parts, [model], client.noise)
    last = client.steps(epochs)
    unlike = getattr(objective, "unlike", None)
    batches = client.rows(epochs, local.batch) if rows is None else rows
    for number, batch_rows in enumerate(batches, start=1):
        if number == last and isinstance(objective, Terms):
            step(batch_rows, objective.measured)
        elif unlike is not None and unlike(number):
            step(batch_rows)
        else:
            repeated(batch_rows)
        seen += len(batch_rows)
    return total.item() / max(seen, 1)


def has_statistics(entries: StateDict, kept: frozenset[str]) -> bool:
    """Return whether running statistics have been computed, given a client's entries and the names that it keeps."""
    return any(value for name, value in entries.items() if name in kept and name.endswith(COUNTER))


@torch.no_grad()
def take_statistics(client: Client, kept: frozenset[str] | None = None) -> None:
    """Recompute the running statistics of a client's model as means over as many batches as a round has.

    The function does nothing unless the client keeps running statistics (federation.batchnorm = local) and has not
    computed any yet. The samples are used in order and without augmentation. Nothing is random, so the evaluated model
    equals the exported model.

    Args:
        client: The client.
        kept: Names of the statistics that the client keeps; by default `local_buffers` of its model.
    """
    model, local = client.model, client.config.local
    kept = model.local_buffers if kept is None else kept
    if not kept or has_statistics(model.state_dict(), kept):
        return
    model.train()
    momenta = {layer: layer.momentum for layer in model.modules() if isinstance(layer, _BatchNorm)}
    for layer in momenta:
        layer.momentum = None  # a moving average over few batches would keep most of the initial statistics
    try:
        left = client.steps()
        while left:
            for batch in islice(client.samples.in_order(local.batch), left):
                if len(batch.y) > 1:
                    with autocast(client):
                        model(batch.x)
                    left -= 1
    finally:  # the next client uses the same model object, even after an out-of-memory error
        for layer, momentum in momenta.items():
            layer.momentum = momentum


def balanced(client: Client, epochs: float | None = None, size: int | None = None) -> Iterator[Tensor]:
    """Yield the sample indices of each class-balanced batch, for as many batches as `client.rows` yields.

    Each class that the client owns is equally likely.

    Args:
        client: The client.
        epochs: Number of epochs; by default `local.epochs` or `local.steps`.
        size: Number of samples in a batch; by default `local.batch`.
    """
    size = size or client.config.local.batch
    y = client.samples.y
    weight = (1 / client.counts.double())[y].cpu()  # [n]
    left = client.steps(epochs, size)
    while left:
        drawn = torch.multinomial(weight, len(y), replacement=True, generator=client.order).to(client.device)
        for rows in drawn.split(size)[:left]:
            if len(rows) > 1:
                yield rows
                left -= 1
