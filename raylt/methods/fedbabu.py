"""FedBABU: FedAvg of the encoder under a fixed random classifier, then fine-tuning at each client (Oh et al., ICLR
2022).

Decisions:
[1] All clients have the same classifier, drawn from the run's seed; it is never sent.
[2] After the last round each client fine-tunes the global model at the last round's learning rate, by default encoder
    and classifier together. With `tune_epochs=0` this phase is left out.
`global_accuracy` is the accuracy of the encoder with the drawn classifier.
"""

from collections.abc import Iterable, Mapping
from typing import ClassVar, Literal

from torch import Tensor

from raylt import tree
from raylt.config import Config
from raylt.core.client import Client, Message, Reply
from raylt.core.fine_tuning import FineTuned
from raylt.core.method import check_last_rate
from raylt.core.training.sgd import sgd
from raylt.data.sources.sources import ProblemKind
from raylt.data.task import Task
from raylt.hyper import Choice, hp
from raylt.models.split import SplitModel, StateDict


class FedBABU(FineTuned):
    """FedAvg of the encoder alone, then fine-tuning of a personal model at each client after the last round."""

    name: ClassVar[str] = "fedbabu"
    paper: ClassVar[str] = "Oh et al., ICLR 2022"
    link: ClassVar[str | None] = "https://arxiv.org/abs/2106.06042"
    problems: ClassVar[tuple[ProblemKind, ...]] = ("classification", "segmentation")
    later: ClassVar[Mapping[str, tuple[str, ...]]] = {"finish": ("tune_epochs", "tune")}

    tune_epochs: int = hp(5, Choice(0, 1, 5, 10), "epochs of fine-tuning at the end (5 as in FedNH's code)", ge=0)
    tune: Literal["all", "encoder", "classifier"] = hp(
        "all", Choice("all", "encoder", "classifier"), "entries that fine-tuning updates; the paper compares them"
    )

    @property
    def finishes(self) -> bool:
        return self.tune_epochs > 0

    @property
    def acts_on_encoder(self) -> bool:
        return True

    def prepare(self, task: Task, config: Config, model: SplitModel) -> None:
        check_last_rate(self, config, "method.tune_epochs=0")

    def shared(self, model: SplitModel) -> StateDict:
        return model.entries("encoder.")

    def train(self, client: Client, message: Message) -> Reply:
        client.receive(message["model"])
        loss = sgd(client, self.objective(client, message), client.model.encoder.parameters())
        return client.reply(model=self.shared(client.model), loss=loss)

    def personalise(self, client: Client, message: Message) -> Reply:
        """Fine-tune the global model and keep the result as the client's personal model [2]."""
        client.receive(message["model"])
        drawn = tree.snapshot(client.model.entries("classifier."))
        loss = sgd(client, self.objective(client, message), self.tuned(client.model), self.tune_epochs)
        client.state["tuned"] = tree.snapshot(client.model.state_dict())
        client.receive(drawn)  # [1]
        return client.reply(loss=loss)

    def tuned(self, model: SplitModel) -> Iterable[Tensor]:
        """Return the parameters of a model that fine-tuning updates."""
        parts = {"all": model, "encoder": model.encoder, "classifier": model.classifier}
        return parts[self.tune].parameters()
