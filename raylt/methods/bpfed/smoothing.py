"""Label-aware smoothing (3.2.2). Equation numbers are the paper's."""

import torch
from torch import Tensor


def smooth_labels(counts: Tensor, delta: float, gamma: float, everywhere: bool = False) -> Tensor:
    """Soft label q of each class a client owns, Eq. 19 and 20 of BPFed, float32 [C, C]; zero rows for the others.

    Args:
        counts: samples per class, int64 [C], before balancing.
        everywhere: what is taken from the own class goes to all others, not to the owned ones only.
    """
    owned = counts > 0
    g = delta * (counts / counts.max()).pow(gamma)              # [C]
    to = torch.ones_like(owned) if everywhere else owned
    others = int(to.sum()) - 1
    g = g if others else torch.zeros_like(g)                    # one class: there is nobody to give to
    q = to * (g / max(others, 1))[:, None]
    q.diagonal().copy_(1 - g)
    return q * owned[:, None]


def undecided(labels: Tensor, owned: Tensor) -> int:
    """How many of a client's classes have a label that favours another class as much as themselves, or more.

    Args:
        labels: from `smooth_labels`, [C, C].
        owned: bool [C].
    """
    own = labels.diagonal()
    return int((own <= (labels - own.diag()).amax(1))[owned].sum())
