"""`Terms`: a loss that is the sum of named terms, whose shares of the gradient are measured.

A term with a tiny gradient compared with the other terms has no effect, whatever its paper claims. A method that names
its terms (`Method.terms`) reports their shares in the figures of every round.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from raylt.core.client import Client
from raylt.core.fleet.reductions import Reduction, mean
from raylt.data.samples import Batch
from raylt.recordability import is_recordable

#: A function from a batch to its loss, a tensor of shape [].
Objective = Callable[[Batch], Tensor]


class Terms:
    """An objective that is the sum of named loss terms.

    `sgd` measures the terms on the last batch of a local training. The measurement takes one additional backward pass
    per term on this batch; it draws no random numbers and does not change the training. It does not use the first
    batch, since a proximal term is zero there by definition.

    Args:
        client: The client.
        terms: Function from a batch to scalars by name, always with the same names.

    Attributes:
        norms: Norm of each term's gradient by name; empty before the last batch.
        recordable: Whether `terms` is recordable.
    """

    def __init__(self, client: Client, terms: Callable[[Batch], dict[str, Tensor]]):
        self._terms = terms
        self.recordable = is_recordable(terms)
        self._params = [p for p in client.model.parameters() if p.requires_grad]
        self.norms: dict[str, float] = {}

    def __call__(self, batch: Batch) -> Tensor:
        return total_loss(self._terms(batch))

    def measured(self, batch: Batch) -> Tensor:
        """Return the loss of a batch, and set `norms` to the terms' gradient norms on this batch."""
        terms = self._terms(batch)
        self.norms = {name: gradient_norm(term, self._params) for name, term in terms.items()}
        return total_loss(terms)

    def split(self, batch: Batch) -> dict[str, Tensor]:
        """Return the terms of a batch by name. The caller sets `norms`."""
        return self._terms(batch)


def total_loss(terms: dict[str, Tensor]) -> Tensor:
    """Return the sum of loss terms."""
    return reduce(operator.add, terms.values())


def gradient_norm(loss: Tensor, params: Sequence[Tensor]) -> float:
    """Return the norm of a scalar's gradient with respect to all parameters together; the graph is retained."""
    if not loss.requires_grad:
        return 0.0
    gradients = torch.autograd.grad(loss, params, retain_graph=True, allow_unused=True)
    return joint_norm([g for g in gradients if g is not None])


def joint_norm(gradients: Sequence[Tensor]) -> float:
    """Return the norm of gradients together; 0 if there are none."""
    return torch.stack([g.norm() for g in gradients]).norm().item() if gradients else 0.0


# shares of the gradient, on their way from clients to the figures of a round


def shares_part(objective: Objective, names: Sequence[str]) -> dict[str, dict[str, float]]:
    """Return each loss term's share of the gradient as the reply part `shares`; {} if the loss has no named terms.

    The share of a term is the norm of its gradient divided by the sum of all norms. It is zero for a client that took
    no step, and for a term that this round's objective omits.
    """
    norms = objective.norms if isinstance(objective, Terms) else {}
    total = sum(norms.values()) or 1.0
    return {"shares": {name: norms.get(name, 0.0) / total for name in names}} if names else {}


def shares_reduction(names: Sequence[str]) -> dict[str, Reduction]:
    """Return the keyword argument that makes `fleet.ask` request the part `shares`, if the loss has named terms."""
    return {"shares": mean.like(dict.fromkeys(names, 0.0))} if names else {}


def shares_figure(got: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Return the round's figure `shares`: each loss term's share of the gradient, as a mean over clients.

    The shares add up to 1 if any client took a step.
    """
    if "shares" not in got:
        return {}
    total = sum(got["shares"].values()) or 1.0
    return {"shares": {name: share / total for name, share in got["shares"].items()}}
