"""FedDecorr: FedAvg with a loss term that decorrelates the dimensions of features (Shi et al., ICLR 2023).

Departure from the text:
[1] The term is scaled as in the authors' code, for which beta = 0.1 was chosen: B times the mean of the squared
    correlations of different dimensions. `loss=paper` is the text: the mean over all pairs, including the ones on the
    diagonal.
beta = 0 is FedAvg.
"""

from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from raylt.core.client import Client, Message
from raylt.core.method import Method
from raylt.core.training.loss_terms import Terms
from raylt.core.training.sgd import Objective
from raylt.data.samples import Batch
from raylt.hyper import Choice, hp


class FedDecorr(Method):
    """FedAvg with a local loss term against dimensional collapse of features."""

    name: ClassVar[str] = "feddecorr"
    paper: ClassVar[str] = "Shi et al., ICLR 2023"
    link: ClassVar[str | None] = "https://arxiv.org/abs/2210.00226"

    beta: float = hp(0.1, Choice(0.0, 0.01, 0.05, 0.1, 0.2, 0.3), "weight of the term", ge=0)
    loss: Literal["code", "paper"] = hp("code", Choice("code", "paper"), "scale of the term")

    @property
    def terms(self) -> tuple[str, ...]:
        return ("cross_entropy", "decorrelation") if self.beta else ()

    @property
    def acts_on_encoder(self) -> bool:
        return self.beta > 0

    def objective(self, client: Client, message: Message) -> Objective:
        if not self.beta:
            return super().objective(client, message)
        model = client.model

        def terms(batch: Batch) -> dict[str, Tensor]:
            z = model.encoder(batch.x)  # [B, d]
            return {
                "cross_entropy": F.cross_entropy(model.classifier(z), batch.y),
                "decorrelation": self.beta * decorrelation(z, self.loss),
            }

        return Terms(client, terms)


def decorrelation(z: Tensor, scale: str) -> Tensor:
    """Return the mean squared correlation between the dimensions of features [B, d], a scalar; see [1].

    Args:
        z: Features, [B, d].
        scale: "code" or "paper".
    """
    with torch.autocast(z.device.type, enabled=False):
        z = z.float() - z.float().mean(0)
        z = z / (z.var(0) + 1e-8).sqrt()
        correlation = z.T @ z / len(z)  # K [d, d]
        if scale == "paper":
            return correlation.square().mean()
        off_diagonal = correlation.masked_fill(torch.eye(z.shape[1], dtype=torch.bool, device=z.device), 0)
        return len(z) * off_diagonal.square().sum() / (z.shape[1] * (z.shape[1] - 1))
