"""SCAFFOLD: control variates take the clients' drift out of local steps (Karimireddy et al., ICML 2020).

Line and equation numbers are those of Algorithm 1. Departures from the text:
[1] Clients are weighted by their samples, as in all methods here; the text has 1/|S| and 1/N.
[2] With momentum K of Eq. 4 is the sum of the coefficients that gradients have in the update, so c_i stays their mean.
[3] A client that takes no step, as it holds one sample, keeps its control variate.
[4] What no gradient moves (BatchNorm's statistics) is averaged as in FedAvg; the paper is silent.
Control variates start at 0, which makes the first round FedAvg.
"""

from typing import ClassVar

from raylt import tree
from raylt.config import Config
from raylt.core.client import Client, Message, Reply
from raylt.core.fleet import Fleet
from raylt.core.method import Group, Method
from raylt.core.reductions import mean
from raylt.core.server import Server
from raylt.core.server_optimisers import Momentum
from raylt.core.training import Objective, learning_rate
from raylt.data.sources import Kind
from raylt.data.task import Task
from raylt.hyper import LogUniform, hp
from raylt.models.split import Params, SplitModel
from raylt.ops.local_updates import check_sgd, gradient_mass, trained_and_rest
from raylt.recordable import recordable


class Scaffold(Method):
    """Option II of Eq. 4, which needs no second pass over the data."""

    name: ClassVar[str] = "scaffold"
    paper: ClassVar[str] = "Karimireddy et al., ICML 2020"
    link: ClassVar[str | None] = "https://arxiv.org/abs/1910.06378"
    group: ClassVar[Group | None] = "aggregation"
    problems: ClassVar[tuple[Kind, ...]] = ("classification", "segmentation")

    server_lr: float = hp(1.0, LogUniform(0.1, 1.5), "eta_g, line 16", gt=0)

    def prepare(self, task: Task, config: Config, model: SplitModel) -> None:
        check_sgd(self.name, config)

    def objective(self, client: Client, message: Message) -> Objective:
        """Cross-entropy, whose gradient becomes g_i(y) - c_i + c, Eq. 3."""
        plain, drift = super().objective(client, message), tree.sub(message["control"], own(client, message["control"]))
        params = [(p, drift[name]) for name, p in client.model.named_parameters() if name in drift]
        # what is added is worth 0 and has the gradient c - c_i: the loss that is reported stays the cross-entropy
        return recordable(lambda batch: plain(batch) + sum(((p - p.detach()) * d).sum() for p, d in params))

    def train(self, client: Client, message: Message) -> Reply:
        c, c_i = message["control"], own(client, message["control"])
        reply = super().train(client, message)
        mass = gradient_mass(client.steps(), client.config.local.momentum)      # K [2]
        moved = tree.sub({name: message["model"][name] for name in c}, reply.tree["model"])
        change = tree.sub(tree.scale(moved, 1 / (mass * learning_rate(client))), c) if mass else tree.scale(c, 0)  # [3]
        client.state["control"] = tree.add(c_i, change)                         # c_i+, Eq. 4, option II
        return client.reply(**reply.tree, control=change)

    def message(self, server: Server) -> Message:
        message = super().message(server)
        x, _ = trained_and_rest(server.model, message["model"])
        return message | {"control": server.state.get("control", tree.scale(x, 0))}

    def round(self, server: Server, fleet: Fleet) -> None:
        message = self.message(server)
        got = fleet.ask(self.train, self.sample(server, fleet), message, model=mean.like(message["model"]),
                        control=mean.like(message["control"]), loss=mean.like(0.0))
        server.step(got["model"])                                               # line 16 [4]
        share = sum(got.weights.values()) / sum(fleet.sizes.values())           # |S| / N [1]
        server.state["control"] = tree.add(message["control"], tree.scale(got["control"], share))       # line 17
        server.log(loss=got["loss"])

    def server_optimiser(self) -> Momentum | None:
        return None if self.server_lr == 1 else Momentum(beta=0.0, lr=self.server_lr)


def own(client: Client, c: Params) -> Params:
    """c_i; zeros before the client's first training."""
    return tree.to(client.state.get("control", tree.scale(c, 0)), client.device)
