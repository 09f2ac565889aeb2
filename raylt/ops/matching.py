"""Features found by matching gradients: of a linear classifier, per class (CReFF; Eq. 16-20 of MuPFL).

The gradient of softmax cross-entropy with respect to W and b is (p - e_y) [h, 1]^T, so no autograd runs for it, and
one pass of autograd, not two, for the features whose gradient is to match. Everything is over features [n, d]: those of
images, or of pixels.
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from raylt.tree import Tree

Distance = Literal["flat", "rows"]


def class_gradients(z: Tensor, y: Tensor, classifier: nn.Module) -> dict[int, Tensor]:
    """Of each class that occurs, by its number, the mean gradient of its samples' cross-entropy, Eq. 16.

    Args:
        z: features [n, d].
        y: int64 [n].
        classifier: an `nn.Linear` with a bias.

    Returns:
        float32 [C, d + 1] of each; the bias's gradient is the last column.
    """
    weight, bias = (entry.double() for entry in _weights(classifier))
    return {c: _gradient(z[y == c][None].double(), torch.tensor([c], device=z.device), weight, bias)[0].float()
            for c in y.unique().tolist()}


def mean_gradients(replies: list[Tree]) -> tuple[Tensor, Tensor]:
    """The classes that some reply of `class_gradients` has, int64 [K] ascending, and of each the mean of the gradients
    of those that have it, each counting the same, Eq. 17, [K, C, d + 1]."""
    classes = sorted({c for reply in replies for c in reply})
    means = [torch.stack([reply[c] for reply in replies if c in reply]).mean(0) for c in classes]
    return torch.tensor(classes), torch.stack(means)


def match_features(h: Tensor, classes: Tensor, targets: Tensor, classifier: nn.Module, *, steps: int, lr: float,
                   distance: Distance = "flat",
                   also: Callable[[Tensor], Tensor] | None = None) -> tuple[Tensor, Tensor]:
    """Features whose mean gradient points where each class's target does, Eq. 19 and 20, by gradient descent.

    Args:
        h: what they start from, [K, m, d]: m features of each of K classes.
        classes: int64 [K].
        targets: [K, C, d + 1], as `mean_gradients` gives them.
        classifier: an `nn.Linear` with a bias; it stays as it is.
        distance: 1 - cosine of a class's whole gradient; or the sum of that over its rows, the bias's column being
            one more, as CReFF has it.
        also: a scalar of the features [K, m, d] that is lowered with the distance.

    Returns:
        The features, and the cosine of each class's gradient and target after the last step, [K].
    """
    weight, bias = _weights(classifier)
    # of length 1: those of clients that fit their samples well may be as small as 1e-10
    targets = targets / targets.norm(dim=(1, 2), keepdim=True).clamp(min=torch.finfo(targets.dtype).tiny)
    h = h.clone().requires_grad_()
    for _ in range(steps):
        found = _gradient(h, classes, weight, bias)
        if distance == "flat":
            loss = (1 - _cosine(found.flatten(1), targets.flatten(1))).sum()
        else:
            loss = ((1 - _cosine(found[..., :-1], targets[..., :-1])).sum()
                    + (1 - _cosine(found[..., -1], targets[..., -1])).sum())
        loss = loss if also is None else loss + also(h)
        h = (h - lr * torch.autograd.grad(loss, h)[0]).detach().requires_grad_()
    h = h.detach()
    return h, _cosine(_gradient(h, classes, weight, bias).flatten(1), targets.flatten(1))


def _weights(classifier: nn.Module) -> tuple[Tensor, Tensor]:
    assert isinstance(classifier, nn.Linear)
    return classifier.weight.detach(), classifier.bias.detach()


def _gradient(h: Tensor, classes: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Mean gradient of the m features of each class, [K, C, d + 1] of h [K, m, d]."""
    p = F.linear(h, weight, bias).softmax(-1)                                   # [K, m, C]
    own = F.one_hot(classes, len(weight)).bool()[:, None]                       # [K, 1, C]
    # p - 1 of the own class as minus the others' sum: near p = 1 it would be rounded to nothing
    wrong = p.masked_fill(own, 0)
    error = torch.where(own, -wrong.sum(-1, keepdim=True), wrong)
    return error.mT @ F.pad(h, (0, 1), value=1.0) / h.shape[1]


def _cosine(a: Tensor, b: Tensor) -> Tensor:
    """Along the last dimension; 0 for a zero vector."""
    return F.cosine_similarity(a, b, dim=-1, eps=1e-12)
