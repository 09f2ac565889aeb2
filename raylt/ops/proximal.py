"""Loss terms over all parameters: the squared distance from an anchor, and a zero term with a given gradient."""
# pyright: reportPrivateImportUsage=false

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def squared_distance(params: Sequence[Tensor], anchor: Sequence[Tensor]) -> Tensor:
    """Return the squared distance sum ||p - a||^2 between parameters and an anchor, a scalar.

    Its gradient with respect to p is 2 (p - a).

    The bits equal those of `torch.stack([(p - a).square().sum() ...]).sum()` and of its gradient, with a quarter of the
    kernels: on a GPU, kernel launches determine how long a step takes.
    """
    return _SquaredDistance.apply(list(anchor), *params)  # pyright: ignore[reportReturnType]


class _SquaredDistance(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: list[Tensor], *params: Tensor) -> Tensor:
        differences = torch._foreach_sub(params, anchor)
        ctx.save_for_backward(*differences)
        return torch.stack([square.sum() for square in torch._foreach_mul(differences, differences)]).sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (gradient,) = grad_outputs
        return None, *torch._foreach_mul(ctx.saved_tensors, 2 * gradient)


def with_gradient(params: Sequence[Tensor], gradient: Sequence[Tensor]) -> Tensor:
    """Return a scalar 0 whose gradient with respect to the parameters is `gradient`.

    The bits equal those of `sum(((p - p.detach()) * g).sum() ...)` and of its gradient, with a tenth of the kernels.
    """
    return _WithGradient.apply(list(gradient), *params)  # pyright: ignore[reportReturnType]


class _WithGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradient: list[Tensor], *params: Tensor) -> Tensor:
        ctx.save_for_backward(*gradient)
        return params[0].new_zeros(())

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (gradient,) = grad_outputs
        return None, *torch._foreach_mul(ctx.saved_tensors, gradient)  # copies, since autograd may add to them in place
