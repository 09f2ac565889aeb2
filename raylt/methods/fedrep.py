"""FedRep: classifiers of the clients' own on a shared encoder, trained in turns (Collins et al., ICML 2021).

Departures from the text of Algorithm 1:
[1] Updates are epochs over the data, `head_epochs` of the classifier and `local.epochs` of the encoder.
[2] BatchNorm's running statistics move in both halves of a round and are shared with the encoder.
[3] The encoders' mean is weighted by samples, as those of all methods here; the text has 1/(r n).
"""

from typing import ClassVar

from raylt.core.client import Client, Message, Reply
from raylt.core.method import Method
from raylt.core.training import sgd, take_statistics
from raylt.data.sources import Kind
from raylt.hyper import Choice, hp
from raylt.models.split import Params, SplitModel


class FedRep(Method):
    """FedPer, with the classifier first."""

    name: ClassVar[str] = "fedrep"
    paper: ClassVar[str] = "Collins et al., ICML 2021"
    link: ClassVar[str | None] = "https://arxiv.org/abs/2102.07078"
    problems: ClassVar[tuple[Kind, ...]] = ("classification", "segmentation")
    personal: ClassVar[bool] = True

    head_epochs: int = hp(10, Choice(1, 5, 10, 15), "tau, updates of the classifier, lines 7 to 9", ge=0)

    def shared(self, model: SplitModel) -> Params:
        return model.entries("encoder.")

    def settle(self, client: Client, message: Message) -> None:
        """The first half of a round: lines 7 to 9."""
        client.receive(message["model"])
        take_statistics(client)
        sgd(client, self.objective(client, message), client.model.classifier.parameters(), self.head_epochs)

    def train(self, client: Client, message: Message) -> Reply:
        client.receive(message["model"])
        objective, model = self.objective(client, message), client.model
        sgd(client, objective, model.classifier.parameters(), self.head_epochs)                 # lines 7 to 9 [1]
        loss = sgd(client, objective, model.encoder.parameters())               # lines 10 to 12 [1] [2]
        return client.reply(model=self.shared(model), loss=loss)
