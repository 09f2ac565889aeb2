"""Random Fourier features of the kernel exp(-gamma ||u - v||^2) (Rahimi and Recht 2007; orthogonal: Yu et al. 2016)."""

import math
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

Kind = Literal["orf", "iid"]


@lru_cache(maxsize=1)       # clients of one process ask for the same; nobody writes to it
def draw_frequencies(dim: int, features: int, gamma: float, kind: Kind, seed: int) -> Tensor:
    """Frequencies Omega, a function of the arguments alone: every party draws the same from a seed.

    Args:
        dim: d.
        features: D, even.
        gamma: of the kernel.
        kind: "iid", rows from N(0, 2 gamma I); "orf", rows of random orthogonal matrices with the lengths of such
            rows, which approximates the kernel better.

    Returns:
        float32 [D/2, d], on the CPU.
    """
    generator = torch.Generator().manual_seed(seed)     # the CPU's: GPUs draw other numbers
    rows = features // 2
    if kind == "iid":
        return math.sqrt(2 * gamma) * torch.randn(rows, dim, generator=generator)
    blocks = []
    for _ in range(-(-rows // dim)):
        gaussian = torch.randn(dim, dim, generator=generator, dtype=torch.float64)
        q, r = torch.linalg.qr(gaussian)                # in float64: rounded, it is the same on every make of CPU
        q = q * r.diagonal().sign()                     # uniform over the orthogonal matrices
        lengths = torch.randn(dim, dim, generator=generator, dtype=torch.float64).norm(dim=1)       # chi with d degrees
        blocks.append(lengths[:, None] * q)
    return (math.sqrt(2 * gamma) * torch.cat(blocks)[:rows]).float()


def fourier(z: Tensor, omega: Tensor) -> Tensor:
    """phi(z) = sqrt(2/D) [cos(z Omega^T), sin(z Omega^T)], of length 1, Eq. 3 of SFD.

    Args:
        z: [n, d].
        omega: [D/2, d].

    Returns:
        [n, D], all cosines first.
    """
    angles = z @ omega.T                                # [n, D/2]
    return torch.cat([angles.cos(), angles.sin()], dim=1) / math.sqrt(len(omega))


def fourier_sum(z: Tensor, omega: Tensor, chunk: int = 256) -> Tensor:
    """Sum of phi over the rows of z, float64 [D]."""
    return torch.stack([fourier(part, omega).double().sum(0) for part in z.split(chunk)]).sum(0)
