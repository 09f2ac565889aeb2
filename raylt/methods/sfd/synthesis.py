"""SAFS for one class: synthesise features with a given mean and covariance, and a random Fourier mean close to a
target.

Equation numbers are SFD's. `align`, `mmd` and `arr` are the equations; `bank_gradient` is the gradient of their
composition in closed form. It is cheap for three reasons:

- With W = (Z_raw - mean) L_raw^-T the features are Z = W L_g^T + mu, so the angles are W (Omega L_g)^T + Omega mu with
  a matrix that is computed once.
- Backward through Cholesky: let G = dL/dW, B = G^T W, and H the symmetric matrix with B's lower triangle. Then
  dL/dZ_raw is (G - W H / (M - 1)) L_raw^-1 minus its column means. It needs three products and no solve.
- In the L1 loss only the sign of each of the D mean differences reaches the features, and each sign depends on one
  column of angles. So columns are processed forward and backward in small chunks that stay in the cache.
"""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from raylt.core.round_stats import StageProgress
from raylt.methods.sfd.fourier import fourier

RAW_JITTER = 1e-6  # Jitter of the features' covariance, which is well conditioned; Appendix B states no value.
MAX_JITTER = 1e-2
Start = Literal["noise", "scaled", "mean"]
CHUNK_SIZE = 128  # Fourier columns per chunk on a CPU: [M, 128] floats are 1 MB at M = 2000.


class Target(NamedTuple):
    """Target statistics for the synthetic features of one class.

    Attributes:
        mean: Mean mu, float64 [d].
        factor: Lower triangular Cholesky factor L_g of the covariance, float64 [d, d].
        phi: Mean of the real features' random Fourier features, float64 [D].
        omega: Frequencies of these features, float32 [D/2, d].
    """

    mean: Tensor
    factor: Tensor
    phi: Tensor
    omega: Tensor


class Losses(NamedTuple):
    """The two terms of the synthesis loss L_syn, Eq. 17."""

    mmd: float
    arr: float


@dataclass(frozen=True)
class Parts:
    """Switches for the components of the synthesis (SAFS, Table 3 of SFD)."""

    aligner: bool = True
    mmd: bool = True
    arr: bool = True


def bank_sizes(counts: list[int], smallest: int, largest: int) -> list[int]:
    """Return the number of synthetic features M_c of each class, linear in the class's rank by size.

    Classes of equal size share a rank; if all classes have the same size, each gets `largest`.

    Args:
        counts: Number of samples of each class.
        smallest: M_c of the largest class.
        largest: M_c of the smallest class.
    """
    ranks = {n: rank for rank, n in enumerate(sorted(set(counts)))}
    step = (largest - smallest) / max(len(ranks) - 1, 1)
    return [round(largest - ranks[n] * step) for n in counts]


def cholesky(cov: Tensor, jitter: float) -> tuple[Tensor, float]:
    """Return the Cholesky factor L with L L^T = cov + jitter I, and the jitter that was used.

    The jitter is raised tenfold, up to MAX_JITTER, until the matrix is positive definite.

    Args:
        cov: Covariance, float64 [d, d], symmetric.
        jitter: The first jitter to try.

    Raises:
        ValueError: The matrix is not positive definite with MAX_JITTER.
    """
    eye = torch.eye(len(cov), dtype=cov.dtype, device=cov.device)
    tried = jitter
    while tried <= MAX_JITTER * (1 + 1e-9):
        factor, info = torch.linalg.cholesky_ex(cov + tried * eye)
        if not info.item():
            return factor, tried
        tried *= 10
    raise ValueError(f"a covariance is not positive definite, not even with {MAX_JITTER:g} on its diagonal")


def align(raw: Tensor, target: Target) -> Tensor:
    """Transform features so that they have exactly the target's mean and covariance, Eq. 12-14; differentiable.

    Args:
        raw: Features Z_raw, [M, d], M >= d + 1. Fewer rows span only a part of the space, and their covariance would be
            a projection of the target's.
        target: The target statistics.

    Returns:
        The transformed features, float64 [M, d].

    Raises:
        ValueError: M <= d.
    """
    if len(raw) <= raw.shape[1]:
        raise ValueError(
            f"M = {len(raw)} synthetic features cannot have a covariance of rank d = {raw.shape[1]}; "
            f"at least {raw.shape[1] + 1} are needed"
        )
    centred = raw.double() - raw.double().mean(0)
    factor, _ = cholesky(centred.T @ centred / (len(raw) - 1), RAW_JITTER)  # Eq. 12
    transform = torch.linalg.solve_triangular(factor, target.factor, upper=False, left=False)  # A, Eq. 13
    return centred @ transform.T + target.mean  # Eq. 14


def mmd(z: Tensor, target: Target) -> Tensor:
    """Return the loss L_MMD (maximum mean discrepancy) of synthetic features [M, d], Eq. 15, a scalar."""
    return (target.phi.to(z) - fourier(z, target.omega.to(z)).mean(0)).abs().sum()


def arr(z: Tensor) -> Tensor:
    """Return the loss L_ARR of synthetic features [M, d], Eq. 16, a scalar."""
    return -z.clamp(max=0).sum(1).mean()


def bank_gradient(raw: Tensor, prepared: "Prepared") -> tuple[Tensor, Tensor]:
    """Return the gradient of the synthesis loss L_syn with respect to the features, float32 [M, d], and L_syn, Eq. 17.

    The loss stays on the device, to avoid a synchronisation with the GPU in each step.

    Args:
        raw: Features Z_raw, float32 [M, d].
        prepared: Constants of the class.
    """
    if not prepared.parts.aligner:
        return _gradient_at(raw, prepared)
    centred = raw - raw.mean(0)
    factor, _ = cholesky((centred.T @ centred).double() / (len(raw) - 1), RAW_JITTER)
    eye = torch.eye(raw.shape[1], dtype=torch.float64, device=raw.device)
    inverse = torch.linalg.solve_triangular(factor, eye, upper=False).float()  # L_raw^-1
    white = centred @ inverse.T  # W
    gradient, loss = _gradient_at(white, prepared)  # G
    lower = (gradient.T @ white).tril()
    symmetric = lower + lower.tril(-1).T  # H
    gradient = torch.addmm(gradient, white, symmetric, alpha=-1 / (len(raw) - 1)) @ inverse
    return gradient - gradient.mean(0), loss


@dataclass(frozen=True)
class Prepared:
    """Precomputed float32 constants of one class for the synthesis.

    The features are Z = W L_g^T + mu, with the angles W (Omega L_g)^T + Omega mu.

    Attributes:
        parts: Components of the synthesis that are used.
        factor: L_g, [d, d]; None for Z = W.
        mean: mu, [d].
        waves: Omega L_g, [D/2, d].
        offset: Omega mu, [D/2].
        cosines: First half of the target's Fourier mean, [D/2].
        sines: Second half of the target's Fourier mean, [D/2].
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
        return cls(
            parts,
            target.factor.float(),
            target.mean.float(),
            (omega @ target.factor).float(),
            (omega @ target.mean).float(),
            cosines,
            sines,
        )


def first_bank(target: Target, size: int, start: Start, generator: torch.Generator) -> Tensor:
    """Draw the initial features of Algorithm 1, float32 [M, d].

    Args:
        target: The target statistics.
        size: Number of features, M.
        start: "noise": N(0, I). "scaled": N(0, s^2 I), where s^2 is the mean variance of the class's features over the
            dimensions. "mean": N(mu, s^2 I). With the aligner, which removes mean and covariance of the bank, only the
            first steps differ.
        generator: Generator on the CPU, so that all devices start from the same bank.
    """
    raw = torch.randn(size, len(target.mean), generator=generator).to(target.mean.device)
    if start == "noise":
        return raw
    raw *= target.factor.norm().item() / math.sqrt(len(target.mean))
    return raw + target.mean.float() if start == "mean" else raw


def synthesise(
    target: Target,
    size: int,
    parts: Parts,
    steps: int,
    lr: float,
    momentum: float,
    generator: torch.Generator,
    start: Start = "noise",
    progress: StageProgress | None = None,
) -> tuple[Tensor, tuple[Losses, Losses]]:
    """Synthesise the features of one class by SGD with momentum and a cosine learning rate, Algorithm 1.

    Args:
        target: The target statistics.
        size: Number of features, M.
        parts: Components of the synthesis to use.
        steps: Number of steps.
        lr: Initial learning rate.
        momentum: Momentum of SGD.
        generator: Generator on the CPU, so that all devices start from the same bank.
        start: As for `first_bank`.
        progress: Function that is called after each step with the number of finished steps and of all steps.

    Returns:
        Features, float32 [M, d], and the values of both losses before the first step and after the last one, even if a
        loss is not used.
    """

    def features() -> Tensor:
        return align(raw, target).float() if parts.aligner else raw

    def losses(z: Tensor) -> Losses:
        return Losses(mmd(z, target).item(), arr(z).item())

    raw = first_bank(target, size, start, generator)
    velocity = torch.zeros_like(raw)
    before = losses(features())
    prepared = Prepared.of(target, parts)
    for t in range(steps if parts.mmd or parts.arr else 0):
        gradient, _ = bank_gradient(raw, prepared)
        velocity.mul_(momentum).add_(gradient)
        raw.add_(velocity, alpha=-lr * 0.5 * (1 + math.cos(math.pi * t / steps)))
        if progress is not None:
            progress(t + 1, steps)
    z = features()
    return z, (before, losses(z))


def _gradient_at(white: Tensor, prepared: Prepared) -> tuple[Tensor, Tensor]:
    """Return the gradient of the synthesis loss L_syn with respect to W, and the loss."""
    gradient = torch.zeros_like(white)
    loss = white.new_zeros(())
    if prepared.parts.arr:
        z = white if prepared.factor is None else torch.addmm(prepared.mean, white, prepared.factor.T)  # [M, d]
        negative = z.clamp(max=0)
        loss -= negative.sum() / len(white)
        slope = (negative < 0).to(white) / -len(white)
        gradient += slope if prepared.factor is None else slope @ prepared.factor
    if prepared.parts.mmd:
        loss += _add_mmd(gradient, white, prepared)
    return gradient, loss


def _add_mmd(gradient: Tensor, white: Tensor, prepared: Prepared) -> Tensor:
    """Add the gradient of L_MMD to `gradient` in chunks of Fourier columns; return L_MMD, Eq. 15."""
    m, half = len(white), len(prepared.waves)
    width = half if white.is_cuda else CHUNK_SIZE  # few large kernels are faster on a GPU
    scale = 1 / math.sqrt(half)  # sqrt(2/D)
    share = white.new_full((m,), scale / m)
    loss = white.new_zeros(())
    buffers = white.new_empty(2, width, m)  # transposed, so that sums are over contiguous memory
    for start in range(0, half, width):
        part = slice(start, min(start + width, half))
        waves = prepared.waves[part]
        cos, sin = buffers[:, : len(waves)]
        torch.mm(waves, white.T, out=sin).add_(prepared.offset[part, None])
        torch.cos(sin, out=cos)
        sin.sin_()
        of_cos = prepared.cosines[part] - cos @ share  # mean differences of this part
        of_sin = prepared.sines[part] - sin @ share
        loss += of_cos.abs().sum() + of_sin.abs().sum()
        sin.mul_(of_cos.sign()[:, None]).addcmul_(cos, of_sin.sign()[:, None], value=-1)  # dL/dangle * M / scale
        gradient.addmm_(sin.T, waves, alpha=scale / m)
    return loss
