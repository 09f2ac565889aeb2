"""Fixed classifiers with maximally separated rows: the simplex equiangular tight frame and a sparse variant."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from raylt.errors import ConfigError

LENGTH = 0.1  # target length of the rows of the sparse variant, as in FedLoGe's code


def simplex_etf(classes: int, dim: int, generator: torch.Generator) -> Tensor:
    """Return C randomly rotated unit vectors with pairwise cosines -1 / (C - 1), float32 [C, d].

    sqrt(C / (C - 1)) P (I - 1 1^T / C) with the columns of P orthonormal, Eq. 3 of FedETF, transposed.

    Args:
        classes: The number of classes, C.
        dim: Length of each vector, d; at least C.
        generator: Random generator on the CPU.

    Raises:
        ConfigError: There are fewer than two classes.
    """
    if classes < 2:
        raise ConfigError(
            f"method: a simplex frame needs at least two classes ({classes}). Use another method.",
            code="data.too-few",
            key="method",
            value=classes,
        )
    p = torch.linalg.qr(torch.randn(dim, classes, generator=generator, dtype=torch.float64)).Q
    m = p @ (torch.eye(classes, dtype=torch.float64) - 1 / classes)
    return (math.sqrt(classes / (classes - 1)) * m).T.float().contiguous()


def sparse_etf(
    classes: int,
    dim: int,
    zeros: float,
    steps: int,
    generator: torch.Generator,
    lr: float = 1e-4,
) -> Tensor:
    """Return a simplex frame in which some entries are 0 and the others are re-optimised, float32 [C, d].

    As in FedLoGe's code, Adam changes the entries so that rows get the length LENGTH and the angle between each row and
    its nearest row grows.

    Args:
        classes: Number of classes, C.
        dim: Length of each row, d; at least C.
        zeros: Fraction of the entries that are 0, chosen at random.
        steps: Number of Adam steps.
        generator: Random generator on the CPU.
        lr: Learning rate of Adam.
    """
    e = simplex_etf(classes, dim, generator)
    zeroed = torch.randperm(e.numel(), generator=generator)[: int(zeros * e.numel())]
    kept = torch.ones(e.numel()).index_fill(0, zeroed, 0.0).view_as(e)
    e = (e * kept).requires_grad_()
    optimiser = torch.optim.Adam([e], lr)
    diagonal = torch.eye(classes, dtype=torch.bool)
    for _ in range(steps):
        unit = F.normalize(e, dim=1)
        nearest = (unit @ unit.T).masked_fill(diagonal, -1.0).amax(1).clamp(-0.99999, 0.99999)
        loss = (e.norm(dim=1) - LENGTH).square().sum() - nearest.acos().mean()
        optimiser.zero_grad()
        loss.backward()
        assert e.grad is not None
        e.grad *= kept
        optimiser.step()
    return e.detach()
