"""Linear classifiers computed from feature statistics without training: {"weight": [C, d], "bias": [C]}."""

import torch
from torch import Tensor
from torch.nn import functional as F

from raylt.models.split import StateDict
from raylt.ops.moments import LONGEST_FEATURE, NEVER, ROUNDING, is_covariance, unpack
from raylt.tree import Tree


def nearest_mean_classifier(means: Tensor, present: Tensor) -> StateDict:
    """Return FedNCM's classifier, whose weights are the normalised class means mu_c / ||mu_c||.

    The classifier never predicts a class without a mean.

    Args:
        means: Means of the classes, [C, d].
        present: True for classes that have a mean, bool [C].
    """
    return {"weight": F.normalize(means, dim=1), "bias": torch.where(present, 0.0, NEVER)}


def ridge_classifier(a: Tensor, b: Tensor, ridge: float, normalise: bool = True) -> StateDict:
    """Return Fed3R's classifier: ridge regression of labels on features with an appended constant 1.

    A class without samples is never predicted.

    Args:
        a: Sum of [z; 1] [z; 1]^T, float64 [d + 1, d + 1].
        b: Sum of [z; 1] e_y^T, float64 [d + 1, C].
        ridge: lambda.
        normalise: Scale each class's weights to length 1 and divide its bias by the same number.
    """
    solution = ridge_regression(a, b, ridge)
    if normalise:
        solution = solution / solution[:-1].norm(dim=0).clamp(min=1e-12)
    # B's last row counts samples; with privacy noise the count of an empty class is not exactly 0
    bias = solution[-1].masked_fill(b[-1] < 0.5, NEVER)
    return {"weight": solution[:-1].T.float().contiguous(), "bias": bias.float()}


def ridge_sums_fault(n: int, parts: Tree, longest: float | None = None, negative: bool = True) -> str | None:
    """Return why Fed3R's sums `a` and `b` in a client's reply are impossible, or None.

    Args:
        n: Number of the client's samples.
        parts: All parts of its reply.
        longest: Maximum length of a feature, without the appended 1; None: 1e4.
        negative: Whether a feature may be negative; False behind a ReLU.
    """
    longest = LONGEST_FEATURE if longest is None else longest
    b = parts["b"]
    a = unpack(parts["a"], len(b))
    counts = b[-1]
    if (counts < 0).any() or (counts - counts.round()).abs().max() > 1e-9 or counts.sum().round() != n:
        return "does not count as many samples as the client has"
    if not negative and ((a < 0).any() or (b < 0).any()):
        return "comes from negative features, and the encoder ends in a ReLU"
    if (b[:-1].norm(dim=0) > counts * longest * ROUNDING).any():
        return f"has a mean feature longer than {longest:g}"
    if (a[-1] - b.sum(1)).abs().max() > 1e-6 * n * longest:
        return "does not agree with a on the sum of all features"
    if a.trace() > n * (longest**2 + 1) * ROUNDING or not is_covariance(a):
        return "comes with a part a that no features can have"
    means = b[:-1] / counts.round().clamp(min=1)  # by class
    within = a[:-1, :-1] - means @ b[:-1].T
    rounding = 1e-9 * a.diagonal().max()  # `within` is a difference of large sums
    if torch.linalg.cholesky_ex(within + rounding * torch.eye(len(within), dtype=within.dtype)).info:
        return "does not agree with a: features would have negative variances within their classes"
    return None


def ridge_regression(a: Tensor, b: Tensor, ridge: float) -> Tensor:
    """Solve (A + lambda I) W = B for W [d, C], float64, on the server's CPU.

    Args:
        a: The matrix A, float64 [d, d].
        b: The matrix B, float64 [d, C].
        ridge: lambda.
    """
    return torch.linalg.solve(a + ridge * torch.eye(len(a), dtype=a.dtype), b)
