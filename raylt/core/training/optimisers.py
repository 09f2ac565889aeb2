"""`SGD` and `Adam`: the optimisers of every client.

They replace torch's, because the first `torch.optim` object of a process imports torch's compiler, which takes 6 s and
20 % more memory in every client process.
"""
# pyright: reportPrivateImportUsage=false

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor

from raylt.config import LocalConfig
from raylt.errors import ConfigError, type_name

BETAS, EPSILON = (0.9, 0.999), 1e-8  # defaults of torch.optim.Adam


class Optimiser(Protocol):
    """Takes steps along the gradient of a loss."""

    recordable: bool

    def step(self, loss: Tensor) -> None:
        """Take one step along the gradient of a scalar loss."""
        ...


def make_optimiser(local: LocalConfig, params: Iterable[Tensor], lr: float) -> Optimiser:
    """Return the optimiser that `local.optimiser` names."""
    if local.optimiser == "sgd":
        return SGD(params, lr, local.momentum, local.weight_decay)
    return Adam(params, lr, local.weight_decay, decoupled=local.optimiser == "adamw")


class SGD:
    """Stochastic gradient descent with momentum and weight decay, bit for bit as `torch.optim.SGD`."""

    recordable = True  # while the learning rate does not change

    def __init__(self, params: Iterable[Tensor], lr: float, momentum: float = 0.0, weight_decay: float = 0.0):
        self.params = [p for p in params if p.requires_grad]
        self.lr, self.momentum, self.weight_decay = lr, momentum, weight_decay
        self._velocity = [torch.zeros_like(p) for p in self.params] if momentum else []

    @torch.no_grad()
    def step(self, loss: Tensor) -> None:
        """Take one step along the gradient of a scalar loss; parameters without a gradient stay unchanged."""
        used, params, grads = _gradients(loss, self.params)
        if used:
            self.move(params, grads, [self._velocity[i] for i in used] if self.momentum else [])

    @torch.no_grad()
    def descend(self, gradients: list[Tensor]) -> None:
        """Take one step along given gradients of all trained parameters, in the parameters' order."""
        self.move(self.params, gradients, self._velocity)

    def move(self, params: list[Tensor], grads: list[Tensor], velocity: list[Tensor]) -> None:
        """Move parameters along their gradients, with velocities if there is momentum."""
        if self.weight_decay:
            # not in place, since two parameters may share one gradient tensor
            grads = list(torch._foreach_add(grads, params, alpha=self.weight_decay))
        if self.momentum:
            torch._foreach_mul_(velocity, self.momentum)
            torch._foreach_add_(velocity, grads)
            grads = velocity
        torch._foreach_add_(params, grads, alpha=-self.lr)


class Adam:
    """Adam (Kingma and Ba, ICLR 2015) or AdamW (Loshchilov and Hutter, ICLR 2019), as in torch.

    Args:
        decoupled: Whether the weight decay acts on the parameters instead of the gradient, as in AdamW.
    """

    recordable = False  # the bias corrections are numbers on the host that change with each step

    def __init__(self, params: Iterable[Tensor], lr: float, weight_decay: float = 0.0, decoupled: bool = False):
        self.params = [p for p in params if p.requires_grad]
        self.lr, self.weight_decay, self.decoupled = lr, weight_decay, decoupled
        self._first = [torch.zeros_like(p) for p in self.params]
        self._second = [torch.zeros_like(p) for p in self.params]
        self._steps = [0] * len(self.params)

    @torch.no_grad()
    def step(self, loss: Tensor) -> None:
        """Take one step along the gradient of a scalar loss; parameters without a gradient stay unchanged."""
        used, params, grads = _gradients(loss, self.params)
        if not used:
            return
        first, second = [self._first[i] for i in used], [self._second[i] for i in used]
        for i in used:
            self._steps[i] += 1
        if self.weight_decay and self.decoupled:
            torch._foreach_mul_(params, 1 - self.lr * self.weight_decay)
        elif self.weight_decay:
            grads = torch._foreach_add(grads, params, alpha=self.weight_decay)
        torch._foreach_lerp_(first, grads, 1 - BETAS[0])
        torch._foreach_mul_(second, BETAS[1])
        torch._foreach_addcmul_(second, grads, grads, value=1 - BETAS[1])
        # the correction counts each parameter's own steps, since a classifier may be frozen for some of them
        roots = torch._foreach_sqrt(second)
        torch._foreach_div_(roots, [(1 - BETAS[1] ** self._steps[i]) ** 0.5 for i in used])
        torch._foreach_add_(roots, EPSILON)
        torch._foreach_addcdiv_(params, first, roots, [-self.lr / (1 - BETAS[0] ** self._steps[i]) for i in used])


def _gradients(loss: Tensor, params: list[Tensor]) -> tuple[list[int], list[Tensor], list[Tensor]]:
    """Return the indices, the values and the gradients of the parameters that the loss depends on.

    Raises:
        ConfigError: The loss is not a scalar, or depends on no parameter.
    """
    if not params:  # all of them are frozen
        return [], [], []
    if not isinstance(loss, Tensor) or loss.ndim or not loss.requires_grad:
        raise _wrong_loss(loss)
    gradients = torch.autograd.grad(loss, params, allow_unused=True)
    used = [i for i, gradient in enumerate(gradients) if gradient is not None]
    return used, [params[i] for i in used], [gradient for gradient in gradients if gradient is not None]


def _wrong_loss(loss: object) -> ConfigError:
    if not isinstance(loss, Tensor):
        problem = type_name(loss)
    elif loss.ndim:
        problem = f"a tensor of shape {list(loss.shape)}"
    else:
        problem = "a tensor that depends on no trained parameter"
    return ConfigError(
        f"objective: the loss of a batch is {problem}. Return the mean over the batch, a tensor of shape [] with a "
        "gradient.",
        code="method.wrong-argument",
        key="objective",
    )
