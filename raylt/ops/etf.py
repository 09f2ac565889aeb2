"""Fixed classifiers whose rows lie as far apart as they can: the simplex equiangular tight frame, and a sparse one."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F


def simplex_etf(classes: int, dim: int, generator: torch.Generator) -> Tensor:
    """C unit vectors any two of which have the cosine -1 / (C - 1), turned at random; float32 [C, d].

    sqrt(C / (C - 1)) P (I - 1 1^T / C) with the columns of P orthonormal, Eq. 3 of FedETF, transposed.

    Args:
        dim: d, at least C.
        generator: of the CPU.
    """
    p = torch.linalg.qr(torch.randn(dim, classes, generator=generator, dtype=torch.float64)).Q
    m = p @ (torch.eye(classes, dtype=torch.float64) - 1 / classes)
    return (math.sqrt(classes / (classes - 1)) * m).T.float().contiguous()


def sparse_etf(classes: int, dim: int, zeros: float, steps: int, generator: torch.Generator, *, length: float = 0.1,
               lr: float = 1e-4) -> Tensor:
    """The frame with a share of its entries at 0, and the others moved so that it is nearly one again; float32 [C, d].

    By Adam, as FedLoGe's code: rows get the given length, and the angle of each to its nearest grows.

    Args:
        zeros: the share of the entries, at random places.
        steps: of Adam.
    """
    e = simplex_etf(classes, dim, generator)
    gone = torch.randperm(e.numel(), generator=generator)[:int(zeros * e.numel())]
    kept = torch.ones(e.numel()).index_fill(0, gone, 0.0).view_as(e)
    e = (e * kept).requires_grad_()
    optimiser = torch.optim.Adam([e], lr)
    itself = torch.eye(classes, dtype=torch.bool)
    for _ in range(steps):
        unit = F.normalize(e, dim=1)
        nearest = (unit @ unit.T).masked_fill(itself, -1.0).amax(1).clamp(-0.99999, 0.99999)
        loss = (e.norm(dim=1) - length).square().sum() - nearest.acos().mean()
        optimiser.zero_grad()
        loss.backward()
        assert e.grad is not None
        e.grad *= kept
        optimiser.step()
    return e.detach()
