"""The squared distance of parameters to where they were, for proximal terms."""
# pyright: reportPrivateImportUsage=false

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def squared_distance(params: Sequence[Tensor], anchor: Sequence[Tensor]) -> Tensor:
    """sum ||p - a||^2 over all of them, a scalar; its gradient with respect to p is 2 (p - a).

    The bits are those of `torch.stack([(p - a).square().sum() ...]).sum()` and of its gradient, for a quarter of the
    kernels: on a GPU a step is as long as what it launches.
    """
    return _SquaredDistance.apply(list(anchor), *params)        # pyright: ignore[reportReturnType]


class _SquaredDistance(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: list[Tensor], *params: Tensor) -> Tensor:
        differences = torch._foreach_sub(params, anchor)
        ctx.save_for_backward(*differences)
        return torch.stack([square.sum() for square in torch._foreach_mul(differences, differences)]).sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Any:      # pyright: ignore[reportIncompatibleMethodOverride]
        gradient, = grad_outputs
        return None, *torch._foreach_mul(ctx.saved_tensors, 2 * gradient)
