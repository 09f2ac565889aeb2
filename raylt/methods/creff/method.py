"""CReFF: FedAvg with a classifier re-trained on federated features that match the clients' gradients (Shang et al.,
IJCAI 2022).

Sections are the paper's. Departures from the text, and from the authors' code for details that the text does not state:
[1] A class's gradient is over all of a client's samples of the class, without augmentation. The code takes ten draws of
    at most 32, with its own augmentation. The gradients are of the last re-trained classifier, as in the code.
[2] A class that no client of any round so far owns is not used in re-training, because its features are still noise.
[3] The sum of the clients' gradients of a class replaces their mean. Features are matched by cosines, which the code
    damps by 1e-6 in the denominator.
Training continues from the averaged classifier. Except for the evaluated model, this equals FedAvg bit by bit.
"""

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor, nn

from raylt import tree
from raylt.config import Config
from raylt.core.client import Client, Message, Reply
from raylt.core.fleet.fleet import Fleet
from raylt.core.fleet.reductions import mean, total
from raylt.core.fleet.upload_limit import check_class_uploads
from raylt.core.method import Group, Method
from raylt.core.server import Server
from raylt.core.training.features import features
from raylt.core.training.fit_classifier import fit_classifier
from raylt.core.training.loss_terms import shares_figure, shares_reduction
from raylt.data.task import Task
from raylt.hyper import Choice, LogUniform, hp
from raylt.models.split import SplitModel, linear, with_classifier
from raylt.ops.matching import class_gradients, gradient_like, gradients_fault, match_features
from raylt.seeds import seeded
from raylt.tree import Tree


class CReFF(Method):
    """FedAvg in which the server re-trains the classifier on an equal number of federated features per class."""

    name: ClassVar[str] = "creff"
    paper: ClassVar[str] = "Shang et al., IJCAI 2022"
    link: ClassVar[str | None] = "https://arxiv.org/abs/2204.13399"
    group: ClassVar[Group | None] = "statistics"

    per_class: int = hp(100, Choice(50, 100, 200), "federated features per class; from the code", ge=1)
    matching_steps: int = hp(100, Choice(50, 100, 300), "SGD steps on the features; from the code", ge=0)
    matching_lr: float = hp(0.1, LogUniform(0.01, 100), "learning rate of SGD on the features; from the code", gt=0)
    retrain_epochs: int = hp(300, Choice(50, 100, 300), "re-training epochs; from the code", ge=0)
    retrain_batch: int = hp(32, Choice(32, 64, 128), "re-training batch size; from the code", ge=1)
    retrain_lr: float = hp(0.01, LogUniform(1e-3, 0.1), "re-training learning rate; from the code", gt=0)

    @property
    def uploads_more(self) -> bool:
        return True

    def prepare(self, task: Task, config: Config, model: SplitModel) -> None:
        of_class = {"gradient": gradient_like(model.classes, model.dim)}
        check_class_uploads(task, model, of_class, "gradients", tree.nbytes(self.shared(model)))

    def train(self, client: Client, message: Message) -> Reply:
        """Train as in FedAvg, and report each owned class's mean gradient under the received model."""
        client.receive(message["model"])
        gradients = class_gradients(*features(client), linear(**message["classifier"]))  # [C, d + 1] each [1]
        reply = super().train(client, message)
        return client.reply(**reply.tree, gradients=gradients)

    def start(self, server: Server, fleet: Fleet) -> None:
        super().start(server, fleet)
        model, generator = server.model, torch.Generator().manual_seed(server.seed("features"))
        server.state["features"] = torch.randn(model.classes, self.per_class, model.dim, generator=generator)
        server.state["known"] = torch.zeros(model.classes, dtype=torch.bool)
        server.state["classifier"] = tree.snapshot(new_classifier(server).state_dict())

    def message(self, server: Server) -> Message:
        return super().message(server) | {"classifier": server.state["classifier"]}

    def round(self, server: Server, fleet: Fleet) -> None:
        message, model = self.message(server), server.model
        got = fleet.ask(
            self.train,
            self.sample(server, fleet),
            message,
            model=mean.like(message["model"]),
            loss=mean.like(0.0),
            gradients=total.within(
                dict.fromkeys(range(model.classes), gradient_like(model.classes, model.dim))
            ).over_samples(gradients_fault),
            **shares_reduction(self.terms),
        )
        server.step(got["model"])
        server.log(**shares_figure(got))
        with server.timings.time("matching"):
            server.log(loss=got["loss"], cosine=self.match(server, got["gradients"]))
        with server.timings.time("re-training"):
            server.log(retrain_loss=self.retrain(server))

    def match(self, server: Server, gradients: Tree, penalty: Callable[[Tensor], Tensor] | None = None) -> float:
        """Optimise the federated features so that their gradient points in the direction of the clients' gradients.

        Directions are compared row by row. Return the mean cosine [3].

        Args:
            server: The server.
            gradients: Sums of the clients' gradients by class, [C, d + 1] each.
            penalty: Function of the matched features [K, m, d] that returns a scalar to add to the distance.
        """
        h = server.state["features"]
        device = server.device
        classes = torch.tensor(sorted(gradients))
        targets = torch.stack([gradients[c].float() for c in classes.tolist()])  # [K, C, d + 1]
        matched, cosine = match_features(
            h[classes].to(device),
            classes.to(device),
            targets.to(device),
            steps=self.matching_steps,
            lr=self.matching_lr,
            classifier=linear(**tree.to(server.state["classifier"], device)),
            distance="rows",
            penalty=penalty,
        )
        server.state["features"] = h.index_copy(0, classes, matched.cpu())
        server.state["known"] = server.state["known"].index_fill(0, classes, True)
        return cosine.mean().item()

    def retrain(self, server: Server) -> float:
        """Train a new classifier on the balanced federated features; return the loss of the last epoch."""
        z = server.state["features"]
        is_set = server.state["known"]  # [2]
        classifier = new_classifier(server)
        y = torch.nonzero(is_set).repeat(1, self.per_class).flatten()
        loss = fit_classifier(
            classifier,
            z[is_set].flatten(0, 1).to(server.device),
            y.to(server.device),
            epochs=self.retrain_epochs,
            lr=self.retrain_lr,
            batch=self.retrain_batch,
            momentum=0,
            weight_decay=0,
            seed=server.seed("retrain"),
            schedule="constant",
        )
        server.state["classifier"] = tree.snapshot(classifier.state_dict())
        return loss

    def global_model(self, server: Server) -> SplitModel:
        return with_classifier(server.model, **tree.to(server.state["classifier"], server.device))


def new_classifier(server: Server) -> nn.Linear:
    """Return a classifier with random initial weights, seeded by the round."""
    with seeded(server.seed("classifier")):
        return nn.Linear(server.model.dim, server.model.classes).to(server.device)
