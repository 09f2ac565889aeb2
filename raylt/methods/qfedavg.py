"""q-FedAvg: clients with a larger loss count for more (q-FFL; Li et al., ICLR 2020, Algorithm 2).

Departures from the text:
[1] Clients are sampled uniformly and weighted by their samples, p_k; the text samples by p_k and weights uniformly. The
    sums of line 7 have the same expectation up to a factor that cancels. q = 0 is FedAvg.
[2] L is 1 / lr, as in the text, whose local SGD has no momentum rho. With it a gradient that lasts moves the weights by
    lr / (1 - rho), so dw_k comes out 1 / (1 - rho) times too long and the norm in h_k, in which it is squared, leaves
    hardly any step: `lipschitz=step` takes (1 - rho) / lr. Without momentum the two are one.
[3] F_k is taken to be at least 1e-10, as in the authors' code: q - 1 may be negative.
[4] What no gradient moves (BatchNorm's statistics) is averaged as in FedAvg; the paper's networks have none.
"""

from typing import ClassVar, Literal

import torch

from raylt import tree
from raylt.config import Config
from raylt.core.client import Client, Message, Reply
from raylt.core.fleet import Fleet
from raylt.core.method import Group, Method
from raylt.core.reductions import mean
from raylt.core.server import Server
from raylt.core.training import learning_rate, sgd
from raylt.data.sources import Kind
from raylt.data.task import Task
from raylt.hyper import Choice, hp
from raylt.models.split import SplitModel
from raylt.ops.local_updates import check_sgd, trained_and_rest


class QFedAvg(Method):
    """Minimises sum_k p_k / (q + 1) F_k^(q + 1), Eq. 2."""

    name: ClassVar[str] = "qfedavg"
    paper: ClassVar[str] = "Li et al., ICLR 2020"
    link: ClassVar[str | None] = "https://arxiv.org/abs/1905.10497"
    group: ClassVar[Group | None] = "aggregation"
    problems: ClassVar[tuple[Kind, ...]] = ("classification", "segmentation")

    q: float = hp(0.1, Choice(0.0, 0.001, 0.01, 0.1, 1.0, 2.0, 5.0), "fairness, Eq. 2; tuned for each task", ge=0)
    lipschitz: Literal["rate", "step"] = hp("rate", Choice("rate", "step"), "L, line 4: 1 / lr as in the text; step, "
                                            "for local SGD with momentum rho: (1 - rho) / lr [2]")

    def prepare(self, task: Task, config: Config, model: SplitModel) -> None:
        check_sgd(self.name, config)

    def train(self, client: Client, message: Message) -> Reply:
        """Lines 4 and 5: Delta_k = F_k^q dw_k and h_k = q F_k^(q-1) ||dw_k||^2 + L F_k^q with dw_k = L (w_t - w_k)."""
        client.receive(message["model"])
        f = self.risk(client)                                                   # F_k(w_t)
        lipschitz = (1 - self.lasting(client)) / learning_rate(client)          # L
        loss = sgd(client, self.objective(client, message))
        start, _ = trained_and_rest(client.model, message["model"])
        end, rest = trained_and_rest(client.model, self.shared(client.model))
        dw = tree.scale(tree.sub(start, end), lipschitz)
        square = sum(value.double().square().sum().item() for value in dw.values())
        h = self.q * f ** (self.q - 1) * square + lipschitz * f ** self.q
        return client.reply(delta=tree.scale(dw, f ** self.q), h=h, rest=rest, loss=loss)

    def lasting(self, client: Client) -> float:
        """The momentum that L takes account of [2]."""
        return client.config.local.momentum if self.lipschitz == "step" else 0.0

    @torch.no_grad()
    def risk(self, client: Client) -> float:
        """F_k: the mean loss of a client's model on all of its samples, at least 1e-10 [3]."""
        model, losses = client.model.eval(), 0.0
        for batch in client.samples.in_order(client.config.evaluation.batch):
            losses += client.cross_entropy(model(batch.x), batch.y).item() * len(batch.y)
        return max(losses / len(client), 1e-10)

    def round(self, server: Server, fleet: Fleet) -> None:
        """Line 7: w <- w - sum_k Delta_k / sum_k h_k [1]."""
        message = self.message(server)
        w, rest = trained_and_rest(server.model, message["model"])
        got = fleet.ask(self.train, self.sample(server, fleet), message, rest=mean.like(rest),
                        loss=mean.like(0.0), delta=mean.like(w).up_to(1e18),
                        h=mean.like(0.0).where(lambda h: None if h > 0 else f"is {h}, not positive"))
        server.step(tree.sub(w, tree.scale(got["delta"], 1 / got["h"])) | got["rest"])               # [4]
        server.log(loss=got["loss"], mean_h=got["h"])
