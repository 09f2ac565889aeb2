"""Random Fourier features of the kernel exp(-gamma ||u - v||^2) (Rahimi and Recht 2007; orthogonal: Yu et al. 2016)."""

import math
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

FourierKind = Literal["orf", "iid"]


@lru_cache(maxsize=1)  # clients of one process share the tensor, because no code writes to it
def draw_frequencies(dim: int, features: int, gamma: float, kind: FourierKind, seed: int) -> Tensor:
    """Draw the frequencies Omega of random Fourier features. All parties draw the same frequencies from a seed.

    Args:
        dim: Width of a feature, d.
        features: Number of random features D, even.
        gamma: Parameter of the kernel.
        kind: "iid": rows from N(0, 2 gamma I). "orf": rows of random orthogonal matrices with the lengths of "iid"
            rows, which approximate the kernel better.
        seed: Seed of the draw.

    Returns:
        The frequencies, float32 [D/2, d], on the CPU.
    """
    generator = torch.Generator().manual_seed(seed)  # on the CPU, because GPUs draw other numbers
    rows = features // 2
    if kind == "iid":
        return math.sqrt(2 * gamma) * torch.randn(rows, dim, generator=generator)
    blocks = []
    for _ in range(-(-rows // dim)):
        gaussian = torch.randn(dim, dim, generator=generator, dtype=torch.float64)
        q, r = torch.linalg.qr(gaussian)  # float64, so that the rounded result is the same on all CPUs
        q = q * r.diagonal().sign()  # uniform over the orthogonal matrices
        lengths = torch.randn(dim, dim, generator=generator, dtype=torch.float64).norm(dim=1)  # chi with d degrees
        blocks.append(lengths[:, None] * q)
    return (math.sqrt(2 * gamma) * torch.cat(blocks)[:rows]).float()


def fourier(z: Tensor, omega: Tensor) -> Tensor:
    """Return the random Fourier features of z, unit vectors, Eq. 3 of SFD.

    They are phi(z) = sqrt(2/D) [cos(z Omega^T), sin(z Omega^T)].

    Args:
        z: Features, [n, d].
        omega: Frequencies, [D/2, d].

    Returns:
        The random Fourier features, [n, D], all cosines first.
    """
    angles = z @ omega.T  # [n, D/2]
    return torch.cat([angles.cos(), angles.sin()], dim=1) / math.sqrt(len(omega))


def fourier_sum(z: Tensor, omega: Tensor, chunk: int = 256) -> Tensor:
    """Return the sum of the random Fourier features over the rows of z, float64 [D].

    Args:
        z: Features, [n, d].
        omega: Frequencies, [D/2, d].
        chunk: Number of rows whose random Fourier features are in memory at the same time.
    """
    return torch.stack([fourier(part, omega).double().sum(0) for part in z.split(chunk)]).sum(0)


def bootstrap_floor(phi: Tensor, omega: Tensor, mean: Tensor, cov: Tensor, size: int) -> float:
    """Return the expected L_MMD (Eq. 15) of `size` real features of a class, drawn with replacement.

    It is computed from the sums of the class. The mean distance of a mean of M draws from its expectation is
    sqrt(2 / pi) s / sqrt(M). The sum of the variances of a frequency's two features follows from cos^2 + sin^2 = 1, and
    their difference from the assumption that the angles are normally distributed.

    Args:
        phi: Mean of the real features' random Fourier features, float64 [D].
        omega: Frequencies of these features, [D/2, d].
        mean: Mean of the real features, float64 [d].
        cov: Covariance of the real features, float64 [d, d].
        size: Number of features, M.
    """
    omega = omega.double()
    scale = math.sqrt(len(omega))  # phi is (cos, sin) / sqrt(D/2)
    cosine, sine = (scale * phi.double()).chunk(2)  # [D/2]
    total = (1 - cosine.square() - sine.square()).clamp(min=0)  # Var cos + Var sin
    double_angle = (2 * omega @ mean).cos() * (-2 * ((omega @ cov) * omega).sum(1)).exp()  # E cos(2 angle)
    difference = (double_angle - cosine.square() + sine.square()).clamp(-total, total)  # Var cos - Var sin
    deviations = ((total + difference) / 2).sqrt() + ((total - difference) / 2).sqrt()
    return (math.sqrt(2 / math.pi / size) * deviations.sum() / scale).item()
