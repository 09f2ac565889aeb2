"""Gradient matching: optimise features so that their classifier gradients match given gradients of each class.

Sources: CReFF; Eq. 16-20 of MuPFL.

The gradient of softmax cross-entropy with respect to W and b is (p - e_y) [h, 1]^T. So it needs no autograd, and
matching it needs one pass of autograd, not two. All functions work on features [n, d], of images or of pixels.
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from raylt.errors import count_of
from raylt.ops.moments import LONGEST_FEATURE, ROUNDING
from raylt.tree import Tree

Distance = Literal["flat", "rows"]


def class_gradients(z: Tensor, y: Tensor, classifier: nn.Module) -> dict[int, Tensor]:
    """Return the mean gradient of the cross-entropy for each class that occurs, Eq. 16.

    Args:
        z: Features [n, d].
        y: Labels, int64 [n].
        classifier: An `nn.Linear` with a bias.

    Returns:
        float32 [C, d + 1] by class; the last column is the bias's gradient.
    """
    weight, bias = (entry.double() for entry in _weights(classifier))
    return {
        c: _gradient(z[y == c][None].double(), torch.tensor([c], device=z.device), weight, bias)[0].float()
        for c in y.unique().tolist()
    }


def gradient_like(classes: int, dim: int) -> Tensor:
    """Return an empty tensor, float32 [C, d + 1], with the shape of one class's gradient."""
    return torch.empty(classes, dim + 1, device="meta")


def gradients_fault(n: int, parts: Tree, labels: int = 1) -> str | None:
    """Return why a reply of `class_gradients` cannot come from the client's samples, or None.

    The bias's gradient is the mean of p - e_c, and no feature is longer than 1e4.

    Args:
        n: Number of the client's samples.
        parts: All parts of its reply.
        labels: Maximum number of labels per sample; for label maps, the number of pixels.
    """
    if not 1 <= len(parts["gradients"]) <= n * labels:
        classes = count_of(len(parts["gradients"]), "class", "classes")
        return f"has {classes}, and the client has {count_of(n, 'sample')}"
    for c, gradient in parts["gradients"].items():
        error = gradient[:, -1].double()  # [C], mean of p - e_c
        others = error.clone()
        others[c] = 0
        if (others < 0).any() or others.sum() > ROUNDING or (others.sum() + error[c]).abs() > 1e-5:
            return f"has no probabilities in class {c}"
        if (gradient[:, :-1].double().norm(dim=1) > error.abs() * LONGEST_FEATURE * ROUNDING + 1e-20).any():
            return f"has a feature longer than {LONGEST_FEATURE:g} in class {c}"
    return None


def mean_gradients(replies: list[Tree]) -> tuple[Tensor, Tensor]:
    """Return the classes that occur in the replies, and the unweighted mean gradient of each class, Eq. 17.

    Args:
        replies: Results of `class_gradients`.

    Returns:
        Classes, int64 [K] ascending, and means over the replies that have the class, [K, C, d + 1].
    """
    classes = sorted({c for reply in replies for c in reply})
    means = [torch.stack([reply[c] for reply in replies if c in reply]).mean(0) for c in classes]
    return torch.tensor(classes), torch.stack(means)


def match_features(
    h: Tensor,
    classes: Tensor,
    targets: Tensor,
    classifier: nn.Module,
    *,
    steps: int,
    lr: float,
    distance: Distance = "flat",
    penalty: Callable[[Tensor], Tensor] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Tensor, Tensor]:
    """Optimise features so that their mean gradient matches each class's target, Eq. 19 and 20.

    Args:
        h: Initial features, [K, m, d]: m features of each of K classes.
        classes: int64 [K].
        targets: [K, C, d + 1], as `mean_gradients` returns them.
        classifier: An `nn.Linear` with a bias; it is not changed.
        steps: Number of descent steps.
        lr: Step size.
        distance: "flat": 1 - cosine of a class's whole gradient. "rows": the sum of that over its rows, with the bias's
            column as one more row, as in CReFF.
        penalty: Function from the features [K, m, d] to a scalar that is minimised with the distance.
        progress: Called after each step with the number of completed steps and the total.

    Returns:
        The features, and the cosine of each class's gradient and target after the last step, [K].
    """
    weight, bias = _weights(classifier)
    # scale to length 1: clients that fit their samples well have gradients as small as 1e-10
    targets = targets / targets.norm(dim=(1, 2), keepdim=True).clamp(min=torch.finfo(targets.dtype).tiny)
    h = h.clone().requires_grad_()
    for step in range(steps):
        gradient = _gradient(h, classes, weight, bias)
        if distance == "flat":
            loss = (1 - _cosine(gradient.flatten(1), targets.flatten(1))).sum()
        else:
            rows = (1 - _cosine(gradient[..., :-1], targets[..., :-1])).sum()
            bias_column = (1 - _cosine(gradient[..., -1], targets[..., -1])).sum()
            loss = rows + bias_column
        loss = loss if penalty is None else loss + penalty(h)
        h = (h - lr * torch.autograd.grad(loss, h)[0]).detach().requires_grad_()
        if progress is not None:
            progress(step + 1, steps)
    h = h.detach()
    return h, _cosine(_gradient(h, classes, weight, bias).flatten(1), targets.flatten(1))


def _weights(classifier: nn.Module) -> tuple[Tensor, Tensor]:
    assert isinstance(classifier, nn.Linear)
    return classifier.weight.detach(), classifier.bias.detach()


def _gradient(h: Tensor, classes: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return the mean classifier gradient of the m features of each class, [K, C, d + 1] for h [K, m, d]."""
    p = F.linear(h, weight, bias).softmax(-1)  # [K, m, C]
    own = F.one_hot(classes, len(weight)).bool()[:, None]  # [K, 1, C]
    # compute p - 1 of the own class as minus the sum of the others: near p = 1 the difference would round to 0
    wrong = p.masked_fill(own, 0)
    error = torch.where(own, -wrong.sum(-1, keepdim=True), wrong)
    return error.mT @ F.pad(h, (0, 1), value=1.0) / h.shape[1]


def _cosine(a: Tensor, b: Tensor) -> Tensor:
    """Return the cosine of two tensors along the last dimension; 0 for a zero vector."""
    return F.cosine_similarity(a, b, dim=-1, eps=1e-12)
