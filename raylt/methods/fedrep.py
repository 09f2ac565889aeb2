"""FedRep: a shared encoder and private classifiers, trained in turn (Collins et al., ICML 2021).

Departures from the text of Algorithm 1:
[1] Updates are epochs over the data: `head_epochs` of the classifier and `local.epochs` of the encoder.
[2] BatchNorm's running statistics are updated in both halves of a round and are shared with the encoder.
[3] The mean of the encoders is weighted by samples, as in all methods of raylt; the text has 1/(r n).
[4] After the last round every client trains its classifier once more, on the final encoder, as in the authors' code
    (lgcollins/FedRep at d82e629).
"""

from typing import ClassVar

from raylt.config import Config
from raylt.core.client import Client, Message, Reply
from raylt.core.fleet.fleet import Fleet
from raylt.core.fleet.reductions import mean
from raylt.core.method import Method, check_last_rate
from raylt.core.server import Server
from raylt.core.training.sgd import sgd, take_statistics
from raylt.data.sources.sources import ProblemKind
from raylt.data.task import Task
from raylt.hyper import Choice, hp
from raylt.models.split import SplitModel, StateDict


class FedRep(Method):
    """FedPer in which each round first trains the classifier, then the encoder."""

    name: ClassVar[str] = "fedrep"
    paper: ClassVar[str] = "Collins et al., ICML 2021"
    link: ClassVar[str | None] = "https://arxiv.org/abs/2102.07078"
    problems: ClassVar[tuple[ProblemKind, ...]] = ("classification", "segmentation")
    personal: ClassVar[bool] = True

    head_epochs: int = hp(10, Choice(1, 5, 10, 15), "tau, epochs of the classifier, lines 7 to 9", ge=0)

    @property
    def acts_on_encoder(self) -> bool:
        return True

    def shared(self, model: SplitModel) -> StateDict:
        return model.entries("encoder.")

    def settle(self, client: Client, message: Message) -> None:
        """Train the classifier of a new client as in the first half of a round, lines 7 to 9 of the algorithm."""
        self.train_classifier(client, message)

    def train_classifier(self, client: Client, message: Message) -> Reply:
        """Train only the classifier, on the received encoder [4]."""
        client.receive(message["model"])
        take_statistics(client)
        head = client.model.classifier.parameters()
        return client.reply(loss=sgd(client, self.objective(client, message), head, self.head_epochs))

    @property
    def finishes(self) -> bool:
        return self.head_epochs > 0

    def prepare(self, task: Task, config: Config, model: SplitModel) -> None:
        check_last_rate(self, config)

    def finish(self, server: Server, fleet: Fleet) -> None:
        got = fleet.ask(self.train_classifier, fleet.everyone, self.message(server), loss=mean.like(0.0))
        server.log(loss=got["loss"])

    def train(self, client: Client, message: Message) -> Reply:
        client.receive(message["model"])
        objective, model = self.objective(client, message), client.model
        sgd(client, objective, model.classifier.parameters(), self.head_epochs)  # lines 7 to 9 [1]
        loss = sgd(client, objective, model.encoder.parameters())  # lines 10 to 12 [1] [2]
        return client.reply(model=self.shared(model), loss=loss)  # [3]
