"""RUCR: FedAvg with features pulled to global prototypes, and a classifier balanced on features mixed with the
prototypes (Huang et al., IEEE Transactions on Information Forensics and Security 2024).

For details that the text does not state, the authors' code decides. Departures from both:
[1] A prototype is the mean of the clients' class means, each scaled to length 1, weighted by samples. The code does so
    only for re-training; for training it takes plain means, scaled to length 1 afterwards.
[2] Prototypes are computed in evaluation mode; the code leaves the model in training mode.
[3] In the last rounds all clients are asked for prototypes, and training uses these too; the code trains with the
    prototypes of the round's clients.
[4] A class that no asked client owns has no prototype: no feature is pulled to it and it gets no mixed features.
[5] Classifiers are re-trained in the last `retrain_rounds` rounds; the code (liuyuxia211/RUCR at 73d965c) re-trains
    in one round more than its setting.
[6] A client's features are drawn with replacement for mixtures; the code draws them without replacement.
Re-trained classifiers are averaged and evaluated, but not used in later rounds: without the loss on prototypes
(`weight=0`), everything else equals FedAvg bit by bit.
"""

from collections.abc import Mapping
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from raylt import tree
from raylt.config import Config
from raylt.core.client import Client, Message, Reply
from raylt.core.fleet.cohort import Cohort
from raylt.core.fleet.fleet import Fleet
from raylt.core.fleet.reductions import Reduction, mean, total
from raylt.core.method import Method, train_clients, train_model
from raylt.core.server import Server
from raylt.core.training.features import features
from raylt.core.training.fit_classifier import fit_classifier
from raylt.core.training.loss_terms import Terms
from raylt.core.training.sgd import Objective
from raylt.data.samples import Batch
from raylt.data.task import Task
from raylt.hyper import Choice, LogUniform, Uniform, check_ends, hp
from raylt.models.layers import check_linear_classifier
from raylt.models.split import SplitModel, linear, with_classifier
from raylt.ops.moments import pooled_means, sums_fault, weighted_class_means
from raylt.seeds import seed_for


class RUCR(Method):
    """FedAvg with global prototypes and a balanced classifier. The defaults are the authors' code's."""

    name: ClassVar[str] = "rucr"
    paper: ClassVar[str] = "Huang et al., IEEE TIFS 2024"
    link: ClassVar[str | None] = "https://ieeexplore.ieee.org/document/10534053"
    later: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "retraining": ("retrain_rounds", "size", "lam_low", "lam_high", "retrain_epochs", "retrain_batch", "retrain_lr")
    }
    encoder_fields: ClassVar[tuple[str, ...]] = ("weight", "tau")

    weight: float = hp(0.15, LogUniform(0.01, 1.0), "weight of the loss on prototypes", ge=0)
    tau: float = hp(0.9, LogUniform(0.1, 2.0), "temperature of cosines to prototypes", gt=0)
    retrain_rounds: int = hp(20, Choice(10, 20, 50), "last rounds, in which classifiers are re-trained", ge=0)
    size: int = hp(100, Choice(50, 100, 200), "mixed features per class", ge=1)
    lam_low: float = hp(0.35, Uniform(0.2, 0.8), "minimum share of the prototype in a mixed feature", ge=0, le=1)
    lam_high: float = hp(0.95, Uniform(0.8, 1.0), "maximum share of the prototype in a mixed feature", ge=0, le=1)
    retrain_epochs: int = hp(50, Choice(10, 50, 100), "re-training epochs", ge=0)
    retrain_batch: int = hp(256, Choice(32, 64, 256), "re-training batch size", ge=1)
    retrain_lr: float = hp(0.01, LogUniform(1e-3, 0.1), "re-training learning rate", gt=0)

    def stages(self, rounds: int) -> dict[str, int]:
        return super().stages(rounds) | {"retraining": max(0, rounds - self.retrain_rounds)}

    def prepare(self, task: Task, config: Config, model: SplitModel) -> None:
        check_linear_classifier(self.name, config, model)
        check_ends("lam_low", self.lam_low, "lam_high", self.lam_high)

    # at a client

    def prototypes(self, client: Client, message: Message) -> Reply:
        """Report each class's sample count n at the client, and n times the direction of the mean feature [1] [2]."""
        client.receive(message["encoder"])
        return client.reply(classes=weighted_class_means(*features(client), unit=True))

    @property
    def terms(self) -> tuple[str, ...]:
        return ("cross_entropy", "prototypes") if self.weight else ()

    def objective(self, client: Client, message: Message) -> Objective:
        """Return the cross-entropy of the classifier plus a cross-entropy over cosines to the prototypes.

        The cosine of the true class is shifted by log pi.
        """
        if not self.weight:
            return super().objective(client, message)
        model, directions = client.model, F.normalize(message["means"], dim=1)
        usable = message["present"] & (client.counts > 0)  # the cosine to other classes is 0 [4]
        log_pi = torch.where(usable, message["pi"], 1.0).log()  # [C]

        def terms(batch: Batch) -> dict[str, Tensor]:
            z = model.encoder(batch.x)  # [B, d]
            cosines = F.normalize(z, dim=1) @ directions.T * usable / self.tau  # [B, C]
            shifted = cosines + F.one_hot(batch.y, len(log_pi)) * log_pi
            return {
                "cross_entropy": F.cross_entropy(model.classifier(z), batch.y),
                "prototypes": self.weight * F.cross_entropy(shifted, batch.y),
            }

        return Terms(client, terms)

    def train(self, client: Client, message: Message) -> Reply:
        """Train the model; in the last rounds, also re-train a copy of the classifier on mixed features.

        The mixed features come from the received encoder.
        """
        client.receive(message["model"])
        z = features(client)[0] if message["retrain"] else None
        parts = train_model(self, client, message)
        if z is not None:
            own = client.model.classifier.state_dict()
            classifier = linear(own["weight"].clone(), own["bias"].clone())
            parts["retrain_loss"] = fit_classifier(
                classifier,
                *self.mixed(z, message, client.order),
                epochs=self.retrain_epochs,
                batch=self.retrain_batch,
                lr=self.retrain_lr,
                momentum=0.0,
                weight_decay=0.0,
                schedule="constant",
                seed=seed_for(client.config.seed, "retrain", client.round, client.id),
            )
            parts["classifier"] = classifier.state_dict()
        return client.reply(model=self.shared(client.model), **parts)

    def mixed(self, z: Tensor, message: Message, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return `size` features mixed with each class's prototype, lam P_c + (1 - lam) z / |z|, and their classes.

        Args:
            z: Features of the client's samples, [n, d].
            message: The server's message, with the prototypes.
            generator: Generator of the draws.
        """
        classes = message["present"].nonzero().flatten()
        y = classes.repeat_interleave(self.size)
        rows = torch.randint(len(z), (len(y),), generator=generator).to(z.device)  # [6]
        lam = self.lam_low + (self.lam_high - self.lam_low) * torch.rand(len(y), 1, generator=generator)
        lam = lam.to(z.device)
        return lam * message["means"][y] + (1 - lam) * F.normalize(z[rows], dim=1), y

    # at the server

    def round(self, server: Server, fleet: Fleet) -> None:
        retrain = server.round > server.rounds - self.retrain_rounds  # [5]
        cohort = self.sample(server, fleet)
        message = self.message(server) | {"retrain": int(retrain)}
        message |= self.global_prototypes(server, fleet, fleet.everyone if retrain else cohort)  # [3]
        parts: dict[str, Reduction] = {}
        if retrain:
            parts["retrain_loss"] = mean.like(0.0)
            parts["classifier"] = mean.like(server.model.classifier.state_dict())
        got = train_clients(self, server, fleet, cohort, message, None, **parts)
        if retrain:
            server.state["classifier"] = got["classifier"]
            server.log(retrain_loss=got["retrain_loss"])

    def global_prototypes(self, server: Server, fleet: Fleet, cohort: Cohort | list[int]) -> Message:
        """Return the global prototypes, float32 [C, d], a mask of classes that have one, and class shares pi [C]."""
        of_class = {"n": 1, "z": torch.empty(server.model.dim, device="meta")}
        like = dict.fromkeys(range(server.model.classes), of_class)
        message = {"encoder": tree.snapshot(server.model.entries("encoder."))}
        sums = (
            total.within(like)
            .counting("n")
            .over_samples(partial(sums_fault, **server.feature_limits | {"longest": 1.0}))
        )
        classes = fleet.ask(self.prototypes, cohort, message, classes=sums)["classes"]
        counts = torch.tensor([classes[c]["n"] if c in classes else 0 for c in like], dtype=torch.float64)
        return pooled_means(classes, server.model.classes) | {"pi": (counts / counts.sum()).float()}

    def global_model(self, server: Server) -> SplitModel:
        if "classifier" not in server.state:
            return server.model
        return with_classifier(server.model, **tree.to(server.state["classifier"], server.device))
