"""SCAFFOLD: FedAvg with control variates that correct the clients' drift (Karimireddy et al., ICML 2020).

Line and equation numbers refer to Algorithm 1. In the paper, S is the set of a round's clients, N the number of all
clients, and K the steps of a client. Departures from the text:
[1] Clients are weighted by their samples, as in all methods of raylt; the text has 1/|S| and 1/N.
[2] With momentum, K of Eq. 4 is the sum of the gradients' coefficients in the update, so that c_i is their mean.
[3] A client that takes no step, because it has one sample, keeps its control variate, and so do all clients in a round
    with a learning rate of 0.
[4] Entries without gradients (BatchNorm's statistics) are averaged as in FedAvg; the paper does not mention them.
Control variates start at 0, so the first round is FedAvg's.
"""

from typing import ClassVar

from raylt import tree
from raylt.config import Config
from raylt.core.client import Client, Message, Reply
from raylt.core.fleet.fleet import Fleet
from raylt.core.fleet.reductions import mean
from raylt.core.method import Group, Method
from raylt.core.server import Server, ServerMomentum
from raylt.core.training.sgd import Objective, learning_rate
from raylt.data.sources.sources import ProblemKind
from raylt.data.task import Task
from raylt.hyper import LogUniform, hp
from raylt.models.split import SplitModel, StateDict
from raylt.ops.local_updates import check_sgd, gradient_mass, trained_and_rest
from raylt.ops.proximal import with_gradient


class Scaffold(Method):
    """FedAvg with control variates by option II of Eq. 4, which needs no second pass over the samples."""

    name: ClassVar[str] = "scaffold"
    paper: ClassVar[str] = "Karimireddy et al., ICML 2020"
    link: ClassVar[str | None] = "https://arxiv.org/abs/1910.06378"
    group: ClassVar[Group | None] = "aggregation"
    problems: ClassVar[tuple[ProblemKind, ...]] = ("classification", "segmentation")

    server_lr: float = hp(1.0, LogUniform(0.1, 1.5), "eta_g, line 16", gt=0)

    @property
    def uploads_more(self) -> bool:
        return True

    def prepare(self, task: Task, config: Config, model: SplitModel) -> None:
        check_sgd(self.name, config)

    def objective(self, client: Client, message: Message) -> Objective:
        """Return the cross-entropy with its gradient corrected to g_i(y) - c_i + c by the control variates, Eq. 3."""
        plain = super().objective(client, message)
        drift = tree.sub(message["control"], client_control(client, message["control"]))
        params = {name: p for name, p in client.model.named_parameters() if name in drift}
        correction = [drift[name] for name in params]  # c - c_i
        # the added term is 0, so the reported loss is the cross-entropy
        return lambda batch: plain(batch) + with_gradient(list(params.values()), correction)

    def train(self, client: Client, message: Message) -> Reply:
        c = message["control"]
        c_i = client_control(client, c)
        reply = super().train(client, message)
        mass = gradient_mass(client.steps(), client.config.local.momentum)  # K [2]
        distance = mass * learning_rate(client)  # K eta_l
        moved = tree.sub({name: message["model"][name] for name in c}, reply.tree["model"])
        change = tree.sub(tree.scale(moved, 1 / distance), c) if distance else tree.scale(c, 0)  # [3]
        client.state["control"] = tree.add(c_i, change)  # c_i+, Eq. 4, option II
        return client.reply(**reply.tree, control=change)

    def message(self, server: Server) -> Message:
        message = super().message(server)
        x, _ = trained_and_rest(server.model, message["model"])
        return message | {"control": server.state.get("control", tree.scale(x, 0))}

    def round(self, server: Server, fleet: Fleet) -> None:
        message = self.message(server)
        got = fleet.ask(
            self.train,
            self.sample(server, fleet),
            message,
            model=mean.like(message["model"]),
            control=mean.like(message["control"]),
            loss=mean.like(0.0),
        )
        server.step(got["model"])  # line 16 [4]
        share = sum(got.weights.values()) / sum(fleet.sizes.values())  # |S| / N [1]
        server.state["control"] = tree.add(message["control"], tree.scale(got["control"], share))  # line 17
        server.log(loss=got["loss"])

    def server_optimiser(self) -> ServerMomentum | None:
        return None if self.server_lr == 1 else ServerMomentum(beta=0.0, lr=self.server_lr)


def client_control(client: Client, c: StateDict) -> StateDict:
    """Return the client's control variate c_i, or zeros before its first training."""
    return tree.to(client.state.get("control", tree.scale(c, 0)), client.device)
