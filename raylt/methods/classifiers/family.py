"""Base classes for methods that run FedAvg and then compute a classifier in one pass over all clients.

The encoder does not change. A finished run of FedAvg, or of any of these methods, can get the classifier of another
method: `raylt branch RUN method=ccvr`.
"""

from collections.abc import Mapping
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from raylt import tree
from raylt.config import Config
from raylt.core.client import Client, Message, Reply
from raylt.core.fleet.aggregation import Replies
from raylt.core.fleet.fleet import Fleet
from raylt.core.fleet.reductions import Reduction, total
from raylt.core.method import Group, Method
from raylt.core.server import Server
from raylt.core.training.estimates import about, fit_seconds
from raylt.core.training.features import features
from raylt.core.training.fit_classifier import fit_classifier
from raylt.data.task import Task, TaskSpec
from raylt.hyper import Choice, LogUniform, Uniform, hp
from raylt.models.layers import check_linear_classifier
from raylt.models.split import SplitModel, linear, with_classifier
from raylt.ops.moments import class_sums, moments_fault, nearest_moments, sample_lengths, sums_fault


class AfterTraining(Method):
    """Base class: FedAvg in every round, then a new classifier that a subclass computes in `finish`.

    The subclass stores the classifier in `server.state["classifier"]`.
    """

    group: ClassVar[Group | None] = "statistics"
    trains_as: ClassVar[str | None] = "fedavg"
    stackable: ClassVar[bool] = True

    def statistics(self, client: Client, message: Message) -> Reply:
        """Report, for each class of the client, the sample count and the sums of features z and of z z^T, float64."""
        client.receive(message["model"])
        return client.reply(classes=class_sums(*features(client)))

    def gather(self, server: Server, fleet: Fleet, **parts: Reduction) -> Replies:
        """Ask all clients for statistics of their features under the global encoder."""
        message = {"model": tree.snapshot(server.model.entries("encoder."))}
        return fleet.ask(self.statistics, fleet.everyone, message, **parts)

    def global_model(self, server: Server) -> SplitModel:
        if "classifier" not in server.state:
            return server.model
        return with_classifier(
            server.model, **tree.to(server.state["classifier"], server.device), longest=server.config.privacy.longest
        )


class Calibrated(AfterTraining):
    """Base class for methods that train the classifier further on equally many features per class.

    A subclass draws the features in `draw`.
    """

    later: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "finish": (
            "virtual",
            "retrain_epochs",
            "retrain_batch",
            "retrain_lr",
            "retrain_momentum",
            "retrain_weight_decay",
        )
    }

    virtual: int = hp(2000, Choice(100, 500, 1000, 2000), "M_c, features per class", ge=1)
    retrain_epochs: int = hp(100, Choice(10, 50, 100), "calibration epochs; as SFD's", ge=0)
    retrain_batch: int = hp(64, Choice(32, 64, 128), "calibration batch size; as SFD's", ge=1)
    retrain_lr: float = hp(0.01, LogUniform(1e-3, 0.1), "calibration learning rate; SFD, appendix C.2", gt=0)
    retrain_momentum: float = hp(0.9, Uniform(0, 0.99), "calibration momentum; SFD, appendix C.2", ge=0, lt=1)
    retrain_weight_decay: float = hp(1e-5, LogUniform(1e-6, 1e-3), "calibration weight decay; as SFD's", ge=0)

    def prepare(self, task: Task, config: Config, model: SplitModel) -> None:
        check_linear_classifier(self.name, config, model)

    def draw(self, server: Server, fleet: Fleet, generator: torch.Generator) -> dict[int, Tensor]:
        """Return M_c features, float32 [M_c, d], for each class c that any client has."""
        raise NotImplementedError

    @staticmethod
    def sums_like(d: int) -> tree.Tree:
        """Return empty tensors with the shapes of one class's feature sums, for features of width d."""
        return {
            "n": 1,
            "z": torch.empty(d, dtype=torch.float64, device="meta"),
            "zz": torch.empty(d * (d + 1) // 2, dtype=torch.float64, device="meta"),
        }

    def class_moments(self, server: Server, fleet: Fleet) -> dict[int, tree.Tree]:
        """Return the feature sums over all clients of each class that any client has, by ascending class."""
        like = dict.fromkeys(range(server.model.classes), self.sums_like(server.model.dim))
        privacy = server.config.privacy
        sums = (
            total.within(like)
            .counting("n")
            .where(moments_fault)
            .over_samples(partial(sums_fault, **server.feature_limits))
            .bounded(sample_lengths(privacy.clip), nearest_moments)
        )
        got = self.gather(server, fleet, classes=sums)
        return dict(sorted(got["classes"].items()))

    def last_phase(self, spec: TaskSpec, model: SplitModel) -> str:
        count = self.virtual * spec.classes
        duration = about(self.last_phase_seconds(spec, model))
        return f"calibration of the classifier on {count} features in {self.retrain_epochs} epochs, {duration}"

    def last_phase_seconds(self, spec: TaskSpec, model: SplitModel) -> float:
        return fit_seconds(
            model.dim, spec.classes, self.virtual * spec.classes, self.retrain_epochs, self.retrain_batch
        )

    def finish(self, server: Server, fleet: Fleet) -> None:
        drawn = self.draw(server, fleet, torch.Generator().manual_seed(server.seed("virtual")))
        z = torch.cat([drawn[c] for c in sorted(drawn)]).to(server.device)
        y = torch.tensor(sorted(drawn), device=server.device).repeat_interleave(self.virtual)
        own = server.model.classifier.state_dict()
        classifier = linear(own["weight"].clone(), own["bias"].clone())
        with server.timings.time("calibration") as progress:
            loss = fit_classifier(
                classifier,
                z,
                y,
                epochs=self.retrain_epochs,
                batch=self.retrain_batch,
                lr=self.retrain_lr,
                momentum=self.retrain_momentum,
                weight_decay=self.retrain_weight_decay,
                schedule="epoch",
                seed=server.seed("calibrate"),
                progress=progress,
            )
        server.state["classifier"] = tree.snapshot(classifier.state_dict())
        server.log(virtual=len(z), calibration_loss=loss)
