"""`fit_classifier`: trains a classifier on features.

The gradient of a softmax regression has a closed form. Computing it directly saves two thirds of a small step, which is
spent on autograd's bookkeeping. The same kernels run on the same values as in autograd, so the bits are the same.
"""
# pyright: reportPrivateImportUsage=false

import math
import time
from collections.abc import Callable
from typing import Literal, TypeGuard, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from raylt.core.training.cuda_graphs import Repeated
from raylt.core.training.optimisers import SGD
from raylt.recordability import recordable

Schedule = Literal["epoch", "iteration", "constant"]
WORTH = 10  # replays that make a recording worthwhile
TIMED = 20  # steps from which the time of all is estimated


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
    schedule: Schedule = "epoch",
    loss: Callable[[Tensor, Tensor], Tensor] = cross_entropy,
    progress: Callable[[int, int], None] | None = None,
) -> float:
    """Train a classifier on features by SGD, in shuffled batches.

    Args:
        z: features [n, d], on the classifier's device.
        y: int64 [n], or soft labels [n, C], on the classifier's device.
        seed: of the order of the samples, which is the same on every device.
        schedule: "epoch": the learning rate falls along a cosine from `lr` towards 0 over the epochs; "iteration": it
            follows the cosine of period 2 * `epochs` *steps* that SFD's code computes; "constant".
        loss: function of logits and labels, the mean over a batch; by default the cross-entropy. Where it is
            `recordable`, and the learning rate is the same for several steps, a GPU records a step once and replays it,
            see `Repeated`.
        progress: gets the number of epochs that are done and of all, after each epoch.

    Returns:
        The mean loss of the last epoch.

    Raises:
        ValueError: there is no such schedule.
    """
    if schedule not in get_args(Schedule):
        raise ValueError(f"schedule: no such schedule ({schedule}). Give one of {', '.join(get_args(Schedule))}.")
    optimiser = SGD(classifier.parameters(), lr, momentum, weight_decay)
    generator = torch.Generator().manual_seed(seed)
    classifier.train()
    steps, total = 0, torch.zeros((), device=z.device)
    is_last = False  # only the last epoch's loss is summed

    has_all_labels = not y.is_floating_point() and bool((y >= 0).all())  # torch ignores a label of -100
    if loss is cross_entropy and has_all_labels and is_plain_linear(classifier):
        gradients = SoftmaxGradients(classifier)

        def step(rows: Tensor) -> None:
            labels = y.index_select(0, rows)
            log_p, of_params = gradients(z.index_select(0, rows), labels)
            optimiser.descend(of_params)
            if is_last:
                total.add_(F.nll_loss(log_p, labels) * len(rows))
    else:

        def step(rows: Tensor) -> None:
            value = loss(classifier(z[rows]), y[rows])
            optimiser.step(value)
            if is_last:
                total.add_(value.detach() * len(rows))

    # a recording has one learning rate, so it pays only if several steps share the rate
    lasts = schedule == "constant" or (schedule == "epoch" and len(z) // batch >= WORTH)
    repeated = Repeated(step, z.device, [loss, optimiser], [classifier])
    for epoch in range(epochs):
        is_last = epoch == epochs - 1
        if schedule == "epoch" or is_last:
            repeated.renew()
        for rows in torch.randperm(len(z), generator=generator).to(z.device, non_blocking=True).split(batch):
            if schedule != "constant":
                passed = epoch if schedule == "epoch" else steps
                optimiser.lr = lr * 0.5 * (1 + math.cos(math.pi * passed / epochs))
            repeated(rows) if lasts else step(rows)
            steps += 1
        if progress is not None:
            progress(epoch + 1, epochs)
    return total.item() / max(len(z), 1)


def fit_time(dim: int, classes: int, samples: int, epochs: int, batch: int) -> str:
    """Return the estimated time that `fit_classifier` takes on `samples` features, as text."""
    return about(fit_seconds(dim, classes, samples, epochs, batch))


def fit_seconds(dim: int, classes: int, samples: int, epochs: int, batch: int) -> float:
    """Return the seconds that `fit_classifier` takes on `samples` features, estimated from a few timed steps."""
    classifier = nn.Linear(dim, classes)
    rows = min(samples, TIMED * batch)
    z, y = torch.zeros(rows, dim), torch.zeros(rows, dtype=torch.long)

    def timed() -> float:
        start = time.perf_counter()
        fit_classifier(classifier, z, y, epochs=1, batch=batch, lr=0.0, momentum=0.9, weight_decay=0.0, seed=0)
        return time.perf_counter() - start

    timed()  # the first steps are slower
    steps = epochs * math.ceil(samples / batch)
    return timed() / math.ceil(rows / batch) * steps


def about(seconds: float) -> str:
    """Return a duration as text, such as `about 12 s on one core of this machine`."""
    return f"about {max(1, round(seconds))} s on one core of this machine"


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
            z: features [B, d].
            y: labels, int64 [B].
        """
        log_p = F.linear(z, self._weight, self._bias).log_softmax(1)
        of_loss = self._one_hot.index_select(0, y).div_(-len(y))  # with respect to log_p
        of_logits = torch._log_softmax_backward_data(of_loss, log_p, 1, log_p.dtype)
        of_weight = of_logits.t() @ z
        gradients = [of_weight] if self._bias is None else [of_weight, of_logits.sum(0)]
        return log_p, gradients
