"""RUCR: features drawn to global prototypes, classifiers balanced on features mixed with them (Huang et al., IEEE
Transactions on Mobile Computing 2024).

What the text leaves open follows the authors' code. Departures from both:
[1] A prototype is the mean of the clients' class means brought to length 1, weighted by samples; the code does so for
    re-training only, and has plain means, brought to length 1 afterwards, for training.
[2] Prototypes are taken in evaluation mode; the code leaves the model in training mode.
[3] In the last rounds all clients are asked for prototypes, and training uses these too; the code has those of the
    round's clients for it.
[4] A class that nobody who is asked holds has no prototype: nothing is drawn there and it gets no mixed features.
Re-trained classifiers are averaged and judged, and never fed back: without the loss on prototypes (`weight=0`) this is
FedAvg to the bit.
"""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from raylt import tree
from raylt.core.client import Client, Message, Reply
from raylt.core.cohort import Cohort
from raylt.core.features import features
from raylt.core.fitting import fit_classifier
from raylt.core.fleet import Fleet
from raylt.core.method import Method
from raylt.core.reductions import mean, total
from raylt.core.server import Server
from raylt.core.terms import Terms, asked_for, figure_of, reply_of
from raylt.core.training import Objective, sgd
from raylt.data.samples import Batch
from raylt.hyper import Choice, LogUniform, Uniform, hp
from raylt.models.split import SplitModel, linear, with_classifier
from raylt.ops.moments import class_means, pooled_means
from raylt.recordable import recordable
from raylt.seeds import seed_for


class RUCR(Method):
    """Numbers are those of the code's run."""

    name: ClassVar[str] = "rucr"
    paper: ClassVar[str] = "Huang et al., IEEE TMC 2024"
    later: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "retraining": ("rounds", "size", "lam_low", "lam_high", "epochs", "batch", "lr")}

    weight: float = hp(0.15, LogUniform(0.01, 1.0), "of the loss on prototypes", ge=0)
    tau: float = hp(0.9, LogUniform(0.1, 2.0), "temperature of cosines to prototypes", gt=0)
    rounds: int = hp(20, Choice(10, 20, 50), "last rounds, in which classifiers are re-trained", ge=0)
    size: int = hp(100, Choice(50, 100, 200), "mixed features per class", ge=1)
    lam_low: float = hp(0.35, Uniform(0.2, 0.8), "smallest share of the prototype in a mixed feature", ge=0, le=1)
    lam_high: float = hp(0.95, Uniform(0.8, 1.0), "largest share", ge=0, le=1)
    epochs: int = hp(50, Choice(10, 50, 100), "of re-training", ge=0)
    batch: int = hp(256, Choice(32, 64, 256), "of re-training", ge=1)
    lr: float = hp(0.01, LogUniform(1e-3, 0.1), "of re-training", gt=0)

    def stages(self, rounds: int) -> dict[str, int]:
        return super().stages(rounds) | {"retraining": max(0, rounds - self.rounds)}

    # at a client

    def prototypes(self, client: Client, message: Message) -> Reply:
        """Of each class that the client holds its count, and so many times the direction of its mean [1] [2]."""
        client.receive(message["encoder"])
        return client.reply(classes=class_means(*features(client), unit=True))

    @property
    def terms(self) -> tuple[str, ...]:
        return ("cross_entropy", "prototypes") if self.weight else ()

    def objective(self, client: Client, message: Message) -> Objective:
        """Cross-entropy, and that of cosines to the prototypes, to which log pi of the true class is added."""
        if not self.weight:
            return super().objective(client, message)
        model, directions = client.model, F.normalize(message["means"], dim=1)
        held = message["present"] & (client.counts > 0)                         # other classes have the cosine 0
        log_pi = torch.where(held, message["pi"], 1.0).log()                    # [C]

        @recordable
        def terms(batch: Batch) -> dict[str, Tensor]:
            z = model.encoder(batch.x)                                          # [B, d]
            cosines = F.normalize(z, dim=1) @ directions.T * held / self.tau    # [B, C]
            shifted = cosines + F.one_hot(batch.y, len(log_pi)) * log_pi
            return {"cross_entropy": F.cross_entropy(model.classifier(z), batch.y),
                    "prototypes": self.weight * F.cross_entropy(shifted, batch.y)}

        return Terms(client, terms)

    def train(self, client: Client, message: Message) -> Reply:
        """Local training; in a last round a copy of the classifier then learns from features mixed with prototypes,
        those of the encoder that was received."""
        client.receive(message["model"])
        z = features(client)[0] if message["retrain"] else None
        objective = self.objective(client, message)
        parts = {"loss": sgd(client, objective)} | reply_of(objective, self.terms)
        if z is not None:
            own = client.model.classifier.state_dict()
            classifier = linear(own["weight"].clone(), own["bias"].clone())
            parts["retrain_loss"] = fit_classifier(
                classifier, *self.mixed(z, message, client.order), epochs=self.epochs, batch=self.batch, lr=self.lr,
                momentum=0.0, weight_decay=0.0, schedule="constant",
                seed=seed_for(client.config.seed, "retrain", client.round, client.id))
            parts["classifier"] = classifier.state_dict()
        return client.reply(model=self.shared(client.model), **parts)

    def mixed(self, z: Tensor, message: Message, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """lam P_c + (1 - lam) z / |z| with z at random, `size` for each class with a prototype; and their classes."""
        classes = message["present"].nonzero().flatten()
        y = classes.repeat_interleave(self.size)
        rows = torch.randint(len(z), (len(y),), generator=generator).to(z.device)
        lam = self.lam_low + (self.lam_high - self.lam_low) * torch.rand(len(y), 1, generator=generator)
        lam = lam.to(z.device)
        return lam * message["means"][y] + (1 - lam) * F.normalize(z[rows], dim=1), y

    # at the server

    def round(self, server: Server, fleet: Fleet) -> None:
        retrain = server.round > server.rounds - self.rounds
        cohort = self.sample(server, fleet)
        message = self.message(server) | {"retrain": int(retrain)}
        message |= self.global_prototypes(server, fleet, fleet.everyone if retrain else cohort)         # [3]
        parts = {"model": mean.like(message["model"]), "loss": mean.like(0.0)} | asked_for(self.terms)
        if retrain:
            parts |= {"retrain_loss": mean.like(0.0), "classifier": mean.like(server.model.classifier.state_dict())}
        got = fleet.ask(self.train, cohort, message, **parts)
        server.step(got["model"])
        server.log(loss=got["loss"], **figure_of(got))
        if retrain:
            server.state["classifier"] = got["classifier"]
            server.log(retrain_loss=got["retrain_loss"])

    def global_prototypes(self, server: Server, fleet: Fleet, cohort: Cohort | list[int]) -> Message:
        """P float32 [C, d], which classes have one, bool [C], and pi [C], the classes' shares of the samples."""
        of_class = {"n": 1, "z": torch.empty(server.model.dim, device="meta")}
        like = dict.fromkeys(range(server.model.classes), of_class)
        message = {"encoder": tree.snapshot(server.model.entries("encoder."))}
        classes = fleet.ask(self.prototypes, cohort, message, classes=total.within(like))["classes"]
        counts = torch.tensor([classes[c]["n"] if c in classes else 0 for c in like], dtype=torch.float64)
        return pooled_means(classes, server.model.classes) | {"pi": (counts / counts.sum()).float()}

    def global_model(self, server: Server) -> SplitModel:
        if "classifier" not in server.state:
            return server.model
        return with_classifier(server.model, **tree.to(server.state["classifier"], server.device))
