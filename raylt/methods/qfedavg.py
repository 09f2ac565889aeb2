"""q-FedAvg: FedAvg in which clients with a larger loss have more weight (q-FFL; Li et al., ICLR 2020, Algorithm 2).

Departures from the text:
[1] Clients are sampled uniformly and weighted by their samples, p_k; the text samples by p_k and weights uniformly. The
    sums of line 7 have the same expectation up to a factor that cancels. q = 0 is FedAvg.
[2] L is 1 / lr, as in the text, whose local SGD has no momentum rho. With momentum, a constant gradient moves the
    weights by lr / (1 - rho). Then dw_k is 1 / (1 - rho) times too long, and its square in h_k makes the step tiny;
    `lipschitz=step` uses (1 - rho) / lr. Without momentum the two are equal.
[3] F_k is at least 1e-10, as in the authors' code, because q - 1 may be negative.
[4] Entries without gradients (BatchNorm's statistics) are averaged as in FedAvg; the paper's networks have none.
"""

from functools import partial
from typing import ClassVar, Literal

import torch

from raylt import tree
from raylt.config import Config
from raylt.core.client import Client, Message, Reply
from raylt.core.fleet.fleet import Fleet
from raylt.core.fleet.reductions import mean
from raylt.core.method import Group, Method
from raylt.core.server import Server
from raylt.core.training.sgd import learning_rate, sgd, take_statistics
from raylt.data.sources.sources import ProblemKind
from raylt.data.task import Task
from raylt.hyper import Choice, hp
from raylt.models.split import SplitModel
from raylt.ops.local_updates import check_sgd, trained_and_rest
from raylt.tree import Tree

MIN_RISK = 1e-10  # Minimum of F_k [3].


class QFedAvg(Method):
    """FedAvg that minimises sum_k p_k / (q + 1) F_k^(q + 1) over the clients' losses F_k, Eq. 2."""

    name: ClassVar[str] = "qfedavg"
    paper: ClassVar[str] = "Li et al., ICLR 2020"
    link: ClassVar[str | None] = "https://arxiv.org/abs/1905.10497"
    group: ClassVar[Group | None] = "aggregation"
    problems: ClassVar[tuple[ProblemKind, ...]] = ("classification", "segmentation")

    q: float = hp(
        0.1,
        Choice(0.0, 0.001, 0.01, 0.1, 1.0, 2.0, 5.0),
        "exponent of fairness, Eq. 2; tuned for each task",
        ge=0,
        le=20,  # with larger exponents, F_k^q soon overflows
    )
    lipschitz: Literal["rate", "step"] = hp(
        "rate",
        Choice("rate", "step"),
        "L, line 4: 1 / lr as in the text; step, for local SGD with momentum rho: (1 - rho) / lr [2]",
    )

    @property
    def uploads_more(self) -> bool:
        return True

    def prepare(self, task: Task, config: Config, model: SplitModel) -> None:
        check_sgd(self.name, config)

    def train(self, client: Client, message: Message) -> Reply:
        """Train the received model; report the loss-weighted update Delta_k and the step-size term h_k, lines 4 and 5.

        Delta_k = F_k^q dw_k and h_k = q F_k^(q-1) ||dw_k||^2 + L F_k^q, with the loss F_k and dw_k = L (w_t - w_k).
        """
        client.receive(message["model"])
        f = self.risk(client)  # F_k(w_t)
        lipschitz = self.lipschitz_constant(client)  # L
        loss = sgd(client, self.objective(client, message))
        start, _ = trained_and_rest(client.model, message["model"])
        end, rest = trained_and_rest(client.model, self.shared(client.model))
        dw = tree.scale(tree.sub(start, end), lipschitz)
        square = sum(value.double().square().sum().item() for value in dw.values())
        h = self.q * f ** (self.q - 1) * square + lipschitz * f**self.q
        return client.reply(delta=tree.scale(dw, f**self.q), h=h, rest=rest, loss=loss)

    def lipschitz_constant(self, party: Client | Server) -> float:
        """Return the Lipschitz constant L of line 4. With `lipschitz=step` it includes the momentum [2].

        It is finite also with a learning rate of 0: no weight moves then, and the server's step is 0 with any L.
        """
        momentum = party.config.local.momentum if self.lipschitz == "step" else 0.0
        return (1 - momentum) / (learning_rate(party) or 1.0)

    @torch.no_grad()
    def risk(self, client: Client) -> float:
        """Return F_k, the model's mean loss on all samples of the client, at least 1e-10 [3]."""
        take_statistics(client)
        model = client.model.eval()
        losses = 0.0
        for batch in client.samples.in_order(client.config.evaluation.batch):
            losses += client.cross_entropy(model(batch.x), batch.y).item() * len(batch.y)
        return max(losses / len(client), MIN_RISK)

    def round(self, server: Server, fleet: Fleet) -> None:
        """Run a round; the server subtracts sum_k Delta_k / sum_k h_k from the model, line 7 [1]."""
        message = self.message(server)
        w, rest = trained_and_rest(server.model, message["model"])
        got = fleet.ask(
            self.train,
            self.sample(server, fleet),
            message,
            rest=mean.like(rest),
            loss=mean.like(0.0),
            delta=mean.like(w).up_to(1e18),
            h=mean.like(0.0).over_samples(partial(step_fault, q=self.q, lipschitz=self.lipschitz_constant(server))),
        )
        server.step(tree.sub(w, tree.scale(got["delta"], 1 / got["h"])) | got["rest"])  # [4]
        server.log(loss=got["loss"], mean_h=got["h"])


def step_fault(n: int, parts: Tree, q: float, lipschitz: float) -> str | None:
    """Return a message if a client's h_k is too small for its Delta_k, otherwise None.

    Only the client knows F_k, but h is at least the minimum of q |Delta|^2 / F^(q + 1) + L F^q over F. A smaller h
    would make the server's step arbitrarily long.

    Args:
        n: Number of samples of the client.
        parts: The parts of its reply, Delta_k and h_k.
        q: The exponent q of the objective.
        lipschitz: The constant L.
    """
    square = sum(value.double().square().sum().item() for value in parts["delta"].values())
    f = max(((q + 1) * square / lipschitz) ** (1 / (2 * q + 1)), MIN_RISK)  # F*
    least = q * square / f ** (q + 1) + lipschitz * f**q
    return None if parts["h"] >= 0.999 * least else f"is {parts['h']:g}, too small for a Delta of this length"
