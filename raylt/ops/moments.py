"""First and second moments of features by class: sums at clients, means and covariances at the server."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from raylt.errors import ConfigError, count_of
from raylt.tree import Tree

# Maximum accepted length of a feature. Features of trained networks are shorter, and the square is still precise in
# float32. With privacy.epsilon, features are clipped to privacy.clip.
LONGEST_FEATURE = 1e4
ROUNDING = 1 + 1e-3  # float32 sums exceed their bounds by a smaller factor
NEVER = -1e9  # bias of a class that must not be predicted; finite, because replies and messages must be finite


class Moments(NamedTuple):
    """Count, mean [d] and biased covariance [d, d] of one class's features, float64."""

    n: int
    mean: Tensor
    cov: Tensor


def class_sums(z: Tensor, y: Tensor) -> dict[int, Tree]:
    """Return, for each class that occurs, the count `n`, the feature sum `z` [d] and the packed sum `zz` of z z^T.

    Sums of these over clients are the sums of the pooled features. They are float64, because a covariance is the small
    difference of large second moments.

    Args:
        z: Features [n, d].
        y: Labels, int64 [n].
    """
    sums: dict[int, Tree] = {}
    for c in y.unique().tolist():
        own = z[y == c].double()
        sums[c] = {"n": len(own), "z": own.sum(0), "zz": pack(own.T @ own)}
    return sums


def weighted_class_means(z: Tensor, y: Tensor, unit: bool = False) -> dict[int, Tree]:
    """Return, for each class that occurs, the count `n` and `z`, the mean feature times n, float32 [d].

    Sums of these over clients give the means over all their samples: `pooled_means`.

    Args:
        z: Features [n, d].
        y: Labels, int64 [n].
        unit: Scale each mean to length 1 first.
    """
    sums: dict[int, Tree] = {}
    for c in y.unique().tolist():
        own = z[y == c].double()
        mean = own.mean(0)
        sums[c] = {"n": len(own), "z": (len(own) * (F.normalize(mean, dim=0) if unit else mean)).float()}
    return sums


def pooled_means(sums: Tree, classes: int) -> Tree:
    """Return class means over all clients, float32 [C, d], and a mask of classes that have one, bool [C].

    The argument is the sum of `weighted_class_means` over clients, Eq. 3 of FedSM. The result has the entries `means`
    and `present`.
    """
    dim = len(next(iter(sums.values()))["z"])
    means, present = torch.zeros(classes, dim), torch.zeros(classes, dtype=torch.bool)
    for c, of_class in sums.items():
        means[c], present[c] = of_class["z"] / of_class["n"], True
    return {"means": means, "present": present}


def moments_from_sums(sums: Tree) -> Moments:
    """Return the count, mean and covariance of one class's features from their sums, Eq. 10 of SFD."""
    mean = sums["z"] / sums["n"]
    return Moments(sums["n"], mean, unpack(sums["zz"], len(mean)) / sums["n"] - torch.outer(mean, mean))


def isotropic_deviation(class_moments: Sequence[Moments]) -> float:
    """Return the standard deviation of features around their class means, pooled over samples and dimensions."""
    n = sum(of_class.n for of_class in class_moments)
    return (sum(of_class.n * of_class.cov.diagonal().mean().item() for of_class in class_moments) / n) ** 0.5


def moments_fault(sums: Tree) -> str | None:
    """Return why the given class sums are impossible for any features, or None.

    Such sums would make the variance of some direction negative.
    """
    for c, of_class in sums.items():
        cov = moments_from_sums(of_class).cov
        rounding = 1e-9 * cov.diagonal().abs().max() + 1e-12 * of_class["zz"].abs().max() / of_class["n"] + 1e-30
        if torch.linalg.cholesky_ex(cov + rounding * torch.eye(len(cov), dtype=cov.dtype)).info:
            return f"has no covariance in class {c}"
    return None


def sums_fault(
    n: int, parts: Tree, longest: float | None = None, part: str = "classes", negative: bool = True
) -> str | None:
    """Return why the feature sums in a client's reply are impossible, or None.

    Counts are checked where they are declared (`Reduction.counting`).

    Args:
        n: Number of the client's samples.
        parts: All parts of its reply.
        longest: Maximum length of a feature, `privacy.clip` if features are clipped; None: 1e4.
        part: Name of the part with the sums.
        negative: Whether a feature may be negative; False behind a ReLU.
    """
    longest = LONGEST_FEATURE if longest is None else longest
    for c, of_class in parts[part].items():
        count = of_class["n"]
        if not 1 <= count <= n:
            return f"counts {count_of(count, 'sample')} of class {c}"
        if not negative and any((of_class[name] < 0).any() for name in ("z", "zz") if name in of_class):
            return f"has negative features in class {c}, and the encoder ends in a ReLU"
        if of_class["z"].double().norm() > count * longest * ROUNDING:
            return f"has a mean feature longer than {longest:g} in class {c}"
        if "zz" in of_class and packed_trace(of_class["zz"], len(of_class["z"])) > count * longest**2 * ROUNDING:
            return f"has second moments of features longer than {longest:g} in class {c}"
        if "phi" in of_class and of_class["phi"].norm() > count * ROUNDING:
            return f"has a mean Fourier feature longer than 1 in class {c}"
    return None


def scatter_fault(n: int, parts: Tree, classes: int, weight: str, longest: float | None = None) -> str | None:
    """Return why the packed scatter in a client's reply is impossible, or None.

    Args:
        n: Number of the client's samples.
        parts: All parts of its reply.
        classes: Number of classes, C.
        weight: "n" or "n-1", see `class_residuals`.
        longest: Maximum length of a feature; None: 1e4.
    """
    least = n if weight == "n" else n - min(n, classes)
    most = n if weight == "n" else n - 1
    if not least <= parts["n"] <= most:
        return f"weighs {parts['n']}, and the client has {count_of(n, 'sample')}"
    longest = LONGEST_FEATURE if longest is None else longest
    packed = parts["scatter"].double()
    dim = round(((8 * len(packed) + 1) ** 0.5 - 1) / 2)
    if packed_trace(packed, dim) > 2 * n * longest**2 * ROUNDING:  # n / (n - 1) is at most 2
        return f"has second moments of features longer than {longest:g}"
    return None if is_covariance(unpack(packed, dim), torch.float32) else "has negative variances"


def packed_trace(triangle: Tensor, dim: int) -> float:
    """Return the trace of a symmetric matrix [d, d], given as its packed triangle."""
    rows = torch.arange(dim)
    return triangle[rows * dim - rows * (rows - 1) // 2].double().sum().item()


def is_covariance(matrix: Tensor, precision: torch.dtype = torch.float64) -> bool:
    """Return whether a symmetric matrix, float64 [d, d], has no negative eigenvalue beyond rounding errors.

    Args:
        matrix: The matrix to check.
        precision: Type in which the matrix was sent.
    """
    slack = 4 * len(matrix) * torch.finfo(precision).eps * matrix.diagonal().abs().max() + 1e-30
    return not torch.linalg.cholesky_ex(matrix + slack * torch.eye(len(matrix), dtype=matrix.dtype)).info


def sample_lengths(clip: float) -> dict[str, float]:
    """Return the largest norm that a sample with |z| <= `clip` adds to each entry of `class_sums`.

    The packed triangle of z z^T is not longer than |z|^2, and as long where z has one non-zero entry.
    """
    return {"n": 1.0, "z": clip, "zz": clip**2}


def nearest_moments(sums: Tree) -> Tree:
    """Return the valid class sums that are nearest to the given noisy sums.

    Counts become whole numbers and covariances lose their negative directions. A class with a count below one is left
    out.

    Raises:
        ConfigError: Every class is left out.
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
        raise ConfigError(
            f"privacy.epsilon: the noise leaves no class with a positive count ({len(sums)} classes). Raise "
            "privacy.epsilon.",
            code="privacy.too-noisy",
            key="privacy.epsilon",
        )
    return mended


def without_negative(matrix: Tensor) -> Tensor:
    """Return the nearest symmetric matrix without negative eigenvalues, float64 [d, d]."""
    values, vectors = torch.linalg.eigh(matrix)
    return (vectors * values.clamp(min=0)) @ vectors.T


def pack(matrix: Tensor) -> Tensor:
    """Pack the upper triangle of a symmetric matrix [d, d] row by row into a vector [d (d + 1) / 2]."""
    rows, columns = torch.triu_indices(*matrix.shape, device=matrix.device)
    return matrix[rows, columns]


def unpack(triangle: Tensor, dim: int) -> Tensor:
    """Return the symmetric matrix [d, d] of a packed triangle, the inverse of `pack`."""
    rows, columns = torch.triu_indices(dim, dim, device=triangle.device)
    matrix = triangle.new_zeros(dim, dim)
    matrix[rows, columns] = triangle
    matrix[columns, rows] = triangle
    return matrix


def class_residuals(z: Tensor, y: Tensor, weight: str = "n") -> tuple[Tensor, int]:
    """Return rows R [n, d] whose product R^T R is a weighted sum of class covariances, and the sum of the weights.

    Each row is a feature minus its class's mean, times a factor of its class. Rows are float64.

    Args:
        z: Features [n, d].
        y: Labels, int64 [n].
        weight: "n" or "n-1", the weight of a class with n samples. One sample has no covariance and counts as zero.
    """
    rows = torch.empty_like(z, dtype=torch.float64)
    weights = 0
    for c in y.unique():
        of_class = y == c
        own = z[of_class].double()
        n = len(own) if weight == "n" else len(own) - 1
        rows[of_class] = (own - own.mean(0)) * math.sqrt(n / max(len(own) - 1, 1))
        weights += n
    return rows, weights


def class_scatter(z: Tensor, y: Tensor, weight: str = "n") -> tuple[Tensor, int]:
    """Return the weighted sum of class covariances M_c, float64 [d, d], and the sum of the weights, Eq. 13-15 of BPFed.

    The arguments are the same as for `class_residuals`.
    """
    rows, weights = class_residuals(z, y, weight)
    return rows.T @ rows, weights


def perturb_along(rows: Tensor, n: int, generator: torch.Generator) -> Tensor:
    """Draw n vectors from N(0, R^T R) for the given rows R [m, d], float64 [n, d].

    For up to d rows no matrix [d, d] is built. This saves most of the time if a client has fewer samples than features
    have entries.

    Args:
        rows: The rows R.
        n: Number of vectors.
        generator: Random generator on the CPU, so that every device gets the same numbers.
    """
    if len(rows) > rows.shape[1]:
        return perturb(rows.T @ rows, n, generator)
    xi = torch.randn(n, len(rows), generator=generator, dtype=torch.float64).to(rows.device)
    return xi @ rows


def perturb(covariance: Tensor, n: int, generator: torch.Generator) -> Tensor:
    """Draw n vectors from N(0, M), float64 [n, d], where M is the given covariance.

    M [d, d] may be singular, in which case a Cholesky decomposition would fail.

    Args:
        covariance: The matrix M.
        n: Number of vectors.
        generator: Random generator on the CPU, so that every device gets the same numbers.
    """
    values, vectors = torch.linalg.eigh(covariance.double())
    xi = torch.randn(n, len(values), generator=generator, dtype=torch.float64).to(values.device)
    return (xi * values.clamp(min=0).sqrt()) @ vectors.T
