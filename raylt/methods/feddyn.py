"""FedDyn: FedAvg with a regulariser that each client updates every round (Acar et al., ICLR 2021).

Symbols follow Algorithm 1 (from memory); decisions follow the authors' code, alpemreacar/FedDyn at be0348b:
[1] A client keeps d_k, the sum of its own updates theta_k - theta; the text's gradient is -alpha_k d_k. Its local loss
    is L_k(theta) + alpha_k / 2 ||theta - (theta^{t-1} - d_k)||^2 up to a constant.
[2] alpha_k is alpha times the clients' mean number of samples over the client's own. At a stationary point, the mean
    loss over all samples is then stationary; the text has one alpha and the mean over clients.
[3] The participants' models are averaged with equal weights. Clients start from this mean plus D, the mean of d_k over
    all clients. The mean is evaluated, as in the code: theta^t of the text is ahead of it. With `federation.robust`,
    D follows the robust mean of the models and is not the mean of d_k.
[4] Gradients are not clipped; the code clips them to norm 10.
Entries without gradients (BatchNorm's statistics) are averaged with the same weights.
"""

from typing import ClassVar

from torch import Tensor

from raylt import tree
from raylt.core.client import Client, Message, Reply
from raylt.core.fleet.cohort import Cohort
from raylt.core.fleet.fleet import Fleet
from raylt.core.method import Method, train_clients
from raylt.core.server import Server
from raylt.core.training.loss_terms import Terms
from raylt.core.training.sgd import Objective
from raylt.data.samples import Batch
from raylt.data.sources.sources import ProblemKind
from raylt.hyper import LogUniform, hp
from raylt.models.split import StateDict
from raylt.ops.local_updates import trained_and_rest
from raylt.ops.proximal import squared_distance


class FedDyn(Method):
    """FedAvg with dynamic regularisation. A client uploads only its model."""

    name: ClassVar[str] = "feddyn"
    paper: ClassVar[str] = "Acar et al., ICLR 2021"
    link: ClassVar[str | None] = "https://arxiv.org/abs/2111.04263"
    problems: ClassVar[tuple[ProblemKind, ...]] = ("classification", "segmentation")

    alpha: float = hp(0.01, LogUniform(1e-3, 0.1), "weight of the regulariser; from the code's CIFAR-10 run", gt=0)

    @property
    def terms(self) -> tuple[str, ...]:
        return "cross_entropy", "dynamic"

    def objective(self, client: Client, message: Message) -> Objective:
        """Return the loss L_k(theta) + alpha_k / 2 ||theta - (theta^{t-1} - d_k)||^2 with the regulariser [1]."""
        named = {name: p for name, p in client.model.named_parameters() if p.requires_grad}
        received = {name: p.detach().clone() for name, p in named.items()}  # the model was received just before
        anchor = list(tree.sub(received, own_updates(client, received)).values())
        params = list(named.values())
        alpha = self.alpha * message["mean_samples"] / len(client)  # [2]

        def terms(batch: Batch) -> dict[str, Tensor]:
            return {
                "cross_entropy": client.cross_entropy(client.model(batch.x), batch.y),
                "dynamic": alpha / 2 * squared_distance(params, anchor),
            }

        return Terms(client, terms)

    def train(self, client: Client, message: Message) -> Reply:
        reply = super().train(client, message)  # [4]
        before, _ = trained_and_rest(client.model, message["model"])
        after, _ = trained_and_rest(client.model, reply.tree["model"])
        client.state["updates"] = tree.add(own_updates(client, before), tree.sub(after, before))  # d_k
        return Reply(1.0, reply.tree)  # [3]

    def start(self, server: Server, fleet: Fleet) -> None:
        super().start(server, fleet)
        x, _ = trained_and_rest(server.model, tree.snapshot(self.shared(server.model)))
        server.state["mean_samples"] = sum(fleet.sizes.values()) / len(fleet.sizes)
        server.state["ahead"] = tree.scale(x, 0)  # D

    def message(self, server: Server) -> Message:
        message = super().message(server)
        ahead = tree.add(server.state["ahead"], message["model"])
        return {"model": message["model"] | ahead, "mean_samples": server.state["mean_samples"]}

    def round(self, server: Server, fleet: Fleet) -> None:
        message = self.message(server)
        cohort = self.sample(server, fleet)
        ids = cohort.ids if isinstance(cohort, Cohort) else cohort
        got = train_clients(self, server, fleet, cohort, message, dict.fromkeys(ids, 1.0))
        before, _ = trained_and_rest(server.model, message["model"])
        mean, _ = trained_and_rest(server.model, tree.snapshot(self.shared(server.model)))
        moved = tree.scale(tree.sub(mean, before), len(got.weights) / len(fleet.ids))
        server.state["ahead"] = tree.add(server.state["ahead"], moved)


def own_updates(client: Client, like: StateDict) -> StateDict:
    """Return the client's running correction d_k, or zeros before its first training."""
    return tree.to(client.state.get("updates", tree.scale(like, 0)), client.device)
