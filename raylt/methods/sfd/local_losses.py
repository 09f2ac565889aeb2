"""The losses of SFD's local training (4.1), with the paper's equation numbers."""

from typing import Literal

import torch
from torch import Tensor

Delta = Literal["all", "negatives", "none"]


def adjusted_prior(counts: Tensor, beta: float) -> Tensor:
    """Return class counts in which each missing class gets `beta` times the smallest count, Eq. 6.

    Args:
        counts: Number of samples per class at this client, int64 [C], at least one positive.
        beta: Share of the smallest positive count that a missing class gets, in [0, 1].

    Returns:
        The counts, float32 [C]. With beta = 0 a missing class has 0.
    """
    present = counts > 0
    filled = beta * counts[present].min()
    return torch.where(present, counts, filled).float()


def logit_shift(prior: Tensor, gamma: float) -> Tensor:
    """Return the shift of the logits, gamma * log(prior), Eq. 5.

    It is -inf for a class with prior 0, which then gets no gradient. gamma = 0 is plain cross-entropy, without a shift
    for any prior.

    Args:
        prior: Class priors, float32 [C], not negative.
        gamma: Strength of the adjustment.
    """
    return torch.zeros_like(prior) if gamma == 0 else gamma * prior.log()


def adaptive_supcon(
    h: Tensor, y: Tensor, log_counts: Tensor, tau: float, delta: Delta = "all", with_self: bool = True
) -> Tensor:
    """Return a supervised contrastive loss that repels frequent classes more strongly, Eq. 7.

    Args:
        h: Projected features of unit length, [B, h], B >= 2.
        y: Labels, int64 [B].
        log_counts: Log n of each class at this client, [C]; the values of missing classes are not used.
        tau: Temperature.
        delta: Samples whose similarity is raised by log n in the denominator: all other samples, samples of other
            classes, or none (plain SupCon).
        with_self: Whether A(i) includes i, as the paper defines it. Otherwise an anchor alone in its class is left out.

    Returns:
        The mean over anchors, a scalar, in float32 also under autocast.
    """
    with torch.autocast(h.device.type, enabled=False):  # bfloat16 would round s, up to 1 / tau, to multiples of 1/16
        h = h.float()
        s = h @ h.T / tau  # [B, B]
        itself = torch.eye(len(y), dtype=torch.bool, device=y.device)
        same = y[:, None] == y  # [B, B]
        raised = torch.zeros_like(s) if delta == "none" else log_counts.float()[y].expand_as(s)
        if delta == "negatives":
            raised = raised.masked_fill(same, 0.0)
        repulsion = (s + raised).masked_fill(itself, -torch.inf).logsumexp(1)  # [B], over b != i
        positive = same if with_self else same & ~itself
        size = positive.sum(1)  # [B], |A(i)|
        attraction = (s * positive).sum(1) / size.clamp(min=1)
        anchors = size > 0
        return torch.where(anchors, repulsion - attraction, 0.0).sum() / anchors.sum().clamp(min=1)
