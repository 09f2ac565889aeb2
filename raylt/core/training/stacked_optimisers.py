"""The optimisers of `optimisers.py` for several clients of a stack at once.

Each client has its own state, in the slot of its model: velocities, or moments and step counts. Clients take different
numbers of steps, so Adam's corrections differ between clients.
"""
# pyright: reportPrivateImportUsage=false

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from raylt.config import LocalConfig
from raylt.core.training.optimisers import BETAS, EPSILON, SGD
from raylt.models.stacked import StackedModel


class StackedOptimiser(Protocol):
    """Moves the parameters of several clients of a stack, each along its own gradient."""

    def new_state(self, network: StackedModel) -> list[Tensor]:
        """Return the initial state of all slots of a network; each tensor is [slots, ...]."""
        ...

    def move(
        self, network: StackedModel, gradients: Sequence[Tensor | None], state: list[Tensor], start: int, stop: int
    ) -> None:
        """Take one step with the slots from `start` to before `stop`.

        Args:
            network: The clients' models.
            gradients: Gradients of `network.parameters(start, stop)`; parameters without a gradient do not change.
            state: State of all slots of the network.
            start: Number of the first slot.
            stop: Number after the last slot.
        """
        ...


def make_stacked_optimiser(local: LocalConfig, lr: float) -> StackedOptimiser:
    """Return the optimiser that `local.optimiser` names."""
    if local.optimiser == "sgd":
        return StackedSGD(lr, local.momentum, local.weight_decay)
    return StackedAdam(lr, local.weight_decay, decoupled=local.optimiser == "adamw")


class StackedSGD:
    """`SGD` for several clients. Its state is the velocity of each trained parameter, if there is momentum."""

    def __init__(self, lr: float, momentum: float, weight_decay: float):
        self._rule = SGD([], lr, momentum, weight_decay)

    def new_state(self, network: StackedModel) -> list[Tensor]:
        return [torch.zeros_like(network.entries[name]) for name in network.trained] if self._rule.momentum else []

    def move(
        self, network: StackedModel, gradients: Sequence[Tensor | None], state: list[Tensor], start: int, stop: int
    ) -> None:
        params = network.parameters(start, stop)
        used = [number for number, gradient in enumerate(gradients) if gradient is not None]
        self._rule.move(
            [params[number] for number in used],
            [gradient for gradient in gradients if gradient is not None],
            [network.flat(network.trained[i], state[i][start:stop]) for i in used] if state else [],
        )


class StackedAdam:
    """`Adam` for several clients, with the weight decay of Adam or of AdamW.

    The state consists of the first moments, the second moments, and the powers of the betas for P trained parameters,
    float64 [slots, P, 2], which count the steps. A fused operation such as `lerp_` may round the last numbers of a row
    differently. Here each operation rounds once, so a client's bits do not depend on the number of clients.
    """

    def __init__(self, lr: float, weight_decay: float, decoupled: bool):
        self._lr, self._weight_decay, self._decoupled = lr, weight_decay, decoupled

    def new_state(self, network: StackedModel) -> list[Tensor]:
        weights = [network.entries[name] for name in network.trained]
        powers = torch.ones(network.slots, len(weights), 2, dtype=torch.float64, device=weights[0].device)
        return [*map(torch.zeros_like, weights), *map(torch.zeros_like, weights), powers]

    def move(
        self, network: StackedModel, gradients: Sequence[Tensor | None], state: list[Tensor], start: int, stop: int
    ) -> None:
        present = [(number, gradient) for number, gradient in enumerate(gradients) if gradient is not None]
        used = [number for number, _ in present]
        params = [network.entries[network.trained[number]][start:stop] for number in used]
        grads: list[Tensor] | tuple[Tensor, ...] = [
            network.by_client(network.trained[number], gradient, stop - start) for number, gradient in present
        ]
        if self._weight_decay and self._decoupled:
            torch._foreach_mul_(params, 1 - self._lr * self._weight_decay)
        elif self._weight_decay:
            grads = torch._foreach_add(grads, torch._foreach_mul(params, self._weight_decay))
        count = len(network.trained)
        first = [state[number][start:stop] for number in used]
        second = [state[count + number][start:stop] for number in used]
        torch._foreach_add_(first, _times(torch._foreach_sub(grads, first), 1 - BETAS[0]))
        torch._foreach_mul_(second, BETAS[1])
        torch._foreach_add_(second, _times(torch._foreach_mul(grads, grads), 1 - BETAS[1]))
        powers = state[-1][start:stop]
        powers[:, used] *= torch.tensor(BETAS, dtype=torch.float64, device=powers.device)
        scales = _by_parameter((1 - powers[..., 1]).sqrt(), used, params)
        rates = _by_parameter(self._lr / (1 - powers[..., 0]), used, params)
        roots = torch._foreach_sqrt(second)
        torch._foreach_div_(roots, scales)
        torch._foreach_add_(roots, EPSILON)
        steps = torch._foreach_div(first, roots)
        torch._foreach_mul_(steps, rates)
        torch._foreach_sub_(params, steps)


def _by_parameter(values: Tensor, used: list[int], params: list[Tensor]) -> list[Tensor]:
    """Return the columns `used` of `values` [n, P] in float32, each shaped [n, 1, ...] to fit its parameter."""
    columns = values.float().unbind(1)
    return [columns[number].view(-1, *[1] * (param.ndim - 1)) for number, param in zip(used, params, strict=True)]


def _times(tensors: tuple[Tensor, ...], factor: float) -> tuple[Tensor, ...]:
    torch._foreach_mul_(tensors, factor)
    return tensors
