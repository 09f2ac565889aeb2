"""What they have in common: the rounds of FedAvg, then one pass over all clients for a classifier; the encoder stays.

A finished run of FedAvg, or of any of them, can be given the classifier of another: `raylt branch RUN method=ccvr`.
"""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from raylt import tree
from raylt.core.client import Client, Message, Reply
from raylt.core.features import features
from raylt.core.fitting import fit_classifier
from raylt.core.fleet import Fleet
from raylt.core.gathering import Replies
from raylt.core.method import Group, Method
from raylt.core.reductions import Reduction, total
from raylt.core.server import Server
from raylt.hyper import Choice, LogUniform, Uniform, hp
from raylt.models.split import SplitModel, linear, with_classifier
from raylt.ops.moments import class_sums, moments_fault, nearest_moments, sample_lengths


class AfterTraining(Method):
    """FedAvg until the last round; a subclass says what `finish` puts into `server.state["classifier"]`."""

    group: ClassVar[Group | None] = "statistics"
    trains_as: ClassVar[str | None] = "fedavg"

    @property
    def finishes(self) -> bool:
        return True

    def statistics(self, client: Client, message: Message) -> Reply:
        """Of each class that the client holds: count and sums of z and z z^T, float64."""
        client.receive(message["model"])
        return client.reply(classes=class_sums(*features(client)))

    def gather(self, server: Server, fleet: Fleet, **parts: Reduction) -> Replies:
        """What all clients say of their features under the global encoder."""
        message = {"model": tree.snapshot(server.model.entries("encoder."))}
        return fleet.ask(self.statistics, fleet.everyone, message, **parts)

    def global_model(self, server: Server) -> SplitModel:
        if "classifier" not in server.state:
            return server.model
        return with_classifier(server.model, **tree.to(server.state["classifier"], server.device),
                               longest=server.config.privacy.longest)


class Calibrated(AfterTraining):
    """The classifier goes on learning, from equally many features of each class that `draw` gives."""

    later: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "finish": ("virtual", "epochs", "batch", "lr", "momentum", "weight_decay")}

    virtual: int = hp(2000, Choice(100, 500, 1000, 2000), "M_c, features per class", ge=1)
    epochs: int = hp(100, Choice(10, 50, 100), "of calibration; as SFD's", ge=0)
    batch: int = hp(64, Choice(32, 64, 128), "of calibration; as SFD's", ge=1)
    lr: float = hp(0.01, LogUniform(1e-3, 0.1), "of calibration; SFD, appendix C.2", gt=0)
    momentum: float = hp(0.9, Uniform(0, 0.99), "of calibration; SFD, appendix C.2", ge=0, lt=1)
    weight_decay: float = hp(1e-5, LogUniform(1e-6, 1e-3), "of calibration; as SFD's", ge=0)

    def draw(self, server: Server, fleet: Fleet, generator: torch.Generator) -> dict[int, Tensor]:
        """Features of each class that somebody holds, float32 [M_c, d]."""
        raise NotImplementedError

    def class_moments(self, server: Server, fleet: Fleet) -> dict[int, tree.Tree]:
        """The clients' sums of each class that somebody holds, in the order of the classes."""
        d = server.model.dim
        of_class = {"n": 1, **{name: torch.empty(size, dtype=torch.float64, device="meta")
                               for name, size in (("z", d), ("zz", d * (d + 1) // 2))}}
        like = dict.fromkeys(range(server.model.classes), of_class)
        sums = total.within(like).where(moments_fault).bounded(sample_lengths(server.config.privacy.clip),
                                                               nearest_moments)
        got = self.gather(server, fleet, classes=sums)
        return dict(sorted(got["classes"].items()))

    def finish(self, server: Server, fleet: Fleet) -> None:
        drawn = self.draw(server, fleet, torch.Generator().manual_seed(server.seed("virtual")))
        z = torch.cat([drawn[c] for c in sorted(drawn)]).to(server.device)
        y = torch.tensor(sorted(drawn), device=server.device).repeat_interleave(self.virtual)
        own = server.model.classifier.state_dict()
        classifier = linear(own["weight"].clone(), own["bias"].clone())
        with server.stages.time("calibration"):
            loss = fit_classifier(
                classifier, z, y, epochs=self.epochs, batch=self.batch, lr=self.lr, momentum=self.momentum,
                weight_decay=self.weight_decay, schedule="epoch", seed=server.seed("calibrate"))
        server.state["classifier"] = tree.snapshot(classifier.state_dict())
        server.log(virtual=len(z), calibration_loss=loss)
