"""FedNova: normalised averaging, which weights clients by sample count, not by step count (Wang et al., NeurIPS 2020).

Sections are the paper's. Departures from the text:
[1] p_i is over the participants of a round, not over all clients.
[2] A client that takes no step, because it has one sample, has no direction; it counts as a zero direction with zero
    steps.
[3] Entries without gradients (BatchNorm's statistics) are averaged as in FedAvg; the paper does not mention them.
If all clients take the same number of steps, this is FedAvg.
"""

from functools import partial
from typing import ClassVar

from raylt import tree
from raylt.config import Config, LocalConfig
from raylt.core.client import Client, Message, Reply
from raylt.core.fleet.fleet import Fleet
from raylt.core.fleet.reductions import mean
from raylt.core.method import Group, Method
from raylt.core.server import Server
from raylt.core.training.sgd import sgd
from raylt.data.sources.sources import ProblemKind
from raylt.data.task import Task
from raylt.models.split import SplitModel
from raylt.ops.local_updates import check_sgd, gradient_mass, trained_and_rest
from raylt.tree import Tree


class FedNova(Method):
    """FedAvg of normalised updates: clients upload the direction d_i and the gradient mass |a_i|_1.

    Local SGD may have momentum.
    """

    name: ClassVar[str] = "fednova"
    paper: ClassVar[str] = "Wang et al., NeurIPS 2020"
    link: ClassVar[str | None] = "https://arxiv.org/abs/2007.07481"
    group: ClassVar[Group | None] = "aggregation"
    problems: ClassVar[tuple[ProblemKind, ...]] = ("classification", "segmentation")

    @property
    def uploads_more(self) -> bool:
        return True

    def prepare(self, task: Task, config: Config, model: SplitModel) -> None:
        check_sgd(self.name, config)

    def train(self, client: Client, message: Message) -> Reply:
        """Train the received model; report its normalised update: the update divided by the gradient mass |a_i|_1.

        This is d_i = G_i a_i / |a_i|_1 of section 4, times the learning rate.
        """
        client.receive(message["model"])
        loss = sgd(client, self.objective(client, message))
        mass = gradient_mass(client.steps(), client.config.local.momentum)
        start, _ = trained_and_rest(client.model, message["model"])
        end, rest = trained_and_rest(client.model, self.shared(client.model))
        direction = tree.scale(tree.sub(start, end), 1 / max(mass, 1))  # [2]
        return client.reply(direction=direction, mass=mass, rest=rest, loss=loss)

    def round(self, server: Server, fleet: Fleet) -> None:
        """Run a round: the server subtracts tau_eff times the weighted mean of the normalised updates, section 5 [1].

        The step is x <- x - tau_eff sum_i p_i d_i with tau_eff = sum_i p_i |a_i|_1.
        """
        message = self.message(server)
        x, rest = trained_and_rest(server.model, message["model"])
        got = fleet.ask(
            self.train,
            self.sample(server, fleet),
            message,
            direction=mean.like(tree.without_values(x)),
            mass=mean.like(0.0).over_samples(partial(mass_fault, local=server.config.local)),
            rest=mean.like(rest),
            loss=mean.like(0.0),
        )
        server.step(tree.sub(x, tree.scale(got["direction"], got["mass"])) | got["rest"])  # [3]
        server.log(loss=got["loss"], effective_steps=got["mass"])


def mass_fault(n: int, parts: Tree, local: LocalConfig) -> str | None:
    """Return the reason why an uploaded gradient mass |a_i|_1 is wrong for a client with n samples; None if correct.

    The number of samples determines the number of steps, and thus the mass.

    Args:
        n: Number of samples of the client.
        parts: The parts of its reply.
        local: Settings of the local training.
    """
    expected = gradient_mass(local.step_count(n), local.momentum)
    return None if parts["mass"] == expected else f"is {parts['mass']:g}, but {expected:g} for the client's samples"
