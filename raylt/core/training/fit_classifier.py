"""`fit_classifier`: trains a classifier on features.

The gradient of a softmax regression has a closed form. Computing it directly saves two thirds of the time of a small
step, which autograd would spend on bookkeeping. The same kernels run on the same values as in autograd, so the bits are
the same.
"""
# pyright: reportPrivateImportUsage=false

import math
from collections.abc import Callable
from typing import Literal, TypeGuard, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from raylt.core.training.cuda_graphs import Repeated
from raylt.core.training.optimisers import SGD
from raylt.recordability import recordable

FitSchedule = Literal["epoch", "iteration", "constant"]
WORTH = 10  # replays that make a recording worthwhile
Step = Callable[[Tensor], None]  # a training step on the given rows of the features


@recordable
def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """Return torch's cross-entropy, the mean over a batch."""
    return F.cross_entropy(logits, y)


def fit_classifier(
    classifier: nn.Module,
    z: Tensor,
    y: Tensor,
    *,
    epochs: int,
    batch: int,
    lr: float,
    momentum: float,
    weight_decay: float,
    seed: int,
    schedule: FitSchedule = "epoch",
    loss: Callable[[Tensor, Tensor], Tensor] = cross_entropy,
    progress: Callable[[int, int], None] | None = None,
) -> float:
    """Train a classifier on features by SGD, in shuffled batches.

    Args:
        z: Features [n, d], on the classifier's device.
        y: int64 [n], or soft labels [n, C], on the classifier's device.
        seed: Seed of the order of the samples, which is the same on every device.
        schedule: "epoch": the learning rate falls along a cosine from `lr` towards 0 over the epochs; "iteration": it
            follows the cosine of period 2 * `epochs` *steps* that SFD's code computes; "constant".
        loss: Function of logits and labels, the mean over a batch; by default the cross-entropy. Where it is
            `recordable`, and the learning rate is the same for several steps, a GPU records a step once and replays it,
            see `Repeated`.
        progress: Gets the number of epochs that are done and of all, after each epoch.

    Returns:
        The mean loss of the last epoch.

    Raises:
        ValueError: The schedule is unknown.
    """
    if schedule not in get_args(FitSchedule):
        raise ValueError(f"schedule: unknown schedule ({schedule}). Give one of {', '.join(get_args(FitSchedule))}.")
    optimiser = SGD(classifier.parameters(), lr, momentum, weight_decay)
    generator = torch.Generator().manual_seed(seed)
    classifier.train()
    losses = _LossSum(z.device)
    has_all_labels = not y.is_floating_point() and bool((y >= 0).all())  # torch ignores a label of -100
    if loss is cross_entropy and has_all_labels and is_plain_linear(classifier):
        step = _closed_form_step(classifier, z, y, optimiser, losses)
    else:
        step = _autograd_step(classifier, loss, z, y, optimiser, losses)
    # a recording has one learning rate, so it pays only if several steps share the rate
    is_recorded = schedule == "constant" or (schedule == "epoch" and len(z) // batch >= WORTH)
    recorded = Repeated(step, z.device, [loss, optimiser], [classifier])
    steps = 0
    for epoch in range(epochs):
        losses.counts = epoch == epochs - 1
        if schedule == "epoch" or losses.counts:
            recorded.renew()
        for rows in torch.randperm(len(z), generator=generator).to(z.device, non_blocking=True).split(batch):
            if schedule != "constant":
                passed = epoch if schedule == "epoch" else steps
                optimiser.lr = lr * 0.5 * (1 + math.cos(math.pi * passed / epochs))
            if is_recorded:
                recorded(rows)
            else:
                step(rows)
            steps += 1
        if progress is not None:
            progress(epoch + 1, epochs)
    return losses.total.item() / max(len(z), 1)


class _LossSum:
    """The sum of the losses of samples, of one epoch.

    Attributes:
        counts: Whether the losses of the current epoch are added, as in the last epoch.
    """

    def __init__(self, device: torch.device):
        self.total = torch.zeros((), device=device)
        self.counts = False

    def add(self, mean: Tensor, n: int) -> None:
        """Add the losses of n samples with this mean."""
        self.total.add_(mean * n)


def _closed_form_step(classifier: nn.Linear, z: Tensor, y: Tensor, optimiser: SGD, losses: _LossSum) -> Step:
    """Return a step of a softmax regression that computes its gradients directly."""
    gradients = SoftmaxGradients(classifier)

    def step(rows: Tensor) -> None:
        labels = y.index_select(0, rows)
        log_p, of_params = gradients(z.index_select(0, rows), labels)
        optimiser.descend(of_params)
        if losses.counts:
            losses.add(F.nll_loss(log_p, labels), len(rows))

    return step


def _autograd_step(
    classifier: nn.Module,
    loss: Callable[[Tensor, Tensor], Tensor],
    z: Tensor,
    y: Tensor,
    optimiser: SGD,
    losses: _LossSum,
) -> Step:
    """Return a step of any classifier and loss."""

    def step(rows: Tensor) -> None:
        value = loss(classifier(z[rows]), y[rows])
        optimiser.step(value)
        if losses.counts:
            losses.add(value.detach(), len(rows))

    return step


def is_plain_linear(classifier: nn.Module) -> TypeGuard[nn.Linear]:
    """Return whether a classifier is torch's own linear layer, without hooks, and all its parameters are trained."""
    hooks = classifier._forward_hooks or classifier._forward_pre_hooks or classifier._backward_hooks
    return type(classifier) is nn.Linear and not hooks and all(p.requires_grad for p in classifier.parameters())


class SoftmaxGradients:
    """Gradients of the mean cross-entropy of a softmax regression, in closed form.

    The calls run the kernels that autograd would run, in its order, so the gradients have the same bits.
    """

    def __init__(self, classifier: nn.Linear):
        self._weight, self._bias = classifier.weight, classifier.bias
        weight = classifier.weight
        self._one_hot = torch.eye(len(weight), dtype=weight.dtype, device=weight.device)

    @torch.no_grad()
    def __call__(self, z: Tensor, y: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return the log-probabilities [B, C], and the gradients of the weight [C, d] and of the bias [C], if any.

        Args:
            z: Features [B, d].
            y: Labels, int64 [B].
        """
        log_p = F.linear(z, self._weight, self._bias).log_softmax(1)
        grad_log_p = self._one_hot.index_select(0, y).div_(-len(y))
        grad_logits = torch._log_softmax_backward_data(grad_log_p, log_p, 1, log_p.dtype)
        grad_weight = grad_logits.t() @ z
        gradients = [grad_weight] if self._bias is None else [grad_weight, grad_logits.sum(0)]
        return log_p, gradients
