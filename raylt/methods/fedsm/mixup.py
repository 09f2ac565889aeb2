"""Features mixed with class prototypes, partners chosen by how related classes are: FedSM (semantic mixup), Eq. 4-6."""

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

Similarity = Literal["cosine", "dot", "l1", "l2"]
Partner = Literal["probabilistic", "deterministic", "random", "inverted"]
Unit = Literal["class", "sample"]


def relevance(text: Tensor, similarity: Similarity, temperature: float | None = None,
              inverted: bool = False) -> Tensor:
    """alpha of Eq. 5 of FedSM, float32 [C, C], not negative: how well features of class j serve class i.

    The similarity of a class with itself would outdo all others: the mean of its row stands in its place.

    Args:
        text: [C, d], as the text encoder gives them.
        similarity: cosine; or of the vectors as they are: dot product, or 1 / (1 + distance).
        temperature: of the softmax over each row that is the optional non-linearity; None for none.
        inverted: each row of similarities is mirrored between its smallest and its largest, so that what is least like
            class i serves it best, with weights as unequal as they were: a control.
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
    """How far relevance is from none: total variation between each row as a distribution and the uniform one, the mean
    over the rows, in [0, 1 - 1/C]. Rows without any weight count as uniform.

    Args:
        alpha: from `relevance`, [C, C].
    """
    total = alpha.sum(1, keepdim=True)
    law = torch.where(total > 0, alpha / total, 1 / alpha.shape[1])
    return (law - 1 / alpha.shape[1]).abs().sum(1).mean().item() / 2


def draw_partners(alpha: Tensor, classes: Tensor, y: Tensor, size: int, partner: Partner, unit: Unit,
                  generator: torch.Generator) -> Tensor:
    """The samples whose features are mixed with the prototypes of P classes: places in `y`, int64 [P, size].

    Args:
        alpha: from `relevance`, [C, C]. A row without weight on any class of `y` counts as uniform. All on the CPU.
        classes: those that have a prototype, int64 [P].
        y: labels of the samples, int64 [n].
        partner: classes drawn with probability alpha (probabilistic, inverted), the most relevant one other than the
            class itself, or any.
        unit: a class is drawn, then one of its samples, with replacement; or a sample, weighted by its class, without
            replacement where there are enough, as FedSM's code does.
    """
    owned, of_sample, counts = y.unique(return_inverse=True, return_counts=True)    # [O], [n], [O]
    weights = alpha[classes][:, owned].double()                                     # [P, O]
    if partner == "random":
        weights = torch.ones_like(weights)
    weights[weights.sum(1) == 0] = 1
    if partner == "deterministic":
        itself = classes[:, None] == owned
        best = weights.masked_fill(itself, -1).argmax(1)            # itself only where there is nothing else
        weights = F.one_hot(best, len(owned)).double()
    if unit == "sample":
        weights = weights[:, of_sample]                                             # [P, n]
        return torch.stack([torch.multinomial(row, size, replacement=bool((row > 0).sum() < size), generator=generator)
                            for row in weights])
    drawn = torch.multinomial(weights, size, replacement=True, generator=generator)             # [P, size], of O
    by_class, starts = of_sample.argsort(stable=True), counts.cumsum(0) - counts
    place = (torch.rand(drawn.shape, generator=generator, dtype=torch.float64) * counts[drawn]).long()
    return by_class[starts[drawn] + place]


def mix_features(z: Tensor, prototypes: Tensor, lam: Tensor) -> Tensor:
    """Eq. 4 of FedSM, (1 - lam) z + lam Z_c.

    Args:
        z: local features [P, S, d].
        prototypes: [P, d].
        lam: [P, S].
    """
    return (1 - lam)[..., None] * z + lam[..., None] * prototypes[:, None]
