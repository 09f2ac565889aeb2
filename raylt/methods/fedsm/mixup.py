"""Semantic mixup of FedSM, Eq. 4-6: class prototypes mixed with features of samples chosen by class relevance."""

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

Similarity = Literal["cosine", "dot", "l1", "l2"]
Partner = Literal["probabilistic", "ranked", "deterministic", "random", "inverted"]
Unit = Literal["class", "sample"]


def relevance(text: Tensor, similarity: Similarity, temperature: float | None = None, inverted: bool = False) -> Tensor:
    """Return the relevance of class j's features for class i, a matrix alpha [C, C] of float32 >= 0, Eq. 5 of FedSM.

    The similarity of a class with itself would dominate, so it is replaced by the mean of its row, including itself.

    Args:
        text: Text features, [C, d].
        similarity: Cosine, or dot product or 1 / (1 + distance) of the vectors without normalisation.
        temperature: Temperature of the softmax over each row, the optional non-linearity; None for none.
        inverted: Whether to mirror each row between its minimum and its maximum, as a control. The class least similar
            to class i becomes the most relevant, and the weights are equally unequal.
    """
    if similarity == "cosine":
        unit = F.normalize(text, dim=1)
        alpha = unit @ unit.T
    elif similarity == "dot":
        alpha = text @ text.T
    else:
        alpha = 1 / (1 + torch.cdist(text, text, p=1 if similarity == "l1" else 2))
    alpha = alpha - torch.diag(alpha.diagonal() - alpha.mean(1))
    if inverted:
        alpha = alpha.amax(1, keepdim=True) + alpha.amin(1, keepdim=True) - alpha
    return alpha.clamp(min=0) if temperature is None else (alpha / temperature).softmax(1)


def total_variation(alpha: Tensor) -> float:
    """Return the mean total variation distance between the normalised rows of alpha and the uniform distribution.

    It lies in [0, 1 - 1/C]; rows without any weight count as uniform.

    Args:
        alpha: Relevance from `relevance`, [C, C].
    """
    total = alpha.sum(1, keepdim=True)
    distribution = torch.where(total > 0, alpha / total, 1 / alpha.shape[1])
    return (distribution - 1 / alpha.shape[1]).abs().sum(1).mean().item() / 2


def ranks(weights: Tensor) -> Tensor:
    """Return the rank of each weight within its row, [P, O]. The smallest weight has rank 1.

    Equal weights get the mean of their ranks.
    """
    ascending = weights.sort(1).values
    below = torch.searchsorted(ascending, weights)
    not_above = torch.searchsorted(ascending, weights, right=True)
    return (below + 1 + not_above).to(weights) / 2


def draw_partners(
    alpha: Tensor, classes: Tensor, y: Tensor, size: int, partner: Partner, unit: Unit, generator: torch.Generator
) -> Tensor:
    """Draw samples to mix with the prototypes of P classes; return their indices into `y`, int64 [P, size].

    All tensors are on the CPU.

    Args:
        alpha: Relevance from `relevance`, [C, C]. A row without weight on any class of `y` counts as uniform.
        classes: Classes that have a prototype, int64 [P].
        y: Labels of the samples, int64 [n].
        size: Number of draws per class.
        partner: Law of the draws: with probability alpha (probabilistic, inverted), in proportion to the rank of
            their alpha among the classes of `y` (ranked), always the most relevant class other than the class itself
            (deterministic), or uniformly (random).
        unit: "class" draws a class, then one of its samples, with replacement. "sample" draws a sample, weighted by its
            class, without replacement if there are enough, as in FedSM's code.
        generator: Generator of the draws.
    """
    owned, of_sample, counts = y.unique(return_inverse=True, return_counts=True)  # [O], [n], [O]
    weights = alpha[classes][:, owned].double()  # [P, O]
    if partner == "random":
        weights = torch.ones_like(weights)
    weights[weights.sum(1) == 0] = 1
    if partner == "ranked":
        weights = ranks(weights)
    if partner == "deterministic":
        itself = classes[:, None] == owned
        best = weights.masked_fill(itself, -1).argmax(1)  # the class itself only if there is no other class
        weights = F.one_hot(best, len(owned)).double()
    if unit == "sample":
        weights = weights[:, of_sample]  # [P, n]
        return torch.stack(
            [
                torch.multinomial(row, size, replacement=bool((row > 0).sum() < size), generator=generator)
                for row in weights
            ]
        )
    drawn = torch.multinomial(weights, size, replacement=True, generator=generator)  # [P, size], of O
    by_class = of_sample.argsort(stable=True)
    starts = counts.cumsum(0) - counts
    offset = (torch.rand(drawn.shape, generator=generator, dtype=torch.float64) * counts[drawn]).long()
    return by_class[starts[drawn] + offset]


def mix_features(z: Tensor, prototypes: Tensor, lam: Tensor) -> Tensor:
    """Mix features with prototypes: (1 - lam) z + lam Z_c, Eq. 4 of FedSM.

    Args:
        z: Local features, [P, S, d].
        prototypes: Prototypes Z_c, [P, d].
        lam: Shares of the prototypes, [P, S].
    """
    return (1 - lam)[..., None] * z + lam[..., None] * prototypes[:, None]
