"""Linear classifiers that are computed from statistics of features, not trained: {"weight": [C, d], "bias": [C]}."""

import torch
from torch import Tensor
from torch.nn import functional as F

from raylt.models.split import Params
from raylt.ops.moments import NEVER


def nearest_mean_classifier(means: Tensor, present: Tensor) -> Params:
    """W_c = mu_c / ||mu_c||, b = 0, of FedNCM; a class without a mean is never predicted.

    Args:
        means: [C, d].
        present: bool [C].
    """
    return {"weight": F.normalize(means, dim=1), "bias": torch.where(present, 0.0, NEVER)}


def ridge_classifier(a: Tensor, b: Tensor, ridge: float, normalise: bool = True) -> Params:
    """Ridge regression of labels on features with a constant 1, of Fed3R; a class without samples is never predicted.

    Args:
        a: sum of [z; 1] [z; 1]^T, float64 [d + 1, d + 1].
        b: sum of [z; 1] e_y^T, float64 [d + 1, C].
        normalise: whether each class's weights are brought to length 1, its bias divided alike.
    """
    solution = ridge_regression(a, b, ridge)
    if normalise:
        solution = solution / solution[:-1].norm(dim=0).clamp(min=1e-12)
    # the constant's row of B are the samples; with the noise of privacy that of a class without any is not quite 0
    bias = solution[-1].masked_fill(b[-1] < 0.5, NEVER)
    return {"weight": solution[:-1].T.float().contiguous(), "bias": bias.float()}


def ridge_regression(a: Tensor, b: Tensor, ridge: float) -> Tensor:
    """W [d, C] of (A + lambda I) W = B, A [d, d], B [d, C], float64, on the CPU, where a server keeps its sums."""
    return torch.linalg.solve(a + ridge * torch.eye(len(a), dtype=a.dtype), b)
