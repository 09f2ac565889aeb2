"""FedNH: features trained towards class prototypes on the unit sphere, smoothly updated by the server (Dai et al., AAAI
2023).

Symbols are the paper's (from memory). For details that it does not state, the authors' code decides (Yutong-Dai/FedNH
at ddc26f7):
[1] The classifier has no parameters: logits are `scale` times the cosines to the prototypes. They start as orthonormal
    rows, or as unit rows if there are more classes than dimensions. The scale is fixed at 30, which is an option of
    the code; without it the code learns the scale.
[2] A client's prototype is the mean of its unit features, scaled to length 1, of the model that it has trained, in
    evaluation mode and without augmentation. The server weights it by samples, as in the code.
[3] W_c <- rho W_c + (1 - rho) mu_c, both of length 1, scaled to length 1 again. A class that no asked client owns keeps
    its prototype.
[4] The encoders' mean is weighted by samples, as in all methods of raylt; the code has equal weights.
[5] Gradients are not clipped. The code clips them to norm 10.
"""

from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from raylt.core.client import Client, Message, Reply
from raylt.core.fleet.fleet import Fleet
from raylt.core.fleet.reductions import mean, total
from raylt.core.method import Method, train_model
from raylt.core.server import Server
from raylt.core.training.features import features
from raylt.data.task import TaskSpec
from raylt.hyper import LogUniform, Uniform, hp
from raylt.models.split import SplitModel, StateDict
from raylt.ops.moments import pooled_means, sums_fault, weighted_class_means

PROTOTYPES = "classifier.weight"


class FedNH(Method):
    """FedAvg of the encoder, with class prototypes as the classifier. Local training does not change the prototypes."""

    name: ClassVar[str] = "fednh"
    paper: ClassVar[str] = "Dai et al., AAAI 2023"
    link: ClassVar[str | None] = "https://arxiv.org/abs/2212.02758"

    rho: float = hp(
        0.9, Uniform(0.5, 0.99), "share of the old prototypes in the new ones (0.9 as in the code)", ge=0, le=1
    )
    scale: float = hp(30.0, LogUniform(5, 60), "scale of the cosines; from the code [1]", gt=0)

    def build(self, spec: TaskSpec, base: SplitModel) -> SplitModel:
        rows = nn.init.orthogonal_(torch.empty(spec.classes, base.dim))
        base.classifier = Cosines(F.normalize(rows, dim=1), self.scale)
        return base

    @property
    def acts_on_encoder(self) -> bool:
        return True

    @property
    def uploads_more(self) -> bool:
        return True

    def train(self, client: Client, message: Message) -> Reply:
        client.receive(message["model"])
        parts = train_model(self, client, message)  # [5]
        z, y = features(client)
        means = weighted_class_means(F.normalize(z, dim=1), y, unit=True)  # [2]
        return client.reply(model=without_prototypes(self.shared(client.model)), classes=means, **parts)

    def round(self, server: Server, fleet: Fleet) -> None:
        message = self.message(server)
        of_class = {"n": 1, "z": torch.empty(server.model.dim, device="meta")}
        got = fleet.ask(
            self.train,
            self.sample(server, fleet),
            message,
            model=mean.like(without_prototypes(message["model"])),
            classes=total.within(dict.fromkeys(range(server.model.classes), of_class))
            .counting("n")
            .over_samples(partial(sums_fault, **server.feature_limits | {"longest": 1.0})),
            loss=mean.like(0.0),
        )
        server.step(got["model"])  # [4]
        pooled = pooled_means(got["classes"], server.model.classes)
        before = message["model"][PROTOTYPES]
        moved = F.normalize(self.rho * before + (1 - self.rho) * F.normalize(pooled["means"], dim=1), dim=1)
        server.receive({PROTOTYPES: torch.where(pooled["present"][:, None], moved, before)})  # [3]
        server.log(loss=got["loss"])


def without_prototypes(entries: StateDict) -> StateDict:
    """Return all entries of a model except the prototypes."""
    return {name: value for name, value in entries.items() if name != PROTOTYPES}


class Cosines(nn.Module):
    """Classifier with scaled cosine similarities as logits. `weight` is a buffer of unit rows [C, d]."""

    weight: Tensor

    def __init__(self, weight: Tensor, scale: float):
        super().__init__()
        self.register_buffer("weight", weight)
        self.scale = scale

    def forward(self, z: Tensor) -> Tensor:
        return self.scale * F.linear(F.normalize(z, dim=1), self.weight)
