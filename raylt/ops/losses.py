"""Losses that know how many samples of each class a client holds. Equation numbers are SFD's unless named."""

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

Delta = Literal["all", "negatives", "none"]


def adjusted_prior(counts: Tensor, beta: float) -> Tensor:
    """Class counts with missing classes filled in, Eq. 6.

    Args:
        counts: samples per class on this client, int64 [C], at least one positive.
        beta: share of the smallest present count given to a missing class, in [0, 1].

    Returns:
        float32 [C]. With beta = 0 a missing class stays 0.
    """
    present = counts > 0
    filled = beta * counts[present].min()
    return torch.where(present, counts, filled).float()


def logit_shift(prior: Tensor, gamma: float) -> Tensor:
    """What is added to the logits: gamma * log(prior), Eq. 5; -inf for a class of prior 0, which so gets no gradient.

    gamma = 0 is no adjustment at all, so plain cross-entropy, whatever the prior.

    Args:
        prior: float32 [C], not negative.
    """
    return torch.zeros_like(prior) if gamma == 0 else gamma * prior.log()


def adaptive_supcon(h: Tensor, y: Tensor, log_counts: Tensor, tau: float, delta: Delta = "all",
                    with_self: bool = True) -> Tensor:
    """Supervised contrastive loss whose repulsion grows with the counts of the classes repelled, Eq. 7.

    Args:
        h: projected features of unit length, [B, h], B >= 2.
        y: int64 [B].
        log_counts: log n of each class on this client, [C]; what missing classes have does not matter.
        tau: temperature.
        delta: which samples' similarity is raised by log n in the denominator: all others, those of other classes,
            or none (plain SupCon).
        with_self: whether A(i) holds i, as the paper defines it. Without, an anchor alone in its class is left out.

    Returns:
        The mean over anchors, a scalar, in float32 also under autocast.
    """
    with torch.autocast(h.device.type, enabled=False):      # s is as large as 1 / tau: bfloat16 would round it to 1/16
        h = h.float()
        s = h @ h.T / tau                                   # [B, B]
        itself = torch.eye(len(y), dtype=torch.bool, device=y.device)
        same = y[:, None] == y                              # [B, B]
        raised = torch.zeros_like(s) if delta == "none" else log_counts.float()[y].expand_as(s)
        if delta == "negatives":
            raised = raised.masked_fill(same, 0.0)
        repulsion = (s + raised).masked_fill(itself, -torch.inf).logsumexp(1)      # [B], over b != i
        positive = same if with_self else same & ~itself
        size = positive.sum(1)                              # [B], |A(i)|
        attraction = (s * positive).sum(1) / size.clamp(min=1)
        anchors = size > 0
        return torch.where(anchors, repulsion - attraction, 0.0).sum() / anchors.sum().clamp(min=1)


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


def distillation(logits: Tensor, log_teacher: Tensor, temperature: float) -> Tensor:
    """T^2 KL(q || p), the mean over a batch, second term of Eq. 1 of FedSM; a scalar, in float32 also under autocast.

    Args:
        logits: the student's, [B, C]; p is their softmax at the temperature.
        log_teacher: log q, [B, C].
    """
    log_p = F.log_softmax(logits.float() / temperature, dim=1)
    return temperature ** 2 * F.kl_div(log_p, log_teacher, reduction="batchmean", log_target=True)


def margin_softmax(u: Tensor, y: Tensor, text: Tensor, margin: float, scale: float) -> Tensor:
    """Margin Metric Softmax (CLIPood, ICML 2023): CE(s (u - m t_y) T^T, y), the mean over a batch, a scalar.

    What it takes from the true class's logit exceeds what it takes from class j's by s m (1 - cos(t_y, t_j)).

    Args:
        u: unit image features [B, d].
        y: int64 [B].
        text: unit text features T [C, d].
    """
    return F.cross_entropy(scale * (u - margin * text[y]) @ text.T, y)
