"""FedSM (semantic mixup): distillation from an image-text teacher, classifiers re-trained on features mixed with global
prototypes (Zhang et al., IEEE Internet of Things Journal 2026 and AAAI 2026).

Not the personalised FedSM for medical images. Equation numbers are those of the journal. Departures from the text, each
marked at its line:
[1] q of Eq. 1 is scaled by 100, CLIP's own logit scale, and the KL term has temperature 3 and the factor T^2, as in the
    authors' code: softmax over bare cosines is nearly uniform.
[2] Teacher features do not depend on augmentation, so they are encoded once; they stay at the client in half precision.
[3] Prototypes are those of the global encoder as the round begins, over all clients: g of Eq. 3 is called local, but
    most clients that it sums over train nothing in a round, and features of several encoders have no common mean.
    `encoders=trained`: each of the round's clients takes its own under the encoder that it has trained.
[4] alpha of Eq. 5 is clipped at 0 and sums to 1 over the classes that a client owns; a class's similarity with itself
    is the mean of its row (code). L1 and L2 become 1 / (1 + distance).
[5] A class without a prototype, as nobody that answered holds it, gets no pseudo-features.
[6] Fine-tuning (IV-C.2): each client trains the projection of its own teacher's image tower and keeps it; the paper
    leaves open whose it is. Rate and margin are CLIPood's. "MSE" is half the sum of squares, as in FitNets, the
    paper's reference for it; its weight is ours.
[7] Underscores in class names become spaces. [8] `partner=inverted` is our control: what relevance does, it undoes.
`preset=official` takes what the authors' code does otherwise (`OFFICIAL`): new classifiers are trained after averaging
and judged, but never fed back. Fields given besides it win. Not taken: prototypes under BatchNorm's batch statistics,
lambdas of two decimals, classifiers weighted by other clients' sizes, and the report of the best test accuracy.
"""

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from raylt import tree
from raylt.core.client import Client, Message, Reply
from raylt.core.features import features
from raylt.core.fitting import fit_classifier
from raylt.core.fleet import Fleet
from raylt.core.reductions import Reduction, mean, total
from raylt.core.server import Server
from raylt.core.teaching import encoded
from raylt.core.terms import Terms, asked_for, figure_of, reply_of
from raylt.core.training import Objective, sgd
from raylt.data.samples import Batch
from raylt.data.sources import group_thresholds
from raylt.methods.fedsm.fields import Fields
from raylt.methods.fedsm.losses import hint
from raylt.methods.fedsm.mixup import draw_partners, mix_features, relevance, total_variation
from raylt.methods.fedsm.monitors import answers, drift, some_features, towards, zero_shot
from raylt.methods.fedsm.teaching import Projection, projection_of
from raylt.models.clip import open_teacher
from raylt.models.split import SplitModel, with_classifier
from raylt.models.teacher import Wording
from raylt.ops.distillation import distillation
from raylt.ops.moments import class_means, pooled_means
from raylt.recordable import recordable
from raylt.seeds import seed_for
from raylt.tree import Tree


class FedSM(Fields):
    """Table III: `partner=deterministic`, `partner=random`; Table IV: `finetune=true`; Table V: `lam_low=lam_high=0.8`.
    Without mixup: `rounds=0`; without distillation: `kd=0`; without a teacher: `teacher=none`."""

    name: ClassVar[str] = "fedsm"
    paper: ClassVar[str] = "Zhang et al., IoT-J 2026, AAAI 2026 (semantic mixup)"

    # at a client

    def join(self, client: Client, message: Message) -> Reply:
        client.state = dict(message)
        if not self.distils:
            return client.reply()
        e = encoded(client, self.teacher, not self.finetune).float()    # [n, w] [2]
        u = e @ projection_of(client, self.teacher) if self.finetune else e
        return client.reply(teacher=answers(client, u @ self.unit_text(client).T))

    def text(self, client: Client, wording: Wording) -> Tensor:
        """Text features [C, d] that the client got when it joined, on the CPU."""
        if wording not in client.state:
            raise RuntimeError("this client did not take part in FedSM.join, so it has no text features")
        return client.state[wording]

    def unit_text(self, client: Client) -> Tensor:
        """T of Eq. 1, [C, d], rows of length 1, on the client's device."""
        return F.normalize(self.text(client, "phrase"), dim=1).to(client.device)

    @property
    def terms(self) -> tuple[str, ...]:
        return ("cross_entropy", "hint" if self.finetune else "distillation") if self.distils else ()

    def objective(self, client: Client, message: Message) -> Objective:
        """Eq. 1; when fine-tuning, the square error to the teacher's features in place of the KL term, IV-C.2."""
        if not self.distils:
            return super().objective(client, message)
        model, e, text = client.model, encoded(client, self.teacher, not self.finetune), self.unit_text(client)
        if self.finetune:
            projection = Projection(client, self.teacher, self.teacher_lr, self.target == "unit")    # [6]

            def terms(batch: Batch) -> dict[str, Tensor]:
                u, z = projection.step(e[batch.rows], batch.y, text, self.margin, self.scale), model.encoder(batch.x)
                return {"cross_entropy": F.cross_entropy(model.classifier(z), batch.y),
                        "hint": self.squares * hint(z, u)}
        else:
            log_q = (self.scale * e.float() @ text.T / self.temperature).log_softmax(1)         # [n, C] [1]

            def terms(batch: Batch) -> dict[str, Tensor]:
                logits = model(batch.x)
                return {"cross_entropy": F.cross_entropy(logits, batch.y),
                        "distillation": self.kd * distillation(logits, log_q[batch.rows], self.temperature)}

        return Terms(client, terms if self.finetune else recordable(terms))     # [6] has an optimiser of its own

    def learn(self, client: Client, message: Message) -> Tree:
        """Local training on the model that was received; what a reply says of it."""
        objective = self.objective(client, message)
        parts: Tree = {"loss": sgd(client, objective)} | reply_of(objective, self.terms)
        if self.finetune:
            h = encoded(client, self.teacher, False)
            parts["cosine"] = towards(client, h.float() @ projection_of(client, self.teacher))
        return parts

    def train(self, client: Client, message: Message) -> Reply:
        client.receive(message["model"])
        return client.reply(**self.learn(client, message), model=self.shared(client.model))

    def prototypes(self, client: Client, message: Message) -> Reply:
        """n_c^k f_c^k and n_c^k of each class that the client holds, Eq. 3."""
        client.receive(message["encoder"])
        return client.reply(classes=self.means(client))

    def means(self, client: Client) -> dict[int, Tree]:
        """The client's part of Eq. 3 under its encoder as it is."""
        return class_means(*features(client), self.norm == "l2")

    def train_and_retrain(self, client: Client, message: Message) -> Reply:
        """Algorithm 1, lines 5 to 11: local training, then the classifier learns from pseudo-features."""
        client.receive(message["model"])
        before, y = some_features(client)
        parts = self.learn(client, message)
        parts["drift"] = drift(before, some_features(client)[0], y, message["means"][message["present"]])
        retrain_loss = self.fit(client, client.model.classifier, message)
        return client.reply(model=self.shared(client.model), retrain_loss=retrain_loss, **parts)

    def train_first(self, client: Client, message: Message) -> Reply:
        """`encoders=trained`: local training, then the prototypes; the model waits here for its re-training."""
        client.receive(message["model"])
        parts = self.learn(client, message)
        client.state["trained"] = tree.snapshot(self.shared(client.model))
        return client.reply(classes=self.means(client), **parts)

    def retrain_next(self, client: Client, message: Message) -> Reply:
        """`encoders=trained`: the classifier of the model that waited learns from pseudo-features."""
        client.receive(client.state.pop("trained"))
        retrain_loss = self.fit(client, client.model.classifier, message)
        return client.reply(model=self.shared(client.model), retrain_loss=retrain_loss)

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
        even = torch.ones(2 * [client.model.classes])
        alpha = self.alpha(self.text(client, self.wording)) if self.wordings else even          # Eq. 5 [4] [7]
        rows = draw_partners(alpha, classes.cpu(), y.cpu(), self.size, self.partner, self.unit, client.order)  # [P, S]
        lam = self.lam_low + (self.lam_high - self.lam_low) * torch.rand(rows.shape, generator=client.order)
        z = F.normalize(z, dim=1) if self.norm == "l2" else z
        r = mix_features(z[rows.to(z.device)], message["means"][classes], lam.to(z.device))        # Eq. 4
        return r.flatten(0, 1), classes.repeat_interleave(self.size)

    def alpha(self, text: Tensor) -> Tensor:
        """alpha of Eq. 5, [C, C]."""
        return relevance(text, self.similarity, self.softmax, self.partner == "inverted")

    # at the server

    def start(self, server: Server, fleet: Fleet) -> None:
        message: Message = {}
        server.state["teacher"] = "none: no distillation, uniform relevance"
        if self.wordings:
            teacher, names = open_teacher(self.teacher), server.facts.class_names
            message = {wording: teacher.text(names, wording, server.device) for wording in sorted(self.wordings)}
            server.state["teacher"] = teacher.about
            server.state["text"] = message[self.wording]
        if not self.distils:
            fleet.ask(self.join, fleet.everyone, message)
            return
        counts = torch.empty(server.model.classes, dtype=torch.int64, device="meta")
        got = fleet.ask(self.join, fleet.everyone, message, teacher=total.like({"n": counts, "right": counts}))
        server.state["teacher_accuracy"] = zero_shot(**got["teacher"], thresholds=group_thresholds(server.config.data))

    def round(self, server: Server, fleet: Fleet) -> None:
        """Algorithm 1: in the last rounds the prototypes are taken first, or between training and re-training [3]; with
        `retrain=after`, last."""
        text = server.state.get("text")
        server.log(relevance=0.0 if text is None else total_variation(self.alpha(text)),
                   **{name: server.state[name] for name in ("teacher", "teacher_accuracy") if name in server.state})
        retrain = self.retrain if server.round > server.rounds - self.rounds else None
        cohort, message = self.sample(server, fleet), self.message(server)
        model, number = mean.like(message["model"]), mean.like(0.0)
        parts = {"loss": number} | asked_for(self.terms) | ({"cosine": number} if self.finetune else {})
        if retrain == "before" and self.encoders == "global":
            message |= self.global_prototypes(server, fleet)
            got = trained = fleet.ask(self.train_and_retrain, cohort, message, model=model, retrain_loss=number,
                                      drift=number, **parts)
        elif retrain == "before":
            trained = fleet.ask(self.train_first, cohort, message, classes=of_classes(server.model), **parts)
            got = fleet.ask(self.retrain_next, list(trained.weights),
                            pooled_means(trained["classes"], server.model.classes), model=model, retrain_loss=number)
        else:
            got = trained = fleet.ask(self.train, cohort, message, model=model, **parts)
        server.step(got["model"])
        if retrain == "after":
            message = encoder(server.model) | self.global_prototypes(server, fleet)
            got = fleet.ask(self.refit, cohort, message, retrain_loss=number,
                            classifier=mean.like(server.model.classifier.state_dict()))
            server.state["classifier"] = got["classifier"]
        server.log(**{name: trained[name] for name in ("loss", "cosine", "drift") if name in trained},
                   **figure_of(trained), **({"retrain_loss": got["retrain_loss"]} if retrain else {}))

    def global_prototypes(self, server: Server, fleet: Fleet) -> Message:
        """z^global of Eq. 3, float32 [C, d], and which classes have one, bool [C]."""
        got = fleet.ask(self.prototypes, fleet.everyone, encoder(server.model), classes=of_classes(server.model))
        return pooled_means(got["classes"], server.model.classes)

    # what is judged

    def global_model(self, server: Server) -> SplitModel:
        if "classifier" not in server.state:
            return server.model
        return with_classifier(server.model, **tree.to(server.state["classifier"], server.device))


def encoder(model: SplitModel) -> Message:
    """The entries of the encoder that travel."""
    return {"encoder": tree.snapshot(model.entries("encoder."))}


def of_classes(model: SplitModel) -> Reduction:
    """What sums of features by class look like; a client has those of its own classes."""
    of_class = {"n": 0, "z": torch.empty(model.dim, device="meta")}
    return total.within(dict.fromkeys(range(model.classes), of_class))
