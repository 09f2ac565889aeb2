"""Features found by matching gradients: of a linear classifier, per class (CReFF; Eq. 16-20 of MuPFL).

The gradient of softmax cross-entropy with respect to W and b is (p - e_y) [h, 1]^T, so no autograd runs for it, and
one pass of autograd, not two, for the features whose gradient is to match. Everything is over features [n, d]: those of
images, or of pixels.
"""

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

Distance = Literal["flat", "rows"]


def class_gradients(z: Tensor, y: Tensor, weight: Tensor, bias: Tensor) -> dict[int, Tensor]:
    """Of each class that occurs, the mean gradient of its samples' cross-entropy, Eq. 16, float32 [C, d + 1].

    Args:
        z: features [n, d].
        y: int64 [n].
        weight, bias: of the classifier, [C, d] and [C]; the bias's gradient is the last column.
    """
    return {c: _gradient(z[y == c][None].double(), torch.tensor([c], device=z.device), weight.double(),
                         bias.double())[0].float() for c in y.unique().tolist()}


def match_features(h: Tensor, classes: Tensor, targets: Tensor, weight: Tensor, bias: Tensor, *, steps: int, lr: float,
                   distance: Distance = "flat") -> tuple[Tensor, Tensor]:
    """Features whose mean gradient points where each class's target does, Eq. 19 and 20, by gradient descent.

    Args:
        h: what they start from, [K, m, d]: m features of each of K classes.
        classes: int64 [K].
        targets: [K, C, d + 1], as `class_gradients` gives them.
        weight, bias: of the classifier, [C, d] and [C].
        distance: 1 - cosine of a class's whole gradient; or the sum of that over its rows, the bias's column being
            one more, as CReFF has it.

    Returns:
        The features, and the cosine of each class's gradient and target after the last step, [K].
    """
    h = h.clone().requires_grad_()
    for _ in range(steps):
        found = _gradient(h, classes, weight, bias)
        loss = (1 - _cosine(found, targets)).sum() if distance == "flat" else sum(
            (1 - F.cosine_similarity(found[..., part], targets[..., part], dim=dim)).sum()
            for part, dim in [(slice(-1), 2), (-1, 1)])
        assert isinstance(loss, Tensor)
        h = (h - lr * torch.autograd.grad(loss, h)[0]).detach().requires_grad_()
    h = h.detach()
    return h, _cosine(_gradient(h, classes, weight, bias), targets)


def _gradient(h: Tensor, classes: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Mean gradient of the m features of each class, [K, C, d + 1] of h [K, m, d]."""
    p = F.linear(h, weight, bias).softmax(-1)                                   # [K, m, C]
    own = F.one_hot(classes, len(weight)).bool()[:, None]                       # [K, 1, C]
    # p - 1 of the own class as minus the others' sum: near p = 1 it would be rounded to nothing
    wrong = p.masked_fill(own, 0)
    error = torch.where(own, -wrong.sum(-1, keepdim=True), wrong)
    return error.mT @ F.pad(h, (0, 1), value=1.0) / h.shape[1]


def _cosine(a: Tensor, b: Tensor) -> Tensor:
    return F.cosine_similarity(a.flatten(1), b.flatten(1))
