"""Losses between a student's and its teacher's logits."""

from torch import Tensor
from torch.nn import functional as F


def distillation(logits: Tensor, *, log_teacher: Tensor, temperature: float) -> Tensor:
    """Return the distillation loss T^2 KL(q || p), averaged over a batch, a scalar (second term of Eq. 1 of FedSM).

    It is computed in float32, also under autocast.

    Args:
        logits: The student's logits, [B, C]; p is their softmax at the temperature.
        log_teacher: The teacher's log-probabilities log q, [B, C].
        temperature: The temperature T.
    """
    log_p = F.log_softmax(logits.float() / temperature, dim=1)
    return temperature**2 * F.kl_div(log_p, log_teacher, reduction="batchmean", log_target=True)


def divergence(logits: Tensor, *, teacher: Tensor, temperature: float = 1.0) -> Tensor:
    """Return KL(q || p), averaged over a batch, a scalar. It is computed in float32, also under autocast.

    Args:
        logits: The student's logits, [B, C]; p is their softmax at the temperature.
        teacher: The teacher's logits, [B, C]; q is their softmax at the temperature.
        temperature: Divisor of the logits of both.
    """
    log_q = (teacher.float() / temperature).log_softmax(1)
    log_p = (logits.float() / temperature).log_softmax(1)
    return F.kl_div(log_p, log_q, reduction="batchmean", log_target=True)
