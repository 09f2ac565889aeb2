"""`Terms`: a loss that is the sum of named terms, and how much of its gradient each of them makes.

A term whose gradient is nothing beside the others' cannot work, whatever its paper says of it. A method that names its
terms (`Method.terms`) has their shares in the figures of every round.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from raylt.core.client import Client
from raylt.core.reductions import Reduction, mean
from raylt.data.samples import Batch
from raylt.recordable import is_recordable

Objective = Callable[[Batch], Tensor]


class Terms:
    """An objective: the sum of the terms of a batch. On the last batch of a local training `sgd` has them measured.

    That takes one more pass back for each term on this one batch; it draws nothing and changes no bit of the training.
    The last batch it is, since at the first a proximal term is zero by its definition.

    Args:
        terms: a batch's scalars by name, always the same names.

    Attributes:
        norms: of each term the length of its gradient, by name; empty before the last batch.
        recordable: whether `terms` is.
    """

    def __init__(self, client: Client, terms: Callable[[Batch], dict[str, Tensor]]):
        self._terms, self.recordable = terms, is_recordable(terms)
        self._params = [p for p in client.model.parameters() if p.requires_grad]
        self.norms: dict[str, float] = {}

    def __call__(self, batch: Batch) -> Tensor:
        return reduce(operator.add, self._terms(batch).values())

    def measured(self, batch: Batch) -> Tensor:
        """The same, and from now on `norms` are those of this batch."""
        terms = self._terms(batch)
        self.norms = {name: gradient_norm(term, self._params) for name, term in terms.items()}
        return reduce(operator.add, terms.values())


def gradient_norm(loss: Tensor, params: Sequence[Tensor]) -> float:
    """The length of a scalar's gradient with respect to all parameters together; its graph is kept."""
    if not loss.requires_grad:
        return 0.0
    gradients = torch.autograd.grad(loss, params, retain_graph=True, allow_unused=True)
    return torch.stack([g.norm() for g in gradients if g is not None]).norm().item()


# the way of the shares from a client to the figures of a round

def reply_of(objective: Objective, names: Sequence[str]) -> dict[str, dict[str, float]]:
    """The part `shares` of a client's reply, none where no terms are named: of each term its gradient's length over the
    sum of all lengths; zeros of a client without a step, and of a term that this round's objective leaves out."""
    norms = objective.norms if isinstance(objective, Terms) else {}
    total = sum(norms.values()) or 1.0
    return {"shares": {name: norms.get(name, 0.0) / total for name in names}} if names else {}


def asked_for(names: Sequence[str]) -> dict[str, Reduction]:
    """What the server asks for, to be told the shares."""
    return {"shares": mean.like(dict.fromkeys(names, 0.0))} if names else {}


def figure_of(got: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """The figure `shares` of a round: means over the clients, of sum 1 unless nobody took a step."""
    if "shares" not in got:
        return {}
    total = sum(got["shares"].values()) or 1.0
    return {"shares": {name: share / total for name, share in got["shares"].items()}}
