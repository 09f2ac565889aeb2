"""FedProto: clients share the mean feature of each class instead of a model (Tan et al., AAAI 2022).

Symbols are the paper's (from memory); the authors' code, yuetan031/FedProto at cb3c41f, decides the loss:
[1] The regulariser is the mean square of a feature's distance from its class's global prototype over batch and
    dimensions, as in the code. It is zero for a class without a prototype.
[2] A client computes its prototypes after training, in evaluation mode and without augmentation. The code averages the
    features that were computed in its last epoch.
[3] Global prototypes are means over samples, as all means of raylt; the code has the mean over clients. Classes that no
    asked client owns keep their prototypes.
[4] Clients are evaluated by the nearest global prototype, or by their own classifiers before there are prototypes.
    With prototypes, a class without one is never predicted. The code takes the nearest prototype of the client's own
    classes: `predict_by=own_prototypes`. `predict_by=classifier` always takes the own classifier.
All networks have the same architecture and initial weights. The global model stays at its initial weights.
"""

from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from raylt.core.client import Client, Message, Reply
from raylt.core.fleet.fleet import Fleet
from raylt.core.fleet.reductions import mean, total
from raylt.core.method import Method, train_model
from raylt.core.server import Server
from raylt.core.training.features import features
from raylt.core.training.loss_terms import Terms, shares_figure, shares_reduction
from raylt.core.training.sgd import Objective
from raylt.data.samples import Batch
from raylt.data.task import TaskSpec
from raylt.hyper import Choice, LogUniform, hp
from raylt.models.split import SplitModel, StateDict, with_classifier
from raylt.ops.moments import NEVER, pooled_means, sums_fault, weighted_class_means

PROTOTYPES = "prototypes"


class FedProto(Method):
    """Local training with a loss that pulls features towards global prototypes; only prototypes are exchanged."""

    name: ClassVar[str] = "fedproto"
    paper: ClassVar[str] = "Tan et al., AAAI 2022"
    link: ClassVar[str | None] = "https://arxiv.org/abs/2105.00243"
    personal: ClassVar[bool] = True

    weight: float = hp(1.0, LogUniform(0.01, 10), "lambda, weight of the pull; from the code", ge=0)
    predict_by: Literal["prototypes", "own_prototypes", "classifier"] = hp(
        "prototypes",
        Choice("prototypes", "own_prototypes", "classifier"),
        "basis of a client's predictions: prototypes of all classes or of its own classes, or its classifier [4]",
    )

    def build(self, spec: TaskSpec, base: SplitModel) -> SplitModel:
        base.add_module(PROTOTYPES, Prototypes(spec.classes, base.dim))
        return base

    def shared(self, model: SplitModel) -> StateDict:
        return model.entries(f"{PROTOTYPES}.")

    @property
    def acts_on_encoder(self) -> bool:
        return True

    @property
    def uploads_more(self) -> bool:
        return True

    @property
    def terms(self) -> tuple[str, ...]:
        return ("cross_entropy", "prototypes") if self.weight else ()

    def objective(self, client: Client, message: Message) -> Objective:
        """Return the cross-entropy plus lambda times the distance between features and their class prototypes [1]."""
        if not self.weight:
            return super().objective(client, message)
        model = client.model
        means, present = prototypes_of(model)

        def terms(batch: Batch) -> dict[str, Tensor]:
            z = model.encoder(batch.x)  # [B, d]
            distance = (z.float() - means[batch.y]) * present[batch.y][:, None]
            return {
                "cross_entropy": F.cross_entropy(model.classifier(z), batch.y),
                "prototypes": self.weight * distance.square().mean(),
            }

        return Terms(client, terms)

    def train(self, client: Client, message: Message) -> Reply:
        client.receive(message["model"])
        parts = train_model(self, client, message)
        return client.reply(classes=weighted_class_means(*features(client)), **parts)  # [2]

    def round(self, server: Server, fleet: Fleet) -> None:
        classes, dim = server.model.classes, server.model.dim
        of_class = {"n": 1, "z": torch.empty(dim, device="meta")}
        got = fleet.ask(
            self.train,
            self.sample(server, fleet),
            self.message(server),
            classes=total.within(dict.fromkeys(range(classes), of_class))
            .counting("n")
            .over_samples(partial(sums_fault, **server.feature_limits)),
            loss=mean.like(0.0),
            **shares_reduction(self.terms),
        )
        pooled = pooled_means(got["classes"], classes)  # [3]
        means, present = (value.cpu() for value in prototypes_of(server.model))
        server.receive(
            {
                f"{PROTOTYPES}.means": torch.where(pooled["present"][:, None], pooled["means"], means),
                f"{PROTOTYPES}.present": (present | pooled["present"]).long(),
            }
        )
        server.log(loss=got["loss"], **shares_figure(got))

    def client_model(self, client: Client) -> SplitModel:
        means, present = prototypes_of(client.model)
        if self.predict_by == "own_prototypes":
            present = present & (client.counts > 0)
        if self.predict_by == "classifier" or not present.any():
            return client.model
        # -|z - m|^2 equals 2 m z - |m|^2 up to a term that is the same for all classes [4]
        bias = -means.square().sum(1).masked_fill(~present, -NEVER)
        return with_classifier(client.model, 2 * means, bias)


class Prototypes(nn.Module):
    """Module with the global prototypes, float32 [C, d], and a mask of classes that have a prototype, int64 [C]."""

    means: Tensor
    present: Tensor

    def __init__(self, classes: int, dim: int):
        super().__init__()
        self.register_buffer("means", torch.zeros(classes, dim))
        self.register_buffer("present", torch.zeros(classes, dtype=torch.int64))


def prototypes_of(model: SplitModel) -> tuple[Tensor, Tensor]:
    """Return a model's prototypes [C, d] and a mask, bool [C], of the classes that have a prototype."""
    prototypes = model.get_submodule(PROTOTYPES)
    return prototypes.get_buffer("means").clone(), prototypes.get_buffer("present") > 0
