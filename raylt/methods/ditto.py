"""Ditto: a personal model for each client, regularised towards the global model (Li et al., ICML 2021).

In Algorithm 1, G(.) is the rule that aggregates, v_k a client's personal model with v_k^0 its initial weights, w_t the
global model, s the steps on v_k, and R the number of rounds. Departures from the text:
[1] The global model is FedAvg's, the solver of G(.) in the paper's experiments. A client trains it first, so that the
    global model equals FedAvg's bit by bit.
[2] v_k starts from the w_t of the client's first round, not from v_k^0. A client that never took a step uses the global
    model. If all clients take part, both equal the text; otherwise v_k^0 could still be random weights after R rounds.
[3] s local steps are `local.epochs` passes over the data, for both w_k and v_k.
[4] w_{t+1} is the mean of w_k weighted by samples, as in all methods of raylt; the authors' code (litian96/ditto at
    26d9b29) weights clients equally.
"""

from typing import ClassVar

from torch import Tensor

from raylt import tree
from raylt.core.client import Client, Message, Reply
from raylt.core.method import Method
from raylt.core.training.sgd import Objective, sgd
from raylt.data.samples import Batch
from raylt.data.sources.sources import ProblemKind
from raylt.hyper import LogUniform, hp
from raylt.models.split import SplitModel, with_entries
from raylt.ops.proximal import squared_distance


class Ditto(Method):
    """FedAvg in which each client also keeps a personal model v_k and uploads only its copy w_k of the global model.

    With lam = 0, v_k is trained only on the client's own loss.
    """

    name: ClassVar[str] = "ditto"
    paper: ClassVar[str] = "Li et al., ICML 2021"
    link: ClassVar[str | None] = "https://arxiv.org/abs/2012.04221"
    problems: ClassVar[tuple[ProblemKind, ...]] = ("classification", "segmentation")
    personal: ClassVar[bool] = True

    lam: float = hp(1.0, LogUniform(0.01, 10), "lambda, pull of v_k towards w_t", ge=0)

    def train(self, client: Client, message: Message) -> Reply:
        client.receive(message["model"])
        loss = sgd(client, self.objective(client, message))  # w_k [1]
        trained = tree.snapshot(client.model.state_dict())
        client.receive(message["model"])
        objective = self.near_global(client)
        client.receive(client.state.get("personal", {}))  # [2]
        sgd(client, objective)  # v_k [3]
        self.keep(client)
        client.receive(trained)  # local running statistics are w_k's
        # the server weights w_k by samples [4]
        return client.reply(model={name: trained[name] for name in self.shared(client.model)}, loss=loss)

    def settle(self, client: Client, message: Message) -> None:
        """Train a personal model v_k from the received global model w_t, as in a client's first round [2]."""
        client.receive(message["model"])
        sgd(client, self.near_global(client))
        self.keep(client)

    def keep(self, client: Client) -> None:
        """Store the client's model as its personal model, unless the client has too few samples for a step."""
        if client.steps():
            client.state["personal"] = tree.snapshot(client.model.state_dict())

    def near_global(self, client: Client) -> Objective:
        """Return the personal model's loss: the client's loss plus a penalty on the distance from the global model.

        It is h_k(v; w_t) = F_k(v) + lambda/2 ||v - w_t||^2, where w_t is the client's model when this is called.
        """
        model = client.model
        params = [p for p in model.parameters() if p.requires_grad]
        anchor = [p.detach().clone() for p in params]

        def loss(batch: Batch) -> Tensor:
            return client.cross_entropy(model(batch.x), batch.y) + self.lam / 2 * squared_distance(params, anchor)

        return loss

    def client_model(self, client: Client) -> SplitModel:
        return with_entries(client.model, client.state.get("personal", {}))
