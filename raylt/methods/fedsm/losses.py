"""What a student learns from its teacher, and a teacher from its texts."""

from torch import Tensor
from torch.nn import functional as F


def hint(z: Tensor, u: Tensor) -> Tensor:
    """1/2 ||z - u||^2, the mean over a batch, as FitNets has it (Romero et al., ICLR 2015, Eq. 3); a scalar.

    A mean over the dimensions would have 1/d of the gradient: nothing beside that of the cross-entropy.

    Args:
        z: the student's features [B, d]; u: the teacher's [B, d].
    """
    return 0.5 * (z.float() - u).square().sum(1).mean()


def margin_softmax(u: Tensor, y: Tensor, text: Tensor, margin: float, scale: float) -> Tensor:
    """Margin Metric Softmax (CLIPood, ICML 2023): CE(s (u - m t_y) T^T, y), the mean over a batch, a scalar.

    What it takes from the true class's logit exceeds what it takes from class j's by s m (1 - cos(t_y, t_j)).

    Args:
        u: unit image features [B, d].
        y: int64 [B].
        text: unit text features T [C, d].
    """
    return F.cross_entropy(scale * (u - margin * text[y]) @ text.T, y)
