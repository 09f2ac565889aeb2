"""Fed-Focal: FedAvg with the focal loss (Sarkar, Narang and Rai, arXiv 2020).

Departure from the text: clients are sampled uniformly; the paper's sampling of clients is not stated well enough to be
repeated, so this is its Fed-Focal loss alone. gamma = 0 is FedAvg.
"""

from typing import ClassVar

from torch import Tensor
from torch.nn import functional as F

from raylt.core.client import Client, Message
from raylt.core.method import Method
from raylt.core.training import Objective
from raylt.hyper import Choice, hp
from raylt.recordable import recordable


class FedFocal(Method):
    """Samples that are told rightly count for less."""

    name: ClassVar[str] = "fedfocal"
    paper: ClassVar[str] = "Sarkar et al., arXiv 2020"
    link: ClassVar[str | None] = "https://arxiv.org/abs/2011.06283"

    gamma: float = hp(2.0, Choice(0.5, 1.0, 2.0, 5.0), "focusing parameter; Lin et al., ICCV 2017", ge=0)

    def objective(self, client: Client, message: Message) -> Objective:
        return recordable(lambda batch: focal_loss(client.model(batch.x), batch.y, self.gamma))


def focal_loss(logits: Tensor, y: Tensor, gamma: float) -> Tensor:
    """Mean of -(1 - p_y)^gamma log p_y over logits [B, C] with labels int64 [B]."""
    nll = F.cross_entropy(logits, y, reduction="none")                          # -log p_y
    # 1 - p_y from the logarithm: near p_y = 1 the difference would be rounded to 0, whose root has no gradient
    wrong = -(-nll).clamp(max=-1e-12).expm1()
    return (wrong.pow(gamma) * nll).mean()
