"""Per-class first and second moments of features: sums at the clients, means and covariances where they meet."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from raylt.errors import ConfigError
from raylt.tree import Tree

NEVER = -1e9        # the bias of a class that is not to be predicted; finite, as whatever travels is


class Moments(NamedTuple):
    """Count, mean [d] and biased covariance [d, d] of one class's features, float64."""

    n: int
    mean: Tensor
    cov: Tensor


def class_sums(z: Tensor, y: Tensor) -> dict[int, Tree]:
    """Of each class that occurs: its count `n` and the sums `z` [d] and `zz` [d (d + 1) / 2], packed, in float64.

    Sums of these over clients are the sums of the pooled features; float64, because a covariance is the small
    difference of large second moments.

    Args:
        z: features [n, d].
        y: int64 [n].
    """
    sums: dict[int, Tree] = {}
    for c in y.unique().tolist():
        own = z[y == c].double()
        sums[c] = {"n": len(own), "z": own.sum(0), "zz": pack(own.T @ own)}
    return sums


def class_means(z: Tensor, y: Tensor, unit: bool = False) -> dict[int, Tree]:
    """Of each class that occurs: its count `n`, and `n` times the mean of its features, `z` [d], float32.

    Args:
        z: features [n, d].
        y: int64 [n].
        unit: whether each mean is brought to length 1 before.
    """
    sums: dict[int, Tree] = {}
    for c in y.unique().tolist():
        own = z[y == c].double()
        mean = own.mean(0)
        sums[c] = {"n": len(own), "z": (len(own) * (F.normalize(mean, dim=0) if unit else mean)).float()}
    return sums


def pooled_means(sums: Tree, classes: int) -> Tree:
    """From sums of `class_means`: `means` float32 [C, d], Eq. 3 of FedSM, and `present` bool [C], who has one."""
    dim = len(next(iter(sums.values()))["z"])
    means, present = torch.zeros(classes, dim), torch.zeros(classes, dtype=torch.bool)
    for c, of_class in sums.items():
        means[c], present[c] = of_class["z"] / of_class["n"], True
    return {"means": means, "present": present}


def moments(sums: Tree) -> Moments:
    """Count, mean and covariance from one class's sums, Eq. 10 of SFD."""
    mean = sums["z"] / sums["n"]
    return Moments(sums["n"], mean, unpack(sums["zz"], len(mean)) / sums["n"] - torch.outer(mean, mean))


def isotropic_deviation(held: Sequence[Moments]) -> float:
    """The deviation of a feature from its class's mean: the root of its variance's mean over samples and directions."""
    n = sum(of_class.n for of_class in held)
    return (sum(of_class.n * of_class.cov.diagonal().mean().item() for of_class in held) / n) ** 0.5


def moments_fault(sums: Tree) -> str | None:
    """Why sums by class, of `class_sums`, cannot be those of any features: the variance of some direction would be
    negative; or None."""
    for c, of_class in sums.items():
        cov = moments(of_class).cov
        rounding = 1e-9 * cov.diagonal().abs().max() + 1e-12 * of_class["zz"].abs().max() / of_class["n"] + 1e-30
        if torch.linalg.cholesky_ex(cov + rounding * torch.eye(len(cov), dtype=cov.dtype)).info:
            return f"has no covariance in class {c}"
    return None


def sample_lengths(clip: float) -> dict[str, float]:
    """What one sample whose feature is no longer than `clip` can add to `class_sums` of its class, leaf by leaf. The
    packed triangle of z z^T is no longer than |z|^2, and as long where z has one entry."""
    return {"n": 1.0, "z": clip, "zz": clip**2}


def nearest_moments(sums: Tree) -> Tree:
    """Sums by class with noise, as samples could have them: whole counts, covariances without negative directions. A
    class whose count is not even one is left out.

    Raises:
        ConfigError: that is so of all of them.
    """
    mended = {}
    for c, noisy in sums.items():
        n = round(noisy["n"])
        if n < 1:
            continue
        mended[c] = noisy | {"n": n}
        if "zz" in noisy:
            mean = noisy["z"] / n
            cov = unpack(noisy["zz"], len(mean)) / n - torch.outer(mean, mean)
            mended[c]["zz"] = pack(n * (without_negative(cov) + torch.outer(mean, mean)))
    if not mended:
        raise ConfigError("privacy.epsilon: no class has a sample left under so much noise; take a larger one")
    return mended


def without_negative(matrix: Tensor) -> Tensor:
    """The nearest symmetric matrix without negative eigenvalues, float64 [d, d]."""
    values, vectors = torch.linalg.eigh(matrix)
    return (vectors * values.clamp(min=0)) @ vectors.T


def pack(matrix: Tensor) -> Tensor:
    """The upper triangle of a symmetric [d, d] row by row, [d (d + 1) / 2]."""
    rows, columns = torch.triu_indices(*matrix.shape, device=matrix.device)
    return matrix[rows, columns]


def unpack(triangle: Tensor, dim: int) -> Tensor:
    """The inverse of `pack`."""
    rows, columns = torch.triu_indices(dim, dim, device=triangle.device)
    matrix = triangle.new_zeros(dim, dim)
    matrix[rows, columns] = triangle
    matrix[columns, rows] = triangle
    return matrix


def class_scatter(z: Tensor, y: Tensor, weight: str = "n") -> tuple[Tensor, int]:
    """Sum over classes of weight_c M_c, Eq. 13-15 of BPFed, float64 [d, d], and the sum of the weights.

    Args:
        z: features [n, d].
        y: int64 [n].
        weight: "n" or "n-1", of a class with n samples. One sample has no covariance, and counts as zero.
    """
    total, weights = z.new_zeros(z.shape[1], z.shape[1], dtype=torch.float64), 0
    for c in y.unique():
        own = z[y == c].double()
        n = len(own) if weight == "n" else len(own) - 1
        own = own - own.mean(0)
        total += n / max(len(own) - 1, 1) * (own.T @ own)
        weights += n
    return total, weights


def perturb(covariance: Tensor, n: int, generator: torch.Generator) -> Tensor:
    """n draws from N(0, M), float64 [n, d]; M [d, d] may lack rank, as a Cholesky factor would not let it.

    Args:
        generator: of the CPU, so that every device gets the same numbers.
    """
    values, vectors = torch.linalg.eigh(covariance.double())
    xi = torch.randn(n, len(values), generator=generator, dtype=torch.float64).to(values.device)
    return (xi * values.clamp(min=0).sqrt()) @ vectors.T
