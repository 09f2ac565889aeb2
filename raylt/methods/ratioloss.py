"""RatioLoss: FedAvg with a cross-entropy weighted by each class's share in the classifier's updates (Wang et al., AAAI
2021).

Privileged: the server has labelled images of every class (`data.auxiliary`), which most federations do not have.
Departures from the text, and from the authors' code for details that the text does not state:
[1] If possible, these images are training images that the long tail left out; the code copies clients' images.
[2] The update of a class is one gradient of the classifier in evaluation mode, over all of its images, without momentum
    and weight decay, because its length cancels. The code trains for the local epochs.
[3] Ratios are computed with the model at the start of the round; the code uses the previous round's. Round 1 is
    FedAvg's.
[4] Only weights that a single class pulls are counted, by the code's rule, over the whole layer. With non-negative
    features, only a class itself can pull its weights up, so these are weights of the class's own output.
[5] The monitor of a round's composition, which raises alarms but does not affect training, is left out.
beta = 0 is FedAvg with alpha = 1, and otherwise FedAvg with alpha times its loss.
"""

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from raylt.config import Config
from raylt.core.client import Client, Message
from raylt.core.fleet.fleet import Fleet
from raylt.core.method import Method, train_clients
from raylt.core.server import Server
from raylt.core.training.sgd import Objective
from raylt.data.task import Task
from raylt.errors import ConfigError
from raylt.hyper import LogUniform, Uniform, hp
from raylt.models.layers import check_linear_classifier
from raylt.models.split import SplitModel
from raylt.ops.local_updates import check_averaged_statistics
from raylt.ops.matching import class_gradients

RATIO_ALONE = 10.0  # Ratio of a class whose weights no other class pulls; from the code.


class RatioLoss(Method):
    """FedAvg with a class-weighted cross-entropy, without the monitor of a round's composition [5]."""

    name: ClassVar[str] = "ratioloss"
    paper: ClassVar[str] = "Wang et al., AAAI 2021"
    link: ClassVar[str | None] = "https://arxiv.org/abs/2008.06217"
    privileged: ClassVar[str | None] = "labelled images of every class at the server (data.auxiliary)"
    stackable: ClassVar[bool] = True

    alpha: float = hp(1.0, Uniform(0.5, 1.5), "weight of a class without its ratio, Ratio Loss", gt=0)
    beta: float = hp(0.1, LogUniform(1e-3, 1.0), "weight of a class's ratio, Ratio Loss", ge=0)
    clip: float = hp(5000.0, LogUniform(10.0, 5000.0), "maximum ratio; from the code", gt=0)
    rival: float = hp(
        0.8,
        Uniform(0.5, 0.95),
        "minimum pull of another class, as a share of the strongest pull, that counts; from the code",
        gt=0,
        lt=1,
    )

    def prepare(self, task: Task, config: Config, model: SplitModel) -> None:
        if task.auxiliary is None:
            hides_clients = config.privacy.update_epsilon is not None  # which forbids labelled images at the server
            remedy = "Choose another method" if hides_clients else "Set data.auxiliary=63, as in the authors' code"
            raise ConfigError(
                f"data.auxiliary: method = ratioloss needs labelled images at the server (0). {remedy}.",
                code="config.conflict",
                key="data.auxiliary",
                value=0,
            )
        labels = set(task.auxiliary.labels().tolist())
        if missing := [name for c, name in enumerate(task.class_names) if c not in labels]:
            raise ConfigError(
                f"data.auxiliary: the server of method = ratioloss has no labelled image of {', '.join(missing)}. All "
                "its images belong to clients that join later, or to the validation set. "
                "Set data.new_clients=0 or data.validation=0, or remove the class.",
                code="data.too-few",
                key="data.auxiliary",
                classes=missing,
            )
        check_averaged_statistics(self.name, config)
        check_linear_classifier(self.name, config, model)

    def objective(self, client: Client, message: Message) -> Objective:
        """Return the mean cross-entropy with the server's class weights, alpha + beta r_y for class y."""
        weights = message["weights"]  # [C]
        return lambda batch: (
            weights[batch.y] * F.cross_entropy(client.model(batch.x), batch.y, reduction="none")
        ).mean()

    def message(self, server: Server) -> Message:
        return super().message(server) | {"weights": self.weights(server)}

    def round(self, server: Server, fleet: Fleet) -> None:
        with server.timings.time("class weights"):
            message = self.message(server)
        server.log(largest_weight=message["weights"].max().item())
        train_clients(self, server, fleet, message=message)

    @torch.no_grad()
    def weights(self, server: Server) -> Tensor:
        """Return the class weights of the loss for this round, float32 [C]; ones in the first round [3]."""
        model = server.model.eval()
        auxiliary = server.auxiliary  # [1]
        if auxiliary is None or server.round <= 1:
            return torch.ones(model.classes)
        batches = list(auxiliary.in_order(server.config.evaluation.batch))
        z = torch.cat([model.encoder(batch.x) for batch in batches])
        y = torch.cat([batch.y for batch in batches])
        gradients = class_gradients(z, y, model.classifier)  # [C, d + 1] each [2]
        pulls = -torch.stack([gradients[c][:, :-1] for c in range(model.classes)])
        return (self.alpha + self.beta * ratios(pulls, self.rival).clamp(max=self.clip)).float().cpu()


def ratios(pulls: Tensor, rival: float) -> Tensor:
    """Return each class's ratio r_p: its own effect on the classifier, divided by the mean effect of other classes [4].

    Only weights that class p alone pulls count.

    Args:
        pulls: Change of the classifier by one step on images of class p, [P, C, d] with P = C.
        rival: A class is not alone at a weight if another class's pull exceeds this share of the strongest upward pull.

    Returns:
        The ratios, float64 [C].
    """
    strongest, owner = pulls.max(0)  # [C, d]
    least = rival * strongest.double().abs()
    near = torch.zeros_like(owner)  # number of classes near the strongest one, which is included
    for pull in pulls:  # one by one, because float64 [P, C, d] would take gigabytes with many classes
        near += torch.where(strongest == 0, pull == 0, pull.double().abs() > least)
    of_all = pulls.sum(0, dtype=torch.float64)
    alone = [(owner == p) & (near < 2) for p in range(len(pulls))]  # bool [C, d] each
    own = torch.stack([(pull.double() * mask).sum() for pull, mask in zip(pulls, alone, strict=True)])
    all_classes = torch.stack([(of_all * mask).sum() for mask in alone])
    others = (all_classes - own) / max(len(pulls) - 1, 1)
    return torch.where(others == 0, RATIO_ALONE, own.abs() / others.abs())
