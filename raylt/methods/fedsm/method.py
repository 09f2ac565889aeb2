"""FedSM (semantic mixup): distillation from an image-text teacher, classifiers re-trained on features mixed with global
prototypes (Zhang et al., IEEE Internet of Things Journal 2026 and AAAI 2026).

Not the personalised FedSM for medical images. Equation numbers are those of the journal. Departures from the text, each
marked at its line:
[1] q of Eq. 1 is scaled by 100, CLIP's own logit scale, and the KL term has temperature 3 and the factor T^2, as in the
    authors' code: softmax over bare cosines is nearly uniform.
[2] Teacher features do not depend on augmentation, so they are encoded once; they stay at the client in half precision.
[3] Prototypes are those of the global encoder as the round begins, over all clients: g of Eq. 3 is called local, but
    most clients that it sums over train nothing in a round, and features of several encoders have no common mean.
[4] alpha of Eq. 5 is clipped at 0 and sums to 1 over the classes that a client owns; a class's similarity with itself
    is the mean of its row (code). L1 and L2 become 1 / (1 + distance).
[5] A class without a prototype, as nobody that answered holds it, gets no pseudo-features.
[6] Fine-tuning (IV-C.2): each client trains the projection of its own teacher's image tower, keeps it and never uploads
    it; the paper leaves open whose it is. Rate and margin are CLIPood's. "MSE" is half the sum of
    squares, as in the paper's reference for it (FitNets); its weight is ours.
[7] Underscores in class names become spaces.
`preset=official` takes what the authors' code does otherwise (`OFFICIAL`): new classifiers are trained after averaging
and judged, but never fed back. Fields given besides it win. Not taken: prototypes under BatchNorm's batch statistics,
lambdas of two decimals, classifiers weighted by other clients' sizes, and the report of the best test accuracy.
"""

from typing import Any, ClassVar, Literal

import torch
from pydantic import field_validator, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from raylt import tree
from raylt.config import Config
from raylt.core.client import Client, Message, Reply
from raylt.core.features import features
from raylt.core.fitting import fit_classifier
from raylt.core.fleet import Fleet
from raylt.core.method import Method
from raylt.core.reductions import mean, total
from raylt.core.server import Server
from raylt.core.training import Objective, sgd
from raylt.data.samples import Batch
from raylt.data.task import Task
from raylt.errors import ConfigError
from raylt.hyper import Choice, LogUniform, Uniform, hp
from raylt.methods.fedsm.losses import distillation, hint
from raylt.methods.fedsm.mixup import Partner, Similarity, Unit, draw_partners, mix_features, relevance, total_variation
from raylt.methods.fedsm.teaching import Projection, encoded
from raylt.models.clip import open_teacher
from raylt.models.split import SplitModel, with_classifier
from raylt.models.teacher import Wording
from raylt.ops.moments import class_means, pooled_means
from raylt.seeds import seed_for

# 91 rounds: the code's option is 90, and its comparison adds one
OFFICIAL: dict[str, Any] = {"retrain": "after", "norm": "l2", "wording": "label", "unit": "sample", "lam_low": 0.35,
                            "lam_high": 0.95, "rounds": 91, "epochs": 60, "batch": 256}


class FedSM(Method):
    """Table III: `partner=deterministic`, `partner=random`; Table IV: `finetune=true`; Table V: `lam_low=lam_high=0.8`.
    Without mixup: `rounds=0`; without distillation: `kd=0`; without a teacher: `teacher=none`."""

    name: ClassVar[str] = "fedsm"
    paper: ClassVar[str] = "Zhang et al., IoT-J 2026, AAAI 2026 (semantic mixup)"

    preset: Literal["paper", "official"] = hp("paper", Choice("paper", "official"), "official: as the authors' code")
    teacher: str = hp("ViT-B-32/openai", Choice("ViT-B-32/openai", "ViT-B-32/metaclip_400m", "none"), "open_clip's "
                      "MODEL/TAG[:FILE], local-dir:FOLDER or npz:FILE; none: no distillation, uniform relevance")
    kd: float = hp(1.0, Uniform(0.0, 2.0), "weight of the KL term, Eq. 1", ge=0)
    temperature: float = hp(3.0, LogUniform(0.5, 10), "T of the KL term; from the code", gt=0)
    scale: float = hp(100.0, LogUniform(10, 200), "of q, Eq. 1, and of fine-tuning's logits; CLIP's", gt=0)
    similarity: Similarity = hp("cosine", Choice("cosine", "dot", "l1", "l2"), "of two class names, Eq. 5, Fig. 4")
    softmax: float | None = hp(None, Choice(None, 0.05, 0.1, 1.0), "temperature of Nonlinear, Eq. 5; None: none", gt=0)
    wording: Wording = hp("phrase", Choice("phrase", "label"), "of the texts of Eq. 5")
    partner: Partner = hp("probabilistic", Choice("probabilistic", "deterministic", "random"), "v of Eq. 4, Table III")
    unit: Unit = hp("class", Choice("class", "sample"), "what alpha weights: classes, or samples by their class (code)")
    lam_low: float = hp(0.65, Uniform(0.2, 0.8), "smallest lambda, Eq. 4, Table V", ge=0, le=1)
    lam_high: float = hp(0.9, Uniform(0.8, 1.0), "largest lambda, Eq. 4, Table V", ge=0, le=1)
    size: int = hp(100, Choice(50, 100, 150, 200), "S, pseudo-features per class, Eq. 6, Fig. 5", ge=1)
    norm: Literal["none", "l2"] = hp("none", Choice("none", "l2"), "of features and prototypes that are mixed")
    retrain: Literal["before", "after"] = hp("before", Choice("before", "after"), "local classifiers, before they are "
                                             "averaged, Algorithm 1; or new ones after it, only to be judged (code)")
    rounds: int = hp(50, Choice(20, 50, 90), "last rounds, in which classifiers are re-trained, Algorithm 1", ge=0)
    epochs: int = hp(50, Choice(10, 50, 100), "of re-training, Fig. 5", ge=0)
    batch: int = hp(32, Choice(32, 64, 256), "of re-training, IV-A", ge=1)
    lr: float = hp(0.01, LogUniform(1e-3, 0.1), "of re-training, IV-A", gt=0)
    finetune: bool = hp(False, Choice(True, False), "the teacher's projection, its features matched, Table IV")
    squares: float = hp(1.0, LogUniform(0.1, 10), "weight of 1/2 ||z - u||^2 when fine-tuning; not stated", ge=0)
    target: Literal["unit", "raw"] = hp("unit", Choice("unit", "raw"), "u of fine-tuning: of length 1, or as it is")
    margin: float = hp(0.3, Uniform(0.0, 0.5), "of Margin Metric Softmax; CLIPood's", ge=0)
    teacher_lr: float = hp(5e-6, LogUniform(1e-6, 1e-4), "of AdamW when fine-tuning; CLIPood's", gt=0)

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, fields: dict[str, Any]) -> dict[str, Any]:
        return OFFICIAL | fields if fields.get("preset") == "official" else fields

    @field_validator("teacher")
    @classmethod
    def _absolute(cls, name: str) -> str:
        return name if name == "none" else open_teacher(name).name

    @property
    def distils(self) -> bool:
        """Whether image features of the teacher are needed."""
        return self.teacher != "none" and (self.finetune or self.kd > 0)

    @property
    def wordings(self) -> set[Wording]:
        """Of the class names that the teacher is asked for."""
        return {"phrase", self.wording} if self.distils or (self.teacher != "none" and self.rounds > 0) else set()

    def prepare(self, task: Task, config: Config, model: SplitModel) -> None:
        if self.lam_low > self.lam_high:
            raise ConfigError(f"method.lam_low = {self.lam_low:g}, method.lam_high = {self.lam_high:g}: swap them")
        if self.teacher == "none" and (self.finetune or (self.partner == "deterministic" and self.rounds > 0)):
            what = "method.finetune=true" if self.finetune else "method.partner=deterministic"
            raise ConfigError(f"method.teacher = none: {what} needs a teacher; name one, as ViT-B-32/openai")
        if self.wordings:
            open_teacher(self.teacher).check(task, self.wordings, model.dim if self.finetune else None)

    # at a client

    def join(self, client: Client, message: Message) -> Reply:
        client.state = dict(message)
        if self.distils:
            encoded(client, self.teacher, not self.finetune)    # [2]
        return client.reply()

    def text(self, client: Client, wording: Wording) -> Tensor:
        """Text features [C, d] that the client got when it joined, on the CPU."""
        if wording not in client.state:
            raise RuntimeError("this client did not take part in FedSM.join, so it has no text features")
        return client.state[wording]

    def objective(self, client: Client, message: Message) -> Objective:
        """Eq. 1; when fine-tuning, the square error to the teacher's features in place of the KL term, IV-C.2."""
        if not self.distils:
            return super().objective(client, message)
        model, e = client.model, encoded(client, self.teacher, not self.finetune)       # [n, w]
        text = F.normalize(self.text(client, "phrase"), dim=1).to(client.device)        # [C, d]
        if self.finetune:
            projection = Projection(client, self.teacher, self.teacher_lr, self.target == "unit")    # [6]

            def loss(batch: Batch) -> Tensor:
                u, z = projection.step(e[batch.rows], batch.y, text, self.margin, self.scale), model.encoder(batch.x)
                return F.cross_entropy(model.classifier(z), batch.y) + self.squares * hint(z, u)
        else:
            log_q = (self.scale * e.float() @ text.T / self.temperature).log_softmax(1)         # [n, C] [1]

            def loss(batch: Batch) -> Tensor:
                logits = model(batch.x)
                kl = distillation(logits, log_q[batch.rows], self.temperature)
                return F.cross_entropy(logits, batch.y) + self.kd * kl

        return loss

    def prototypes(self, client: Client, message: Message) -> Reply:
        """n_c^k f_c^k and n_c^k of each class that the client holds, Eq. 3."""
        client.receive(message["encoder"])
        return client.reply(classes=class_means(*features(client), self.norm == "l2"))

    def train_and_retrain(self, client: Client, message: Message) -> Reply:
        """Algorithm 1, lines 5 to 11: local training, then the classifier learns from pseudo-features."""
        client.receive(message["model"])
        loss = sgd(client, self.objective(client, message))
        retrain_loss = self.fit(client, client.model.classifier, message)
        return client.reply(model=self.shared(client.model), loss=loss, retrain_loss=retrain_loss)

    def refit(self, client: Client, message: Message) -> Reply:
        """`retrain=after`: a new classifier for the averaged encoder."""
        client.receive(message["encoder"])
        classifier = nn.Linear(client.model.dim, client.model.classes).to(client.device)
        loss = self.fit(client, classifier, message)
        return client.reply(classifier=classifier.state_dict(), retrain_loss=loss)

    def fit(self, client: Client, classifier: nn.Module, message: Message) -> float:
        """Eq. 7 on pseudo-features under the client's encoder as it is; the loss of the last epoch."""
        return fit_classifier(
            classifier, *self.pseudo_features(client, message), epochs=self.epochs, batch=self.batch, lr=self.lr,
            momentum=0.0, weight_decay=0.0, schedule="constant",
            seed=seed_for(client.config.seed, "retrain", client.round, client.id))

    def pseudo_features(self, client: Client, message: Message) -> tuple[Tensor, Tensor]:
        """R^k of Eq. 6, [S P, d], and its labels: of the P classes that have a prototype [5]."""
        (z, y), classes = features(client), message["present"].nonzero().flatten()      # [n, d], [n], [P]
        alpha = torch.ones(2 * [client.model.classes])
        if self.wordings:
            alpha = relevance(self.text(client, self.wording), self.similarity, self.softmax)   # Eq. 5 [4] [7]
        rows = draw_partners(alpha, classes.cpu(), y.cpu(), self.size, self.partner, self.unit, client.order)  # [P, S]
        lam = self.lam_low + (self.lam_high - self.lam_low) * torch.rand(rows.shape, generator=client.order)
        z = F.normalize(z, dim=1) if self.norm == "l2" else z
        r = mix_features(z[rows.to(z.device)], message["means"][classes], lam.to(z.device))        # Eq. 4
        return r.flatten(0, 1), classes.repeat_interleave(self.size)

    # at the server

    def start(self, server: Server, fleet: Fleet) -> None:
        message: Message = {}
        server.state |= {"teacher": "none: no distillation, uniform relevance", "relevance": 0.0}
        if self.wordings:
            teacher, names = open_teacher(self.teacher), server.facts.class_names
            message = {wording: teacher.text(names, wording, server.device) for wording in sorted(self.wordings)}
            server.state["teacher"] = teacher.about
            server.state["relevance"] = total_variation(
                relevance(message[self.wording].cpu(), self.similarity, self.softmax))
        fleet.ask(self.join, fleet.everyone, message)

    def round(self, server: Server, fleet: Fleet) -> None:
        """Algorithm 1: in the last rounds the prototypes are taken first [3]; with `retrain=after`, last.

        The figure `relevance` is its total variation from uniform: near 0 it cannot matter."""
        server.log(teacher=server.state["teacher"], relevance=server.state["relevance"])
        retrain = self.retrain if server.round > server.rounds - self.rounds else None
        cohort, message = self.sample(server, fleet), self.message(server)
        model, loss = mean.like(message["model"]), mean.like(0.0)
        if retrain == "before":
            message |= self.global_prototypes(server, fleet)
            got = fleet.ask(self.train_and_retrain, cohort, message, model=model, loss=loss, retrain_loss=loss)
            server.log(retrain_loss=got["retrain_loss"])
        else:
            got = fleet.ask(self.train, cohort, message, model=model, loss=loss)
        server.step(got["model"])
        server.log(loss=got["loss"])
        if retrain == "after":
            message = encoder(server.model) | self.global_prototypes(server, fleet)
            like = nn.Linear(server.model.dim, server.model.classes, device="meta").state_dict()
            got = fleet.ask(self.refit, cohort, message, classifier=mean.like(like), retrain_loss=loss)
            server.state["classifier"] = got["classifier"]
            server.log(retrain_loss=got["retrain_loss"])

    def global_prototypes(self, server: Server, fleet: Fleet) -> Message:
        """z^global of Eq. 3, float32 [C, d], and which classes have one, bool [C]."""
        model = server.model
        of_class = {"n": 1, "z": torch.empty(model.dim, device="meta")}
        got = fleet.ask(self.prototypes, fleet.everyone, encoder(model),
                        classes=total.within(dict.fromkeys(range(model.classes), of_class)))
        return pooled_means(got["classes"], model.classes)

    # what is judged

    def global_model(self, server: Server) -> SplitModel:
        if "classifier" not in server.state:
            return server.model
        return with_classifier(server.model, **tree.to(server.state["classifier"], server.device))


def encoder(model: SplitModel) -> Message:
    """The entries of the encoder that travel."""
    return {"encoder": tree.snapshot(model.entries("encoder."))}
