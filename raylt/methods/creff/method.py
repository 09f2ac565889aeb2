"""CReFF: classifiers re-trained on federated features, found by matching gradients (Shang et al., IJCAI 2022).

Sections are the paper's. Departures from the text, and from the authors' code where the text is silent:
[1] A class's gradient is of all of a client's samples of it, not augmented; the code takes ten draws of at most 32,
    with an augmentation of their own. The gradients are of the classifier re-trained last, as in the code.
[2] A class that nobody has owned so far takes no part in re-training: its features are still noise.
[3] The sum of the clients' gradients of a class stands for their mean: features are matched by cosines, which the code
    damps by 1e-6 in the denominator.
The federation goes on from the averaged classifier: apart from the model that is judged, this is FedAvg to the bit.
"""

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor, nn

from raylt import tree
from raylt.core.client import Client, Message, Reply
from raylt.core.features import features
from raylt.core.fitting import fit_classifier
from raylt.core.fleet import Fleet
from raylt.core.method import Group, Method
from raylt.core.reductions import mean, total
from raylt.core.server import Server
from raylt.core.terms import asked_for, figure_of
from raylt.hyper import Choice, LogUniform, hp
from raylt.models.split import SplitModel, linear, with_classifier
from raylt.ops.matching import class_gradients, match_features
from raylt.seeds import seeded
from raylt.tree import Tree


class CReFF(Method):
    """FedAvg, and at the server a classifier that every class had the same say in."""

    name: ClassVar[str] = "creff"
    paper: ClassVar[str] = "Shang et al., IJCAI 2022"
    link: ClassVar[str | None] = "https://arxiv.org/abs/2204.13399"
    group: ClassVar[Group | None] = "statistics"

    per_class: int = hp(100, Choice(50, 100, 200), "federated features per class; from the code", ge=1)
    matching_steps: int = hp(100, Choice(50, 100, 300), "of SGD on the features; from the code", ge=0)
    matching_lr: float = hp(0.1, LogUniform(0.01, 100), "of SGD on the features; from the code", gt=0)
    epochs: int = hp(300, Choice(50, 100, 300), "of re-training; from the code", ge=0)
    batch: int = hp(32, Choice(32, 64, 128), "of re-training; from the code", ge=1)
    lr: float = hp(0.01, LogUniform(1e-3, 0.1), "of re-training; from the code", gt=0)

    def train(self, client: Client, message: Message) -> Reply:
        """The mean gradient of each class that the client owns, under the model it received; then FedAvg."""
        client.receive(message["model"])
        gradients = class_gradients(*features(client), linear(**message["classifier"]))          # [C, d + 1] each [1]
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
        of_class = torch.empty(model.classes, model.dim + 1, device="meta")
        got = fleet.ask(self.train, self.sample(server, fleet), message, model=mean.like(message["model"]),
                        loss=mean.like(0.0), gradients=total.within(dict.fromkeys(range(model.classes), of_class)),
                        **asked_for(self.terms))
        server.step(got["model"])
        server.log(**figure_of(got))
        with server.stages.time("matching"):
            server.log(loss=got["loss"], cosine=self.match(server, got["gradients"]))
        with server.stages.time("re-training"):
            server.log(retrain_loss=self.retrain(server))

    def match(self, server: Server, gradients: Tree) -> float:
        """Features whose gradient points, row by row, where that of the clients does; returns the cosine [3]."""
        h, device, classes = server.state["features"], server.device, torch.tensor(sorted(gradients))
        targets = torch.stack([gradients[c].float() for c in classes.tolist()])            # [K, C, d + 1]
        matched, cosine = match_features(
            h[classes].to(device), classes.to(device), targets.to(device), steps=self.matching_steps,
            lr=self.matching_lr, classifier=linear(**tree.to(server.state["classifier"], device)), distance="rows",
            also=self.also(server, classes))
        server.state["features"] = h.index_copy(0, classes, matched.cpu())
        server.state["known"] = server.state["known"].index_fill(0, classes, True)
        return cosine.mean().item()

    def also(self, server: Server, classes: Tensor) -> Callable[[Tensor], Tensor] | None:
        """What else the features of these classes are to lower, a scalar of [K, m, d]; None: nothing."""
        return None

    def retrain(self, server: Server) -> float:
        """A new classifier on the federated features, balanced as they are; returns the loss of the last epoch."""
        z, known, classifier = server.state["features"], server.state["known"], new_classifier(server)      # [2]
        y = torch.nonzero(known).repeat(1, self.per_class).flatten()
        loss = fit_classifier(
            classifier, z[known].flatten(0, 1).to(server.device), y.to(server.device), epochs=self.epochs, lr=self.lr,
            batch=self.batch, momentum=0, weight_decay=0, seed=server.seed("retrain"), schedule="constant")
        server.state["classifier"] = tree.snapshot(classifier.state_dict())
        return loss

    def global_model(self, server: Server) -> SplitModel:
        return with_classifier(server.model, **tree.to(server.state["classifier"], server.device))


def new_classifier(server: Server) -> nn.Linear:
    """With weights of its own for each round."""
    with seeded(server.seed("classifier")):
        return nn.Linear(server.model.dim, server.model.classes).to(server.device)
