"""`SGD`: the optimiser of every client."""
# pyright: reportPrivateImportUsage=false

from collections.abc import Iterable

import torch
from torch import Tensor


class SGD:
    """Stochastic gradient descent with momentum and weight decay, equal to `torch.optim.SGD` to the bit.

    Our own, because the first `torch.optim` object of a process imports torch's compiler: 6 s and 20 % more memory in
    every client process.
    """

    def __init__(self, params: Iterable[Tensor], lr: float, momentum: float = 0.0, weight_decay: float = 0.0):
        self.params = [p for p in params if p.requires_grad]
        self.lr, self.momentum, self.weight_decay = lr, momentum, weight_decay
        self._velocity = [torch.zeros_like(p) for p in self.params] if momentum else []

    @torch.no_grad()
    def step(self, loss: Tensor) -> None:
        """One step along the gradient of a scalar loss; parameters that it does not depend on stay."""
        found = torch.autograd.grad(loss, self.params, allow_unused=True)
        used = [i for i, g in enumerate(found) if g is not None]
        params, grads = [self.params[i] for i in used], [g for g in found if g is not None]
        if self.weight_decay:
            # not in place: autograd may give one tensor as the gradient of two parameters
            grads = torch._foreach_add(grads, params, alpha=self.weight_decay)
        if self.momentum:
            velocity = [self._velocity[i] for i in used]
            torch._foreach_mul_(velocity, self.momentum)
            torch._foreach_add_(velocity, grads)
            grads = velocity
        torch._foreach_add_(params, grads, alpha=-self.lr)
