"""CCVR: the classifier is calibrated on virtual features, one Gaussian for each class (Luo et al., NeurIPS 2021).

Departures from the text:
[1] Clients upload sums, not their means and covariances: the pooled mean and covariance of Eq. 3 to 5 follow exactly,
    and nobody sees a client's.
[2] Every class gets the same number of virtual features; one that nobody holds gets none.
[3] Calibration is that of SFD's comparison: epochs, batch, momentum, decay and cosine rate; the text states none.
"""

from collections.abc import Mapping
from typing import ClassVar

import torch

from raylt import tree
from raylt.core.client import Client, Message, Reply
from raylt.core.features import features
from raylt.core.fitting import fit_classifier
from raylt.core.fleet import Fleet
from raylt.core.method import Method
from raylt.core.reductions import total
from raylt.core.server import Server
from raylt.hyper import Choice, LogUniform, Uniform, hp
from raylt.models.split import SplitModel, linear, with_classifier
from raylt.ops.moments import class_sums, moments, moments_fault, perturb


class CCVR(Method):
    """FedAvg, then one pass over all clients; the encoder stays as it is."""

    name: ClassVar[str] = "ccvr"
    paper: ClassVar[str] = "Luo et al., NeurIPS 2021"
    trains_as: ClassVar[str | None] = "fedavg"
    later: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "finish": ("virtual", "epochs", "batch", "lr", "momentum", "weight_decay")}

    virtual: int = hp(2000, Choice(100, 500, 1000, 2000), "M_c, virtual features per class", ge=1)
    epochs: int = hp(100, Choice(10, 50, 100), "of calibration; as SFD's", ge=0)
    batch: int = hp(64, Choice(32, 64, 128), "of calibration; as SFD's", ge=1)
    lr: float = hp(0.01, LogUniform(1e-3, 0.1), "of calibration; SFD, appendix C.2", gt=0)
    momentum: float = hp(0.9, Uniform(0, 0.99), "of calibration; SFD, appendix C.2", ge=0, lt=1)
    weight_decay: float = hp(1e-5, LogUniform(1e-6, 1e-3), "of calibration; as SFD's", ge=0)

    @property
    def finishes(self) -> bool:
        return True

    def statistics(self, client: Client, message: Message) -> Reply:
        """Of each class that the client holds: count and sums of z and z z^T, float64 [1]."""
        client.receive(message["model"])
        return client.reply(classes=class_sums(*features(client)))

    def finish(self, server: Server, fleet: Fleet) -> None:
        d = server.model.dim
        of_class = {"n": 1, **{name: torch.empty(size, dtype=torch.float64, device="meta")
                               for name, size in (("z", d), ("zz", d * (d + 1) // 2))}}
        message = {"model": tree.snapshot(server.model.entries("encoder."))}
        got = fleet.ask(self.statistics, fleet.everyone, message,
                        classes=total.within(dict.fromkeys(range(server.model.classes), of_class)).where(moments_fault))
        present = sorted(got["classes"])                              # [2]
        generator = torch.Generator().manual_seed(server.seed("virtual"))
        z = torch.cat([self.draw(got["classes"][c], generator) for c in present]).to(server.device)
        y = torch.tensor(present, device=server.device).repeat_interleave(self.virtual)
        own = server.model.classifier.state_dict()
        classifier = linear(own["weight"].clone(), own["bias"].clone())
        with server.stages.time("calibration"):
            loss = fit_classifier(                                              # [3]
                classifier, z, y, epochs=self.epochs, batch=self.batch, lr=self.lr, momentum=self.momentum,
                weight_decay=self.weight_decay, schedule="epoch", seed=server.seed("calibrate"))
        server.state["classifier"] = tree.snapshot(classifier.state_dict())
        server.log(virtual=len(z), calibration_loss=loss)

    def draw(self, sums: tree.Tree, generator: torch.Generator) -> torch.Tensor:
        """M_c draws from N(mu_c, Sigma_c), float32 [M_c, d]; Sigma_c is unbiased, as Eq. 5 has it."""
        n, mean, covariance = moments(sums)
        return (mean + perturb(covariance * n / max(n - 1, 1), self.virtual, generator)).float()

    def global_model(self, server: Server) -> SplitModel:
        if "classifier" not in server.state:
            return server.model
        return with_classifier(server.model, **tree.to(server.state["classifier"], server.device))
