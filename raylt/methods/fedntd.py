"""FedNTD: FedAvg that distils the received model's predictions for all classes but the true class (Lee et al., NeurIPS
2022).

Loss and defaults follow the authors' code, Lee-Gihun/FedNTD at 043269e. Decisions:
[1] The divergence has no factor tau^2, as in the code.
[2] The received model computes its logits in evaluation mode. The code does not set its mode; the authors' network has
    no BatchNorm.
beta = 0 is FedAvg.
"""

import copy
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from raylt.config import Config
from raylt.core.client import Client, Message
from raylt.core.method import Method
from raylt.core.training.loss_terms import Terms
from raylt.core.training.sgd import Objective, take_statistics
from raylt.data.samples import Batch
from raylt.data.task import Task
from raylt.errors import ConfigError
from raylt.hyper import LogUniform, hp
from raylt.models.split import SplitModel
from raylt.ops.distillation import divergence


class FedNTD(Method):
    """FedAvg with distillation from the received model over all classes but the true class."""

    name: ClassVar[str] = "fedntd"
    paper: ClassVar[str] = "Lee et al., NeurIPS 2022"
    link: ClassVar[str | None] = "https://arxiv.org/abs/2106.03097"

    beta: float = hp(1.0, LogUniform(0.1, 10), "weight of the distillation; from the code", ge=0)
    tau: float = hp(1.0, LogUniform(0.5, 5), "temperature of the distillation; from the code", gt=0)

    def prepare(self, task: Task, config: Config, model: SplitModel) -> None:
        if self.beta and task.classes < 3:
            raise ConfigError(
                f"method.beta: with {task.classes} classes a softmax over all but the true class is always 1, and the "
                f"distillation has no effect ({self.beta:g}). Set method.beta=0, or choose another method.",
                code="data.too-few",
                key="method.beta",
                value=self.beta,
            )

    @property
    def terms(self) -> tuple[str, ...]:
        return ("cross_entropy", "distillation") if self.beta else ()

    def objective(self, client: Client, message: Message) -> Objective:
        """Return the cross-entropy plus beta times the not-true distillation loss from the received model."""
        if not self.beta:
            return super().objective(client, message)
        model = client.model
        take_statistics(client)
        received = copy.deepcopy(model).requires_grad_(False).eval()  # [2]; received just before
        others = torch.arange(model.classes - 1, device=client.device)

        def terms(batch: Batch) -> dict[str, Tensor]:
            logits = model(batch.x)
            with torch.no_grad():
                teacher = received(batch.x)
            places = others + (others >= batch.y[:, None])  # [B, C - 1], all classes but the true one
            return {
                "cross_entropy": F.cross_entropy(logits, batch.y),
                # without the true class [1]
                "distillation": self.beta
                * divergence(logits.gather(1, places), teacher=teacher.gather(1, places), temperature=self.tau),
            }

        return Terms(client, terms)
