"""`sgd`, the hot loop of every method; and what else is computed over a client's own samples."""
# pyright: reportPrivateImportUsage=false

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from raylt.client import Client
from raylt.data.samples import Batch, Samples
from raylt.metrics import confusion

Objective = Callable[[Batch], Tensor]


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


def sgd(client: Client, objective: Objective, params: Iterable[Tensor] | None = None, epochs: int | None = None,
        lr: float | None = None) -> float:
    """Trains a client's model on its own batches and returns the mean loss per sample.

    Args:
        objective: the loss of a batch, a scalar.
        params: what is trained; all parameters of the client's model by default.
        epochs, lr: `local.epochs` and `local.lr` of the configuration by default.
    """
    local, model = client.config.local, client.model
    model.train()
    optimiser = SGD(model.parameters() if params is None else params, local.lr if lr is None else lr, local.momentum,
                    local.weight_decay)
    total, seen = torch.zeros((), device=client.device), 0
    for batch in client.batches(local.epochs if epochs is None else epochs, local.batch):
        loss = objective(batch)
        optimiser.step(loss)
        total += loss.detach() * len(batch.y)       # stays on the device: reading it here would stop a GPU every step
        seen += len(batch.y)
    return total.item() / max(seen, 1)


@torch.no_grad()
def confusion_of(predict: Callable[[Tensor], Tensor], samples: Samples, classes: int, size: int) -> Tensor:
    """Counts of (true class, predicted class) over all samples, int64 [C, C] on the CPU.

    Args:
        predict: images [B, channels, H, W] to logits [B, C], in evaluation mode.
        size: images at a time.
    """
    total = torch.zeros(classes, classes, dtype=torch.int64, device=samples.y.device)
    for batch in samples.in_order(size):
        total += confusion(predict(batch.x).argmax(1), batch.y, classes)
    return total.cpu()
