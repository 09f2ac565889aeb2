"""RatioLoss: a class weighs the more, the more alone it pulls at the classifier (Wang et al., AAAI 2021).

Privileged: the server holds labelled images of every class (`data.auxiliary`), which federations as a rule do not have.
Departures from the text, and from the authors' code where the text is silent:
[1] Those images are, as far as there are any, training images that the long tail left out; the code copies clients'.
[2] A class's update is one gradient of the classifier in evaluation mode, of all of its images, without momentum and
    decay, whose lengths cancel; the code trains for the local epochs.
[3] Ratios are of the model that a round begins with; the code has those of the round before. Round 1 is FedAvg's.
[4] Weights are counted where one class alone pulls, by the code's rule, over the whole layer. Features that are not
    negative can be pulled up by their own class only, so there these are weights of the class's own output.
[5] The monitor of the composition of a round, which raises alarms and changes no training, is left out.
beta = 0 is FedAvg.
"""

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from raylt.config import Config
from raylt.core.client import Client, Message
from raylt.core.method import Method
from raylt.core.server import Server
from raylt.core.training import Objective
from raylt.data.task import Task
from raylt.errors import ConfigError
from raylt.hyper import LogUniform, Uniform, hp
from raylt.models.split import SplitModel
from raylt.ops.matching import class_gradients
from raylt.recordable import recordable

ALONE = 10.0            # the ratio of a class whose weights nobody else pulls at; from the code


class RatioLoss(Method):
    """FedAvg whose cross-entropy is weighted by class."""

    name: ClassVar[str] = "ratioloss"
    paper: ClassVar[str] = "Wang et al., AAAI 2021"
    link: ClassVar[str | None] = "https://arxiv.org/abs/2008.06217"
    privileged: ClassVar[str | None] = "labelled images of every class at the server (data.auxiliary)"

    alpha: float = hp(1.0, Uniform(0.5, 1.5), "weight of a class without its ratio, Ratio Loss", gt=0)
    beta: float = hp(0.1, LogUniform(1e-3, 1.0), "what its ratio adds, Ratio Loss", ge=0)
    clip: float = hp(5000.0, LogUniform(10.0, 5000.0), "largest ratio; from the code", gt=0)
    rival: float = hp(0.8, Uniform(0.5, 0.95), "pull, as a share of the strongest, from which a class is not alone; "
                      "from the code", gt=0, lt=1)

    def prepare(self, task: Task, config: Config, model: SplitModel) -> None:
        if task.auxiliary is None:
            raise ConfigError("method = ratioloss: needs labelled images at the server, and data.auxiliary = 0; set "
                              "data.auxiliary=63, as its authors have")
        held = set(task.auxiliary.labels().tolist())
        if missing := [name for c, name in enumerate(task.class_names) if c not in held]:
            raise ConfigError(f"method = ratioloss: the server has no labelled image of {', '.join(missing)}, whose "
                              "images all lie with clients that join later or are held for validation; set "
                              "data.new_clients=0 or data.validation=0, or remove the class")
        if config.federation.batchnorm == "local":
            raise ConfigError("federation.batchnorm = local: the server of method = ratioloss looks at images with a "
                              "network that then has no running statistics; set federation.batchnorm=average")

    def objective(self, client: Client, message: Message) -> Objective:
        """The mean of (alpha + beta r_y) times the cross-entropy of each sample."""
        weights = message["weights"]                                            # [C]
        return recordable(lambda batch: (weights[batch.y] * F.cross_entropy(client.model(batch.x), batch.y,
                                                                            reduction="none")).mean())

    def message(self, server: Server) -> Message:
        weights = self.weights(server)
        server.log(largest_weight=weights.max().item())
        return super().message(server) | {"weights": weights}

    @torch.no_grad()
    def weights(self, server: Server) -> Tensor:
        """Of the classes in the loss of the round, float32 [C]; ones in the first round [3]."""
        model, own = server.model.eval(), server.auxiliary
        if own is None or server.round <= 1:
            return torch.ones(model.classes)
        z, y = zip(*((model.encoder(batch.x), batch.y) for batch in own.in_order(server.config.evaluation.batch)),
                   strict=True)
        gradients = class_gradients(torch.cat(z), torch.cat(y), model.classifier)               # [C, d + 1] each [2]
        pulls = -torch.stack([gradients[c][:, :-1] for c in range(model.classes)])
        return (self.alpha + self.beta * ratios(pulls, self.rival).clamp(max=self.clip)).float().cpu()


def ratios(pulls: Tensor, rival: float) -> Tensor:
    """r_p: of the weights at which class p alone pulls [4], the sum of its pulls over that of the others' mean pulls.

    Args:
        pulls: what one step on images of class p changes in the classifier, [P, C, d] with P = C.
        rival: a class is not alone at a weight where another's pull has more than this share of the strongest upwards.

    Returns:
        float64 [C].
    """
    pulls = pulls.double()
    strongest, owner = pulls.max(0)                                             # [C, d]
    near = torch.where(strongest == 0, pulls == 0, pulls.abs() > rival * strongest.abs()).sum(0)
    alone = F.one_hot(owner, len(pulls)).movedim(-1, 0).bool() & (near < 2)     # [P, C, d]; who is strongest is near
    own, everyone = (pulls * alone).sum((1, 2)), (pulls.sum(0) * alone).sum((1, 2))
    others = (everyone - own) / max(len(pulls) - 1, 1)
    return torch.where(others == 0, ALONE, own.abs() / others.abs())
