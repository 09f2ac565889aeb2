"""FedProx: FedAvg with a proximal term in the local objective (Li et al., MLSys 2020).

Equation numbers are the paper's. Departure from the text: the inexact local solver is a fixed number of SGD epochs, as
in all published comparisons; the paper's gamma-inexactness is not measured.
"""

from typing import ClassVar

from torch import Tensor

from raylt.core.client import Client, Message
from raylt.core.method import Method
from raylt.core.training.loss_terms import Terms
from raylt.core.training.sgd import Objective
from raylt.data.samples import Batch
from raylt.data.sources.sources import ProblemKind
from raylt.hyper import LogUniform, hp
from raylt.ops.proximal import squared_distance


class FedProx(Method):
    """FedAvg with the proximal term (mu / 2) ||w - w_t||^2 added to each local loss. mu = 0 is FedAvg."""

    name: ClassVar[str] = "fedprox"
    paper: ClassVar[str] = "Li et al., MLSys 2020"
    link: ClassVar[str | None] = "https://arxiv.org/abs/1812.06127"
    problems: ClassVar[tuple[ProblemKind, ...]] = ("classification", "segmentation")
    stackable: ClassVar[bool] = True

    mu: float = hp(0.01, LogUniform(1e-4, 1.0), "weight of the proximal term, Eq. 2", ge=0)

    @property
    def terms(self) -> tuple[str, ...]:
        return "cross_entropy", "proximal"

    def objective(self, client: Client, message: Message) -> Objective:
        """Return the proximal loss h(w) = F(w) + mu/2 ||w - w_t||^2 over the trainable parameters, Eq. 2."""
        params = [p for p in client.model.parameters() if p.requires_grad]
        anchor = [p.detach().clone() for p in params]  # w_t: the model was received just before

        def terms(batch: Batch) -> dict[str, Tensor]:
            return {
                "cross_entropy": client.cross_entropy(client.model(batch.x), batch.y),
                "proximal": self.mu / 2 * squared_distance(params, anchor),
            }

        return Terms(client, terms)
