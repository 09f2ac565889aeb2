"""Base class for methods that fine-tune a personal model at every client after the last round."""

from typing import ClassVar

from raylt.core.client import Client, Message, Reply
from raylt.core.fleet.fleet import Fleet
from raylt.core.fleet.reductions import mean
from raylt.core.method import Method
from raylt.core.server import Server
from raylt.core.training.sgd import take_statistics
from raylt.models.split import SplitModel, with_entries


class FineTuned(Method):
    """Base class: after the last round each client fine-tunes the global model by `personalise`.

    Clients that join later fine-tune before their evaluation. If the method does not finish, clients use the global
    model.
    """

    personal: ClassVar[bool] = True

    def personalise(self, client: Client, message: Message) -> Reply:
        """Fine-tune the model in the message, store its entries in `client.state["tuned"]`, and report the loss."""
        raise NotImplementedError

    def finish(self, server: Server, fleet: Fleet) -> None:
        got = fleet.ask(self.personalise, fleet.everyone, self.message(server), loss=mean.like(0.0))
        server.log(tuning_loss=got["loss"])

    def settle(self, client: Client, message: Message) -> None:
        client.receive(message["model"])
        if self.finishes:
            self.personalise(client, message)
        else:
            take_statistics(client)

    def client_model(self, client: Client) -> SplitModel:
        return with_entries(client.model, client.state.get("tuned", {}))
