"""Fed-Focal: FedAvg with the focal loss (Sarkar, Narang and Rai, arXiv 2020).

Departure from the text: clients are sampled uniformly. The paper does not describe its sampling of clients well enough
to reproduce it, so this is only its focal loss. gamma = 0 is FedAvg.
"""

from typing import ClassVar

from torch import Tensor
from torch.nn import functional as F

from raylt.core.client import Client, Message
from raylt.core.method import Method
from raylt.core.training.sgd import Objective
from raylt.hyper import Choice, hp


class FedFocal(Method):
    """FedAvg with less weight on samples that the model already classifies well."""

    name: ClassVar[str] = "fedfocal"
    paper: ClassVar[str] = "Sarkar et al., arXiv 2020"
    link: ClassVar[str | None] = "https://arxiv.org/abs/2011.06283"
    stackable: ClassVar[bool] = True

    gamma: float = hp(2.0, Choice(0.5, 1.0, 2.0, 5.0), "focusing parameter; Lin et al., ICCV 2017", ge=0)

    def objective(self, client: Client, message: Message) -> Objective:
        return lambda batch: focal_loss(client.model(batch.x), batch.y, self.gamma)


def focal_loss(logits: Tensor, y: Tensor, gamma: float) -> Tensor:
    """Return the mean focal loss -(1 - p_y)^gamma log p_y over logits [B, C] with labels int64 [B]."""
    nll = F.cross_entropy(logits, y, reduction="none")  # -log p_y
    # 1 - p_y from the logarithm: near p_y = 1 the difference would be rounded to 0, where a root has no gradient
    wrong = -(-nll).clamp(max=-1e-12).expm1()
    return (wrong.pow(gamma) * nll).mean()
