"""MOON: FedAvg with a contrastive loss that pulls features towards the global model's features, and away from the
previous local model's (Li, He and Song, CVPR 2021).

Departures from the text:
[1] The global and the previous local model compute features in evaluation mode, as in the authors' code (QinbinLi/MOON
    at 8fcba3c).
[2] In a client's first round the previous local model is the global one: the term is the constant mu log 2.
[3] By default the network is the same as for every other method. `projection` puts the paper's head of two layers
    before the classifier, 256 wide in the paper. It makes a small network many times as large: compare it with arms
    that have it too, such as `mu=0`.
mu = 0 is FedAvg of the same network.
"""

import copy
from collections import OrderedDict
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from raylt import tree
from raylt.core.client import Client, Message, Reply
from raylt.core.method import Method
from raylt.core.training.loss_terms import Terms
from raylt.core.training.sgd import Objective, take_statistics
from raylt.data.samples import Batch
from raylt.data.task import TaskSpec
from raylt.hyper import Choice, LogUniform, hp
from raylt.models.split import SplitModel, StateDict, load_entries, with_encoder


class MOON(Method):
    """FedAvg with a model-contrastive loss. Each client keeps the encoder of its previous local model."""

    name: ClassVar[str] = "moon"
    paper: ClassVar[str] = "Li et al., CVPR 2021"
    link: ClassVar[str | None] = "https://arxiv.org/abs/2103.16257"

    mu: float = hp(5.0, Choice(0.1, 1.0, 5.0, 10.0), "weight of the contrastive term, Eq. 4; 5 for CIFAR-10", ge=0)
    tau: float = hp(0.5, LogUniform(0.1, 1.0), "temperature, Eq. 3", gt=0)
    projection: int = hp(0, Choice(0, 128, 256), "width of the paper's projection head; 0: none [3]", ge=0)

    def build(self, spec: TaskSpec, base: SplitModel) -> SplitModel:
        if not self.projection:
            return base
        head = nn.Sequential(nn.Linear(base.dim, base.dim), nn.ReLU(inplace=True), nn.Linear(base.dim, self.projection))
        encoder = nn.Sequential(OrderedDict(base=base.encoder, projection=head))
        model = with_encoder(base, encoder)
        model.dim, model.classifier = self.projection, base.head(self.projection, spec.classes)
        return model

    def train(self, client: Client, message: Message) -> Reply:
        reply = super().train(client, message)
        if self.mu:
            client.state["previous"] = tree.snapshot(client.model.encoder.state_dict())
        return reply

    @property
    def acts_on_encoder(self) -> bool:
        return self.mu > 0

    @property
    def terms(self) -> tuple[str, ...]:
        return ("cross_entropy", "contrastive") if self.mu else ()

    def objective(self, client: Client, message: Message) -> Objective:
        """Return the cross-entropy plus mu times the model-contrastive loss, Eq. 4."""
        if not self.mu:
            return super().objective(client, message)
        model = client.model
        take_statistics(client)
        received = frozen(model.encoder, {})  # the model was received just before
        previous = frozen(model.encoder, client.state.get("previous", {}))  # [2]

        def terms(batch: Batch) -> dict[str, Tensor]:
            z = model.encoder(batch.x)  # [B, d]
            with torch.no_grad():
                references = [received(batch.x), previous(batch.x)]
            similarity = torch.stack([F.cosine_similarity(z, other, dim=1) for other in references], 1)  # [B, 2]
            contrast = F.cross_entropy(similarity / self.tau, torch.zeros_like(batch.y))  # Eq. 3
            return {"cross_entropy": F.cross_entropy(model.classifier(z), batch.y), "contrastive": self.mu * contrast}

        return Terms(client, terms)


def frozen(encoder: nn.Module, entries: StateDict) -> nn.Module:
    """Return a copy of the encoder with `entries` loaded, without gradients and in evaluation mode [1]."""
    other = copy.deepcopy(encoder).requires_grad_(False).eval()
    load_entries(other, entries)
    return other
