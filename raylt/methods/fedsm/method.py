"""FedSM (semantic mixup): distillation from an image-text teacher, and classifiers re-trained on features mixed with
global prototypes (Zhang et al., IEEE Internet of Things Journal 2026 and AAAI 2026).

This is not the personalised FedSM for medical images. Equation numbers are the journal's. Departures from the text,
each marked at its line:
[1] q of Eq. 1 is scaled by 100, CLIP's own logit scale, and the KL term has temperature 3 and the factor T^2, as in the
    authors' code: a softmax over bare cosines is nearly uniform.
[2] Teacher features do not depend on augmentation, so they are encoded once and kept at the client in half precision.
[3] Prototypes are computed by the global encoder at the start of the round, over all clients. The paper calls g of
    Eq. 3 local, but most clients in its sum do not train in a round, and features of several encoders have no common
    mean. With `encoders=trained` each of the round's clients computes them with the encoder that it has trained.
[4] alpha of Eq. 5 is clipped at 0 and sums to 1 over the classes that a client owns. A class's similarity with itself
    is the mean of its row, including itself (code). L1 and L2 become 1 / (1 + distance). Texts have length 1 before
    any similarity, as in the code on which FedSM's is based, so `dot` is `cosine`. With `texts=raw` they keep the
    teacher's lengths, on which all but the cosine depend: with L1 a class then draws itself in half of all cases.
    III-D.2 says that a client "ranks its available categories": `partner=ranked` draws by ranks, not by similarities.
[5] A class without a prototype, because no client that replied owns it, gets no pseudo-features.
[6] Fine-tuning (IV-C.2): each client trains its own copy of the teacher's projection, or of its image encoder [10],
    and keeps it; the paper does not say who trains it. Learning rate and margin are CLIPood's. "MSE" is half the sum of
    squares, as in FitNets, the paper's reference for it; its weight is ours.
[7] Underscores in class names become spaces.
[8] `partner=inverted` is our control: it undoes the effect of relevance. `partner=deterministic` leaves out the class
    itself. `partner=random unit=sample` draws samples, so frequent classes are drawn more often: "w/o SR" of the code
    on which FedSM's is based.
[9] Table V's "lambda = X" is read as a constant here. The code on which FedSM's is based sweeps the lower end of
    U(X, 0.95) over the same grid: `lam_low=X lam_high=0.95`.
[10] Table IV's baseline is FedSM itself, with a teacher that is not fine-tuned. The paper trains the image encoder:
    `teacher_trains=encoder`. By default only the projection is trained, whose inputs are encoded once.
`preset=official` uses the settings of the authors' code (`OFFICIAL`): new classifiers are trained after averaging and
evaluated, but not used in later rounds. Other given fields override it. It leaves out prototypes with BatchNorm's batch
statistics, lambdas of two decimals, classifiers weighted by other clients' sizes, and reporting the best test accuracy.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from pydantic import field_validator, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from raylt import tree
from raylt.config import Config
from raylt.core.client import Client, Message, Reply
from raylt.core.fleet.fleet import Fleet
from raylt.core.fleet.reductions import Reduction, mean, total
from raylt.core.method import Method, train_model
from raylt.core.server import Server
from raylt.core.training.estimates import fit_time
from raylt.core.training.features import features, teacher_features
from raylt.core.training.fit_classifier import fit_classifier
from raylt.core.training.loss_terms import Terms, shares_figure, shares_reduction
from raylt.core.training.sgd import Objective
from raylt.data.samples import Batch
from raylt.data.task import Task, TaskSpec
from raylt.errors import ConfigError
from raylt.hyper import Choice, LogUniform, Uniform, check_ends, hp
from raylt.methods.fedsm.losses import Projection, hint, projection_of
from raylt.methods.fedsm.mixup import Partner, Similarity, Unit, draw_partners, mix_features, relevance, total_variation
from raylt.methods.fedsm.monitors import drift, first_rows, some_features, teacher_cosine, teacher_counts, zero_shot
from raylt.methods.fedsm.tower import ImageTower
from raylt.models.clip import open_teacher
from raylt.models.layers import check_linear_classifier
from raylt.models.split import SplitModel, with_classifier
from raylt.models.teacher import TrainedPart, Wording
from raylt.ops.distillation import distillation
from raylt.ops.moments import pooled_means, sums_fault, weighted_class_means
from raylt.recordability import not_recordable
from raylt.seeds import seed_for
from raylt.tree import Tree

# 91 rounds: the code's option is 90, and its comparison adds one.
OFFICIAL: dict[str, Any] = {
    "retrain": "after",
    "norm": "l2",
    "wording": "label",
    "unit": "sample",
    "lam_low": 0.35,
    "lam_high": 0.95,
    "retrain_rounds": 91,
    "retrain_epochs": 60,
    "retrain_batch": 256,
}


class FedSM(Method):
    """FedAvg with an image-text teacher, and classifiers re-trained on features mixed with global prototypes.

    Table III: `partner=deterministic`, `partner=random`. Table IV: `finetune=true teacher_trains=encoder`. Table V:
    `lam_low=lam_high=0.8`, or, by the code, `lam_low=0.8 lam_high=0.95`.
    Without mixup: `retrain_rounds=0`; without distillation: `kd=0`; without a teacher: `teacher=none`. Sources:
    equation, table and figure numbers are the journal's.
    """

    name: ClassVar[str] = "fedsm"
    paper: ClassVar[str] = "Zhang et al., IoT-J 2026, AAAI 2026 (semantic mixup)"
    later: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "retraining": (
            "similarity",
            "texts",
            "softmax",
            "partner",
            "unit",
            "lam_low",
            "lam_high",
            "size",
            "norm",
            "retrain",
            "encoders",
            "retrain_rounds",
            "retrain_epochs",
            "retrain_batch",
            "retrain_lr",
        )
    }

    preset: Literal["paper", "official"] = hp(
        "paper", Choice("paper", "official"), "preset fields; official: as in the authors' code"
    )
    teacher: str = hp(
        "ViT-B-32/openai",
        Choice("ViT-B-32/openai", "ViT-B-32/metaclip_400m", "none"),
        "open_clip's MODEL/TAG[:FILE], local-dir:FOLDER or npz:FILE; none: no distillation, uniform relevance",
    )
    kd: float = hp(1.0, Uniform(0.0, 2.0), "weight of the KL term, Eq. 1", ge=0)
    temperature: float = hp(3.0, LogUniform(0.5, 10), "temperature T of the KL term; from the code", gt=0)
    scale: float = hp(100.0, LogUniform(10, 200), "logit scale of q, Eq. 1, and of fine-tuning's logits; CLIP's", gt=0)
    similarity: Similarity = hp(
        "cosine", Choice("cosine", "dot", "l1", "l2"), "similarity of two class names, Eq. 5, Fig. 4"
    )
    texts: Literal["unit", "raw"] = hp(
        "unit", Choice("unit", "raw"), "length of the text features of Eq. 5: 1, or unchanged"
    )
    softmax: float | None = hp(
        None, Choice(None, 0.02, 0.05, 0.1, 1.0), "temperature of Nonlinear, Eq. 5; None: none", gt=0
    )
    wording: Wording = hp("phrase", Choice("phrase", "label"), "wording of the texts of Eq. 5")
    partner: Partner = hp(  # [8]
        "probabilistic",
        Choice("probabilistic", "ranked", "deterministic", "random", "inverted"),
        "draw of v in Eq. 4, Table III; ranked: by the rank of its relevance; inverted: the least similar most often, "
        "a control",
    )
    unit: Unit = hp(
        "class", Choice("class", "sample"), "units that alpha weights: classes, or samples by their class (code)"
    )
    # [9]
    lam_low: float = hp(0.65, Uniform(0.2, 0.8), "minimum of lambda, Eq. 4, Table V", ge=0, le=1)
    lam_high: float = hp(0.9, Uniform(0.8, 1.0), "maximum of lambda, Eq. 4, Table V", ge=0, le=1)
    size: int = hp(100, Choice(50, 100, 150, 200), "S, pseudo-features per class, Eq. 6, Fig. 5", ge=1)
    norm: Literal["none", "l2"] = hp(
        "none", Choice("none", "l2"), "normalisation of the features and prototypes before mixing"
    )
    retrain: Literal["before", "after"] = hp(
        "before",
        Choice("before", "after"),
        "classifiers to re-train: local ones before averaging, Algorithm 1; or new ones after it, for evaluation "
        "only (code)",
    )
    encoders: Literal["global", "trained"] = hp(
        "global",
        Choice("global", "trained"),
        "encoders of the prototypes of Eq. 3: the global one, over all clients, or the encoders that the round's "
        "clients have trained",
    )
    retrain_rounds: int = hp(
        50, Choice(20, 50, 90), "last rounds, in which classifiers are re-trained, Algorithm 1", ge=0
    )
    retrain_epochs: int = hp(50, Choice(10, 50, 100), "re-training epochs, Fig. 5", ge=0)
    retrain_batch: int = hp(32, Choice(32, 64, 256), "re-training batch size, IV-A", ge=1)
    retrain_lr: float = hp(0.01, LogUniform(1e-3, 0.1), "re-training learning rate, IV-A", gt=0)
    finetune: bool = hp(False, Choice(True, False), "fine-tuning of the teacher, whose features are matched, Table IV")
    teacher_trains: TrainedPart = hp(
        "projection",
        Choice("projection", "encoder"),
        "part of the teacher's image tower that fine-tuning trains: the projection, or the whole tower, IV-C.2",
    )
    squares: float = hp(1.0, LogUniform(0.1, 10), "weight of 1/2 ||z - u||^2 in fine-tuning; not stated", ge=0)
    target: Literal["unit", "raw"] = hp("unit", Choice("unit", "raw"), "length of u in fine-tuning: 1, or unchanged")
    margin: float = hp(0.3, Uniform(0.0, 0.5), "margin of Margin Metric Softmax; CLIPood's", ge=0)
    teacher_lr: float = hp(5e-6, LogUniform(1e-6, 1e-4), "learning rate of AdamW in fine-tuning; CLIPood's", gt=0)

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, fields: dict[str, Any]) -> dict[str, Any]:
        return OFFICIAL | fields if fields.get("preset") == "official" else fields

    @field_validator("teacher")
    @classmethod
    def _absolute(cls, name: str) -> str:
        return name if name == "none" else open_teacher(name, ", or none for uniform relevance").name

    def stages(self, rounds: int) -> dict[str, int]:
        return super().stages(rounds) | {"retraining": max(0, rounds - self.retrain_rounds)}

    @property
    def distils(self) -> bool:
        """Return whether the settings require the teacher's features of images."""
        return self.teacher != "none" and (self.finetune or self.kd > 0)

    @property
    def trains_projection(self) -> bool:
        """Return whether fine-tuning trains only the projection, so that the tower encodes each image only once."""
        return self.finetune and self.teacher_trains == "projection"

    @property
    def sees_images(self) -> bool:
        return self.distils and not self.teacher.startswith("npz:")

    @property
    def image_teacher(self) -> str | None:
        return None if self.finetune else self.teacher

    @property
    def wordings(self) -> set[Wording]:
        """Return the prompt wordings in which the teacher encodes the class names."""
        return (
            {"phrase", self.wording} if self.distils or (self.teacher != "none" and self.retrain_rounds > 0) else set()
        )

    def prepare(self, task: Task, config: Config, model: SplitModel) -> None:
        check_ends("lam_low", self.lam_low, "lam_high", self.lam_high)
        related = self.partner in ("ranked", "deterministic", "inverted") and self.retrain_rounds > 0
        if self.teacher == "none" and (self.finetune or related):
            field = "method.finetune=true" if self.finetune else f"method.partner={self.partner}"
            raise ConfigError(
                f"method.teacher: {field} needs a teacher (none). Give one, such as ViT-B-32/openai.",
                code="config.conflict",
                key="method.teacher",
                value="none",
            )
        if self.encoders == "trained" and self.retrain == "after":
            raise ConfigError(
                "method.encoders: method.retrain=after uses only the average of the clients' encoders (trained). "
                "Set method.encoders=global or method.retrain=before.",
                code="config.conflict",
                key="method.encoders",
                value="trained",
            )
        if self.retrain == "after" and self.retrain_rounds > 0:
            check_linear_classifier(self.name, config, model)
        if self.wordings:
            student = model.dim if self.finetune else None
            open_teacher(self.teacher).check(task, self.wordings, student, self.teacher_trains)

    # at a client

    def join(self, client: Client, message: Message) -> Reply:
        client.state = dict(message)
        if not self.distils:
            return client.reply()
        e = teacher_features(client, self.teacher, not self.trains_projection).float()  # [n, w] [2]
        u = e @ projection_of(client, self.teacher) if self.trains_projection else e
        return client.reply(teacher=teacher_counts(client, u @ self.unit_text(client).T))

    def unit_text(self, client: Client) -> Tensor:
        """Return the text features T of Eq. 1, [C, d], with rows of length 1, on the client's device."""
        return F.normalize(client.state["phrase"], dim=1).to(client.device)

    @property
    def uploads_more(self) -> bool:
        return True

    @property
    def terms(self) -> tuple[str, ...]:
        return ("cross_entropy", "hint" if self.finetune else "distillation") if self.distils else ()

    def objective(self, client: Client, message: Message) -> Objective:
        """Return the loss of Eq. 1. In fine-tuning, a squared error replaces the KL term (IV-C.2)."""
        if not self.distils:
            return super().objective(client, message)
        model = client.model
        text = self.unit_text(client)
        if self.finetune:
            tuned = self.tuned_teacher(client, text)

            @not_recordable  # each call takes a step of the teacher's optimiser
            def terms(batch: Batch) -> dict[str, Tensor]:
                u = tuned(batch)
                z = model.encoder(batch.x)
                return {
                    "cross_entropy": F.cross_entropy(model.classifier(z), batch.y),
                    "hint": self.squares * hint(z, u),
                }
        else:
            e = teacher_features(client, self.teacher)
            log_q = (self.scale * e.float() @ text.T / self.temperature).log_softmax(1)  # [n, C] [1]

            def terms(batch: Batch) -> dict[str, Tensor]:
                logits = model(batch.x)
                return {
                    "cross_entropy": F.cross_entropy(logits, batch.y),
                    "distillation": self.kd
                    * distillation(logits, log_teacher=log_q[batch.rows], temperature=self.temperature),
                }

        return Terms(client, terms)

    def tuned_teacher(self, client: Client, text: Tensor) -> Callable[[Batch], Tensor]:
        """Return a function that trains the client's teacher by one step on a batch [6] [10].

        The function returns the teacher's features [B, d] from before the step.

        Args:
            client: The client.
            text: Unit text features, [C, d].
        """
        unit = self.target == "unit"
        if self.teacher_trains == "encoder":
            tower = ImageTower(client, self.teacher, self.teacher_lr, unit)
            return lambda batch: tower.step(batch.rows, batch.y, text, self.margin, self.scale)
        e = teacher_features(client, self.teacher, False)
        projection = Projection(client, self.teacher, self.teacher_lr, unit)
        return lambda batch: projection.step(e[batch.rows], batch.y, text, self.margin, self.scale)

    def learn(self, client: Client, message: Message) -> Tree:
        """Train the received model; return the training metrics for the reply."""
        keep_texts(client, message)
        parts = train_model(self, client, message)
        if self.trains_projection:
            h = teacher_features(client, self.teacher, False)
            parts["cosine"] = teacher_cosine(client, h.float() @ projection_of(client, self.teacher))
        elif self.finetune:
            tower = ImageTower(client, self.teacher, self.teacher_lr, unit=False)
            with torch.no_grad():
                parts["cosine"] = teacher_cosine(client, tower.features(first_rows(client)))
        return parts

    def train(self, client: Client, message: Message) -> Reply:
        client.receive(message["model"])
        return client.reply(**self.learn(client, message), model=self.shared(client.model))

    def prototypes(self, client: Client, message: Message) -> Reply:
        """Report the feature sum n_c^k f_c^k and the sample count n_c^k of each class of the client, Eq. 3."""
        client.receive(message["encoder"])
        return client.reply(classes=self.class_sums(client))

    def class_sums_reduction(self, server: Server) -> Reduction:
        """Return the reduction that adds up the clients' feature sums by class.

        A client sends only the sums of its own classes.
        """
        of_class = {"n": 1, "z": torch.empty(server.model.dim, device="meta")}
        like = dict.fromkeys(range(server.model.classes), of_class)
        limits = server.feature_limits | ({"longest": 1.0} if self.norm == "l2" else {})
        return total.within(like).counting("n").over_samples(partial(sums_fault, **limits))

    def class_sums(self, client: Client) -> dict[int, Tree]:
        """Return the feature sum and sample count of each class of a client, under the client's current encoder."""
        return weighted_class_means(*features(client), self.norm == "l2")

    def train_and_retrain(self, client: Client, message: Message) -> Reply:
        """Train the model, then re-train its classifier on pseudo-features, Algorithm 1, lines 5 to 11."""
        client.receive(message["model"])
        before, y = some_features(client)
        parts = self.learn(client, message)
        parts["drift"] = drift(before, some_features(client)[0], y, message["means"][message["present"]])
        retrain_loss = self.fit(client, client.model.classifier, message)
        return client.reply(model=self.shared(client.model), retrain_loss=retrain_loss, **parts)

    def train_first(self, client: Client, message: Message) -> Reply:
        """Train the model, keep it for `retrain_next`, and report prototypes. Used with `encoders=trained`."""
        client.receive(message["model"])
        parts = self.learn(client, message)
        client.state["trained"] = tree.snapshot(self.shared(client.model))
        return client.reply(classes=self.class_sums(client), **parts)

    def retrain_next(self, client: Client, message: Message) -> Reply:
        """Re-train the classifier of the model from `train_first` on pseudo-features."""
        client.receive(client.state.pop("trained"))
        retrain_loss = self.fit(client, client.model.classifier, message)
        return client.reply(model=self.shared(client.model), retrain_loss=retrain_loss)

    def refit(self, client: Client, message: Message) -> Reply:
        """Train a new classifier for the averaged encoder. Used with `retrain=after`."""
        client.receive(message["encoder"])
        keep_texts(client, message)
        classifier = nn.Linear(client.model.dim, client.model.classes).to(client.device)
        loss = self.fit(client, classifier, message)
        return client.reply(classifier=classifier.state_dict(), retrain_loss=loss)

    def fit(self, client: Client, classifier: nn.Module, message: Message) -> float:
        """Fit a classifier to pseudo-features from the current encoder, Eq. 7; return the loss of the last epoch."""
        return fit_classifier(
            classifier,
            *self.pseudo_features(client, message),
            epochs=self.retrain_epochs,
            batch=self.retrain_batch,
            lr=self.retrain_lr,
            momentum=0.0,
            weight_decay=0.0,
            schedule="constant",
            seed=seed_for(client.config.seed, "retrain", client.round, client.id),
        )

    def last_phase(self, spec: TaskSpec, model: SplitModel) -> str:
        if not self.retrain_rounds:
            return ""
        count = self.size * spec.classes
        duration = fit_time(model.dim, spec.classes, count, self.retrain_epochs, self.retrain_batch)
        return (
            f"re-training at the clients in the last {self.retrain_rounds} rounds, on up to {count} pseudo-features "
            f"in {self.retrain_epochs} epochs, {duration} for each client and round"
        )

    def pseudo_features(self, client: Client, message: Message) -> tuple[Tensor, Tensor]:
        """Return the pseudo-features R^k, [S P, d], of the P classes with a prototype, and their labels, Eq. 6 [5]."""
        z, y = features(client)  # [n, d], [n]
        classes = message["present"].nonzero().flatten()  # [P]
        uniform = torch.ones(2 * [client.model.classes])
        alpha = self.alpha(client.state[self.wording]) if self.wordings else uniform  # Eq. 5 [4] [7]
        rows = draw_partners(alpha, classes.cpu(), y.cpu(), self.size, self.partner, self.unit, client.order)  # [P, S]
        lam = self.lam_low + (self.lam_high - self.lam_low) * torch.rand(rows.shape, generator=client.order)
        z = F.normalize(z, dim=1) if self.norm == "l2" else z
        r = mix_features(z[rows.to(z.device)], message["means"][classes], lam.to(z.device))  # Eq. 4
        return r.flatten(0, 1), classes.repeat_interleave(self.size)

    def alpha(self, text: Tensor) -> Tensor:
        """Return the class relevance matrix alpha of Eq. 5, [C, C]."""
        text = F.normalize(text, dim=1) if self.texts == "unit" else text  # [4]
        return relevance(text, self.similarity, self.softmax, self.partner == "inverted")

    # at the server

    def start(self, server: Server, fleet: Fleet) -> None:
        message: Message = {}
        server.state["teacher"] = "none: no distillation, uniform relevance"
        if self.wordings:
            teacher = open_teacher(self.teacher)
            names = server.spec.class_names
            message = {wording: teacher.text(names, wording, server.device) for wording in sorted(self.wordings)}
            server.state["teacher"] = teacher.about
            server.state["text"] = message[self.wording]
        parts: dict[str, Reduction] = {}
        if self.distils:
            counts = torch.empty(server.model.classes, dtype=torch.int64, device="meta")
            parts["teacher"] = total.like({"n": counts, "right": counts}).counting("n").where(teacher_counts_fault)
        got = fleet.ask(self.join, fleet.everyone, message, **parts)
        if self.distils:
            server.state["teacher_accuracy"] = zero_shot(**got["teacher"], thresholds=server.spec.thresholds)
        if len(got.weights) < len(fleet.ids):
            server.state["late_texts"] = message

    def message(self, server: Server) -> Message:
        return super().message(server) | late_texts(server)

    def round(self, server: Server, fleet: Fleet) -> None:
        """Run one round of Algorithm 1.

        In the last rounds, prototypes are computed first, or between training and re-training [3]. With `retrain=after`
        they are computed last.
        """
        text = server.state.get("text")
        server.log(
            relevance=0.0 if text is None else total_variation(self.alpha(text)),
            **{name: server.state[name] for name in ("teacher", "teacher_accuracy") if name in server.state},
        )
        retrain = self.retrain if server.round > server.rounds - self.retrain_rounds else None
        cohort = self.sample(server, fleet)
        message = self.message(server)
        model = mean.like(message["model"])
        number = mean.like(0.0)
        parts = {"loss": number} | shares_reduction(self.terms) | ({"cosine": number} if self.finetune else {})
        if retrain == "before" and self.encoders == "global":
            message |= self.global_prototypes(server, fleet)
            got = trained = fleet.ask(
                self.train_and_retrain, cohort, message, model=model, retrain_loss=number, drift=number, **parts
            )
        elif retrain == "before":
            trained = fleet.ask(self.train_first, cohort, message, classes=self.class_sums_reduction(server), **parts)
            got = fleet.ask(
                self.retrain_next,
                list(trained.weights),
                pooled_means(trained["classes"], server.model.classes),
                model=model,
                retrain_loss=number,
            )
        else:
            got = trained = fleet.ask(self.train, cohort, message, model=model, **parts)
        server.step(got["model"])
        if retrain == "after":
            message = encoder(server.model) | self.global_prototypes(server, fleet) | late_texts(server)
            got = fleet.ask(
                self.refit,
                cohort,
                message,
                retrain_loss=number,
                classifier=mean.like(server.model.classifier.state_dict()),
            )
            server.state["classifier"] = got["classifier"]
        server.log(
            **{name: trained[name] for name in ("loss", "cosine", "drift") if name in trained},
            **shares_figure(trained),
            **({"retrain_loss": got["retrain_loss"]} if retrain else {}),
        )

    def global_prototypes(self, server: Server, fleet: Fleet) -> Message:
        """Return the global prototypes z^global, float32 [C, d], and a mask, bool [C], of classes with one, Eq. 3."""
        got = fleet.ask(
            self.prototypes, fleet.everyone, encoder(server.model), classes=self.class_sums_reduction(server)
        )
        return pooled_means(got["classes"], server.model.classes)

    # evaluated models

    def global_model(self, server: Server) -> SplitModel:
        if "classifier" not in server.state:
            return server.model
        return with_classifier(server.model, **tree.to(server.state["classifier"], server.device))


def encoder(model: SplitModel) -> Message:
    """Return the encoder's parameters and buffers as a message for clients."""
    return {"encoder": tree.snapshot(model.entries("encoder."))}


def late_texts(server: Server) -> Message:
    """Return the text features as a part of a message, if a client was lost when the others received them."""
    return {"texts": server.state["late_texts"]} if "late_texts" in server.state else {}


def keep_texts(client: Client, message: Message) -> None:
    """Keep the text features of a message, if it has any, as `FedSM.join` does."""
    client.state |= tree.to(message.get("texts", {}), torch.device("cpu"))


def teacher_counts_fault(teacher: Tree) -> str | None:
    """Return a message if the teacher's correct predictions at a client outnumber the samples, otherwise None."""
    return "has more correct predictions than samples" if (teacher["right"] > teacher["n"]).any() else None
