"""SAFS for one class: features whose mean and covariance are given and whose random Fourier mean comes close.

Equation numbers are SFD's. `align` and `synthesis_loss` are the equations; `bank_gradient` is the gradient of their
composition in closed form. What makes it cheap:

- With W = (Z_raw - mean) L_raw^-T the features are Z = W L_g^T + mu, so the angles are W (Omega L_g)^T + Omega mu with
  a matrix that is computed once.
- Back through Cholesky: with G = dL/dW, B = G^T W and H the symmetric matrix that has B's lower triangle,
  dL/dZ_raw is (G - W H / (M - 1)) L_raw^-1 with its column means taken off. It costs three products, no solve.
- In the L1 loss only the sign of each of the D mean differences reaches the features, and that is known once one
  column of angles is: columns go through forward and backward a few at a time and stay in the cache.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from raylt.methods.sfd.fourier import fourier

CHUNK = 128     # Fourier columns at a time on a CPU: [M, 128] floats are 1 MB at M = 2000


class Target(NamedTuple):
    """What the features of a class should be like.

    Attributes:
        mean: mu, float64 [d].
        factor: L_g, float64 [d, d]: lower triangular, of the covariance.
        phi: mean of the real features' random Fourier features, float64 [D].
        omega: their frequencies, float32 [D/2, d].
    """

    mean: Tensor
    factor: Tensor
    phi: Tensor
    omega: Tensor


class Losses(NamedTuple):
    """The two terms of L_syn, Eq. 17."""

    mmd: float
    arr: float


@dataclass(frozen=True)
class Parts:
    """Which parts of SAFS are in use (Table 3 of SFD)."""

    aligner: bool = True
    mmd: bool = True
    arr: bool = True


def bank_sizes(counts: list[int], smallest: int, largest: int) -> list[int]:
    """M_c: `largest` for the smallest class down to `smallest` for the largest, linear in the rank of the size.

    Classes of one size share a rank; if all do, each gets `largest`.
    """
    ranks = {n: rank for rank, n in enumerate(sorted(set(counts)))}
    step = (largest - smallest) / max(len(ranks) - 1, 1)
    return [round(largest - ranks[n] * step) for n in counts]


def cholesky(cov: Tensor, jitter: float, limit: float = 1e-2) -> tuple[Tensor, float]:
    """L with L L^T = cov + jitter I, and the jitter, which is raised tenfold until the matrix is positive definite.

    Args:
        cov: float64 [d, d], symmetric.
        jitter: the first to try; `limit` the last.

    Raises:
        ValueError: it is not even with the last.
    """
    eye = torch.eye(len(cov), dtype=cov.dtype, device=cov.device)
    tried = jitter
    while tried <= limit * (1 + 1e-9):
        factor, info = torch.linalg.cholesky_ex(cov + tried * eye)
        if not info.item():
            return factor, tried
        tried *= 10
    raise ValueError(f"a covariance is not positive definite, not even with {limit:g} on its diagonal")


def align(raw: Tensor, target: Target) -> Tensor:
    """Features with exactly the target's mean and covariance, Eq. 12-14; differentiable.

    Args:
        raw: Z_raw [M, d], M >= d + 1: fewer rows span only a part of the space, and their covariance would be the
            projection of the target's.

    Returns:
        float64 [M, d].

    Raises:
        ValueError: M <= d.
    """
    if len(raw) <= raw.shape[1]:
        raise ValueError(f"M = {len(raw)} synthetic features cannot have a covariance of rank d = {raw.shape[1]}; "
                         f"at least {raw.shape[1] + 1} are needed")
    centred = raw.double() - raw.double().mean(0)
    factor, _ = cholesky(centred.T @ centred / (len(raw) - 1), RAW_JITTER)          # Eq. 12
    transform = torch.linalg.solve_triangular(factor, target.factor, upper=False, left=False)   # A, Eq. 13
    return centred @ transform.T + target.mean                                      # Eq. 14


def synthesis_loss(z: Tensor, target: Target, parts: Parts) -> Tensor:
    """L_syn = L_MMD + L_ARR, Eq. 15-17; differentiable.

    Args:
        z: Z_syn [M, d].
    """
    loss = z.new_zeros(())
    if parts.mmd:
        loss = loss + mmd(z, target)
    if parts.arr:
        loss = loss + arr(z)
    return loss


def mmd(z: Tensor, target: Target) -> Tensor:
    """L_MMD of Z_syn [M, d], Eq. 15; a scalar."""
    return (target.phi.to(z) - fourier(z, target.omega.to(z)).mean(0)).abs().sum()


def arr(z: Tensor) -> Tensor:
    """L_ARR of Z_syn [M, d], Eq. 16; a scalar."""
    return -z.clamp(max=0).sum(1).mean()


def bank_gradient(raw: Tensor, prepared: "Prepared") -> tuple[Tensor, float]:
    """The gradient of L_syn with respect to the memory bank, float32 [M, d], and L_syn.

    Args:
        raw: Z_raw, float32 [M, d].
    """
    if not prepared.parts.aligner:
        return _gradient_at(raw, prepared)
    centred = raw - raw.mean(0)
    factor, _ = cholesky((centred.T @ centred).double() / (len(raw) - 1), RAW_JITTER)
    eye = torch.eye(raw.shape[1], dtype=torch.float64, device=raw.device)
    inverse = torch.linalg.solve_triangular(factor, eye, upper=False).float()       # L_raw^-1
    white = centred @ inverse.T                                                     # W
    gradient, loss = _gradient_at(white, prepared)                                  # G
    lower = (gradient.T @ white).tril()
    symmetric = lower + lower.tril(-1).T                                            # H
    gradient = torch.addmm(gradient, white, symmetric, alpha=-1 / (len(raw) - 1)) @ inverse
    return gradient - gradient.mean(0), loss


@dataclass(frozen=True)
class Prepared:
    """What one class's steps share, float32: Z = W L_g^T + mu and its angles W (Omega L_g)^T + Omega mu.

    Attributes:
        factor: L_g [d, d] or None for Z = W; mean: mu [d].
        waves: Omega L_g [D/2, d]; offset: Omega mu [D/2].
        cosines, sines: the halves of the target's Fourier mean, [D/2].
    """

    parts: Parts
    factor: Tensor | None
    mean: Tensor
    waves: Tensor
    offset: Tensor
    cosines: Tensor
    sines: Tensor

    @classmethod
    def of(cls, target: Target, parts: Parts) -> "Prepared":
        omega = target.omega.double()
        cosines, sines = target.phi.float().chunk(2)
        if not parts.aligner:
            zeros = torch.zeros_like
            return cls(parts, None, zeros(target.mean).float(), target.omega, zeros(cosines), cosines, sines)
        return cls(parts, target.factor.float(), target.mean.float(), (omega @ target.factor).float(),
                   (omega @ target.mean).float(), cosines, sines)


def synthesise(target: Target, size: int, parts: Parts, steps: int, lr: float, momentum: float,
               generator: torch.Generator) -> tuple[Tensor, tuple[Losses, Losses]]:
    """Algorithm 1 for one class: SGD with momentum and a cosine learning rate on a bank from N(0, I).

    Args:
        size: M.
        generator: on the CPU, so that all devices start from the same bank.

    Returns:
        float32 [M, d], and what both losses were before the first step and are after the last, in use or not.
    """
    def features() -> Tensor:
        return align(raw, target).float() if parts.aligner else raw

    def losses(z: Tensor) -> Losses:
        return Losses(mmd(z, target).item(), arr(z).item())

    raw = torch.randn(size, len(target.mean), generator=generator).to(target.mean.device)
    velocity, start = torch.zeros_like(raw), losses(features())
    prepared = Prepared.of(target, parts)
    for t in range(steps if parts.mmd or parts.arr else 0):
        gradient, _ = bank_gradient(raw, prepared)
        velocity.mul_(momentum).add_(gradient)
        raw.add_(velocity, alpha=-lr * 0.5 * (1 + math.cos(math.pi * t / steps)))
    z = features()
    return z, (start, losses(z))


RAW_JITTER = 1e-6       # for the bank's covariance, which is well conditioned: Appendix B leaves the value open


def _gradient_at(white: Tensor, prepared: Prepared) -> tuple[Tensor, float]:
    """dL/dW and L_syn."""
    gradient = torch.zeros_like(white)
    loss = white.new_zeros(())
    if prepared.parts.arr:
        z = white if prepared.factor is None else torch.addmm(prepared.mean, white, prepared.factor.T)     # [M, d]
        negative = z.clamp(max=0)
        loss -= negative.sum() / len(white)
        slope = (negative < 0).to(white) / -len(white)
        gradient += slope if prepared.factor is None else slope @ prepared.factor
    if prepared.parts.mmd:
        loss += _add_mmd(gradient, white, prepared)
    return gradient, loss.item()


def _add_mmd(gradient: Tensor, white: Tensor, prepared: Prepared) -> Tensor:
    """Adds dL_MMD/dW to `gradient`, a few Fourier columns at a time; returns L_MMD, Eq. 15."""
    m, half = len(white), len(prepared.waves)
    width = half if white.is_cuda else CHUNK            # a GPU wants few large kernels
    scale = 1 / math.sqrt(half)                         # sqrt(2/D)
    share = white.new_full((m,), scale / m)
    loss = white.new_zeros(())
    buffers = white.new_empty(2, width, m)              # transposed: sums then run along the memory
    for start in range(0, half, width):
        part = slice(start, min(start + width, half))
        waves = prepared.waves[part]
        cos, sin = buffers[:, :len(waves)]
        torch.mm(waves, white.T, out=sin).add_(prepared.offset[part, None])
        torch.cos(sin, out=cos)
        sin.sin_()
        of_cos = prepared.cosines[part] - cos @ share   # mean differences of this part
        of_sin = prepared.sines[part] - sin @ share
        loss += of_cos.abs().sum() + of_sin.abs().sum()
        sin.mul_(of_cos.sign()[:, None]).addcmul_(cos, of_sin.sign()[:, None], value=-1)       # dL/dangle * M / scale
        gradient.addmm_(sin.T, waves, alpha=scale / m)
    return loss
