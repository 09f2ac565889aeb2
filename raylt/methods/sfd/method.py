"""SFD: bi-branch local training, then a classifier re-trained on synthetic features (Zhu et al., KDD 2025).

Equation numbers are the paper's. Departures from the text, each marked at its line:
[1] Clients upload sums of z, z z^T and phi(z) per class that they own, in float64, not means of every class: sums of
    these are what Eq. 10 computes, an absent class costs nothing, and float32 would lose more than the jitter of 1e-5.
[2] Eq. 10's S_g is the covariance that Eq. 11 calls Sigma_g.
[3] The classifier has no bias while clients train; one that starts at 0 is added when it is re-trained (the paper is
    silent; its code does the first and draws the second at random).
[4] r of Eq. 28 counts from 0, so beta is beta1 in the first round and never reaches 0.
[5] The bank, 100 steps of SGD at 1.0 with momentum 0.9 and a cosine rate, whole bank at a time, and the epochs, batch
    and weight decay of re-training stand in the authors' code only.
[6] M_c >= d + 1 is enforced: with fewer rows Eq. 12 is singular. Features wider than 512 get larger banks.
[7] A class that nobody holds gets no synthetic features.
[8] L_MMD and L_ARR are reported before the first step and after the last, means over the classes, and beside L_MMD its
    floor, below which it tells noise: what as many real features, drawn with replacement, would have. That of L_ARR is
    0 behind a ReLU. At the rate of [5] the bank hardly moves, as a sample has 1/M_c of the gradient of a mean;
    `synthesis_per=sample` takes that back.
[9] `classifier` other than safs gives the encoder another one (`controls.py`): controls of ours.
`preset=official` takes what the authors' code does otherwise (`OFFICIAL`); fields given besides it win. Not taken: the
code's order of the orthogonal frequencies, which are as random in ours, and its report of the best test accuracy.
"""

import math
from dataclasses import replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from raylt import tree
from raylt.core.client import Client, Message, Reply
from raylt.core.features import features
from raylt.core.fitting import fit_classifier
from raylt.core.fleet import Fleet
from raylt.core.method import Group
from raylt.core.reductions import each, total
from raylt.core.server import Server
from raylt.core.terms import Terms
from raylt.core.training import Objective
from raylt.data.augment import resized_crop_flip
from raylt.data.samples import Batch
from raylt.data.task import Facts
from raylt.errors import ConfigError
from raylt.methods.sfd.controls import closed_form, draws
from raylt.methods.sfd.fields import Fields
from raylt.methods.sfd.fourier import bootstrap_floor, draw_frequencies, fourier_sum
from raylt.methods.sfd.losses import adaptive_supcon, adjusted_prior, logit_shift
from raylt.methods.sfd.synthesis import Parts, Target, bank_sizes, cholesky, synthesise
from raylt.models.split import Params, SplitModel, with_classifier
from raylt.ops.bootstrap import bootstrap_of_clients, class_bootstrap
from raylt.ops.moments import class_sums, moments, moments_fault, nearest_moments, sample_lengths
from raylt.recordable import recordable
from raylt.seeds import seed_for
from raylt.tree import Tree

SHOWN_CLASSES, SHOWN_FEATURES = 10, 200     # kept for `raylt plot features`: 4 MB at d = 512


class SFD(Fields):
    """ABBL, statistics aggregation and SAFS. Table 2: `abbl=ce`, `abbl=la`, `beta_pi=0`, `delta=none
    scl_self=false`; Table 3: `safs=false`, `aligner=false`, `mmd=false`, `arr=false`."""

    name: ClassVar[str] = "sfd"
    paper: ClassVar[str] = "Zhu et al., KDD 2025"
    link: ClassVar[str | None] = "https://github.com/zhb2000/SFD"
    group: ClassVar[Group | None] = "statistics"
    sums_samples: ClassVar[bool] = True

    def build(self, task: Facts, base: SplitModel) -> SplitModel:
        base.classifier.register_parameter("bias", None)        # [3]
        if self.abbl == "full":
            base.add_module("projector", nn.Sequential(
                nn.Linear(base.dim, self.hidden), nn.BatchNorm1d(self.hidden), nn.ReLU(inplace=True),
                nn.Linear(self.hidden, self.projection)))
        return base

    # local training (4.1)

    @property
    def terms(self) -> tuple[str, ...]:
        return ("cross_entropy", "contrastive") if self.abbl == "full" else ()

    def objective(self, client: Client, message: Message) -> Objective:
        """L_ABBL, Eq. 8."""
        model, counts = client.model, client.counts
        prior = counts.float() if self.abbl == "la" else adjusted_prior(counts, self.beta_pi)      # pi, Eq. 6
        shift = logit_shift(prior, 0.0 if self.abbl == "ce" else self.gamma)     # [C]
        beta, log_counts = message["beta"], counts.log()        # a batch holds no class whose log n is -inf

        if self.abbl != "full":
            return recordable(lambda batch: F.cross_entropy(model(batch.x) + shift, batch.y))

        @recordable
        def terms(batch: Batch) -> dict[str, Tensor]:
            z = model.encoder(batch.x)                          # [B, d]
            branches = {"cross_entropy": F.cross_entropy(model.classifier(z) + shift, batch.y)}     # Eq. 5
            if beta:
                h = F.normalize(model.get_submodule("projector")(z), dim=1)      # [B, h]
                scl = adaptive_supcon(h, batch.y, log_counts, self.tau, self.delta, self.scl_self)
                branches["contrastive"] = beta * scl
            return branches

        return Terms(client, terms)

    def train(self, client: Client, message: Message) -> Reply:
        reply = super().train(client, message)
        return reply if self.weighting == "samples" else replace(reply, weight=float(max(1, client.steps(epochs=1))))

    # statistics (4.2)

    def statistics(self, client: Client, message: Message) -> Reply:
        """Of each class that the client holds: count and sums of z, z z^T and phi(z), Eq. 9 and Algorithm 2 [1]."""
        client.receive(message["model"])
        crop = None if self.statistics_area == 1 else partial(resized_crop_flip, least=self.statistics_area)
        z, y = features(client, crop)                           # [n, d], [n]
        omega = self.frequencies(z.shape[1], message["seed"]).to(z.device)
        sums = class_sums(z, y)
        for c, of_class in sums.items():
            of_class["phi"] = fourier_sum(z[y == c], omega)
        return client.reply(classes=sums)

    def frequencies(self, dim: int, seed: int) -> Tensor:
        """Omega [D/2, d] of Eq. 3; only the seed travels."""
        return draw_frequencies(dim, self.rf_dim, self.gamma_rbf, self.rf_type, seed)

    @property
    def sees_each(self) -> tuple[str, ...]:
        return ("features",) if self.classifier == "oracle" else ()

    # at the server

    def start(self, server: Server, fleet: Fleet) -> None:
        self.bank(server.model.dim)                             # raises before hours of training, not after
        if self.safs and not (self.aligner or self.mmd):
            raise ConfigError("method.aligner and method.mmd are both false: nothing would bring synthetic features "
                              "near the real ones; set one of them, or method.safs=false")
        super().start(server, fleet)

    def message(self, server: Server) -> Message:
        r = server.round - 1                                    # [4]
        return super().message(server) | {"beta": self.beta1 * 0.5 * (1 + math.cos(math.pi * r / server.rounds))}

    def reply_weights(self, server: Server, fleet: Fleet) -> dict[int, float] | None:
        steps = partial(server.config.local.steps, epochs=1)
        return None if self.weighting == "samples" else {id: float(max(1, steps(n))) for id, n in fleet.sizes.items()}

    @property
    def finishes(self) -> bool:
        return self.safs

    def finish(self, server: Server, fleet: Fleet) -> None:
        """Algorithm 2, Algorithm 1, then the classifier is trained on what they made."""
        seed, d = server.seed("fourier"), server.model.dim
        of_class = {"n": 1, "z": sums_like(d), "zz": sums_like(d * (d + 1) // 2), "phi": sums_like(self.rf_dim)}
        message = {"model": tree.snapshot(encoder(server.model)), "seed": seed}
        got = fleet.ask(self.statistics, fleet.everyone, message,
                        classes=total.within(dict.fromkeys(range(server.model.classes), of_class)).where(
                            moments_fault).bounded(sample_lengths(server.config.privacy.clip) | {"phi": 1.0},
                                                   nearest_moments))
        sums = dict(sorted(got["classes"].items(), key=lambda held: (held[1]["n"], held[0])))   # largest bank first [7]
        if self.classifier in ("ncm", "ridge"):                 # [9]
            server.state["classifier"] = closed_form(self.classifier, sums, server.model.classes)
            return
        sizes = bank_sizes([of_class["n"] for of_class in sums.values()], *self.bank(server.model.dim))
        with server.stages.time("synthesis"):
            if self.classifier == "safs":
                made = fleet.map(self.synthesise, [
                    {"sums": sums[c], "size": size, "fourier": seed, "bank": seed_for(server.seed("bank"), c)}
                    for c, size in zip(sums, sizes, strict=True)])
            elif self.classifier == "oracle":
                made = self.real(server, fleet, dict(zip(sums, sizes, strict=True)))
            else:
                made = [{"z": z} for z in draws(self.classifier, sums, sizes, server.seed("bank"))]
        z = torch.cat([m["z"] for m in made]).to(server.device)                                 # [M, d]
        y = torch.repeat_interleave(torch.tensor(list(sums)), torch.tensor(sizes)).to(server.device)
        with server.stages.time("re-training"):
            loss = self.retrain(server, z, y)
        most = min(len(sums), SHOWN_CLASSES)                    # evenly over the class sizes, both ends among them
        shown = [round(i * (len(sums) - 1) / max(most - 1, 1)) for i in range(most)]
        shown_z = [made[i]["z"][:SHOWN_FEATURES] for i in shown]
        shown_y = torch.tensor(list(sums))[shown].repeat_interleave(torch.tensor([len(part) for part in shown_z]))
        server.state["synthetic"] = {"z": torch.cat(shown_z), "y": shown_y}
        server.log(synthetic=len(z), retrain_loss=loss)
        if self.classifier == "safs":
            losses = {name: {at: sum(m[name][at] for m in made) / len(made) for at in made[0][name]}
                      for name in ("mmd", "arr")}               # [8]
            server.log(jitter=max(m["jitter"] for m in made), **losses)

    def real(self, server: Server, fleet: Fleet, sizes: dict[int, int]) -> list[Tree]:
        """As many real features of each class, of all clients together with replacement; the clients hand them over."""
        most = max(sizes.values())
        of_class = {"n": 1, "z": torch.empty(most, server.model.dim, device="meta")}
        message = {"model": tree.snapshot(encoder(server.model)), "size": most}
        replies = fleet.ask(self.hand_over, fleet.everyone, message,
                            features=each.within(dict.fromkeys(range(server.model.classes), of_class)))["features"]
        z = bootstrap_of_clients(list(replies.values()), torch.Generator().manual_seed(server.seed("bank")))
        return [{"z": z[c][:size]} for c, size in sizes.items()]

    def hand_over(self, client: Client, message: Message) -> Reply:
        """Of each class that the client holds its count, and `size` of its features with replacement; an oracle's."""
        client.receive(message["model"])
        return client.reply(features=class_bootstrap(*features(client), message["size"], client.order))

    def synthesise(self, item: Tree) -> Tree:
        """Algorithm 1 for one class."""
        sums = item["sums"]
        of_class = moments(sums)                                # Eq. 10 [2]
        factor, jitter = cholesky(of_class.cov, 1e-5)           # Eq. 11 and appendix B
        target = Target(of_class.mean, factor, sums["phi"] / sums["n"],
                        self.frequencies(len(of_class.mean), item["fourier"]).to(factor.device))
        rate = self.synthesis_lr * (item["size"] if self.synthesis_per == "sample" else 1)
        parts, draw = Parts(self.aligner, self.mmd, self.arr), torch.Generator().manual_seed(item["bank"])
        z, (start, end) = synthesise(target, item["size"], parts, self.synthesis_steps, rate, self.synthesis_momentum,
                                     draw)
        floor = bootstrap_floor(target.phi, target.omega, of_class.mean, of_class.cov, item["size"])
        return {"z": z, "jitter": jitter, "arr": {"start": start.arr, "end": end.arr},
                "mmd": {"start": start.mmd, "end": end.mmd, "floor": floor}}

    def retrain(self, server: Server, z: Tensor, y: Tensor) -> float:
        """Fits the classifier to synthetic features (4.3); returns the loss of the last epoch."""
        weight = server.model.state_dict()["classifier.weight"].clone()
        bound = 0.0 if self.bias == "zero" else 1 / math.sqrt(server.model.dim)  # [3]
        generator = torch.Generator().manual_seed(server.seed("bias"))
        bias = torch.empty(len(weight)).uniform_(-bound, bound, generator=generator).to(server.device)
        classifier = with_classifier(server.model, weight, bias).classifier
        loss = fit_classifier(
            classifier, z, y, epochs=self.epochs, batch=self.batch, lr=self.lr, momentum=self.momentum,
            weight_decay=self.weight_decay, seed=server.seed("retrain"), schedule=self.schedule)
        server.state["classifier"] = tree.snapshot(classifier.state_dict())
        return loss

    # what is judged: the projector only served training

    def global_model(self, server: Server) -> SplitModel:
        if "classifier" not in server.state:
            return with_classifier(server.model, server.model.state_dict()["classifier.weight"], None)
        return with_classifier(server.model, **tree.to(server.state["classifier"], server.device),
                               longest=server.config.privacy.longest)


def encoder(model: SplitModel) -> Params:
    """The entries of the encoder that travel."""
    return model.entries("encoder.")


def sums_like(size: int) -> Tensor:
    """What a sum over samples looks like: float64 [size]."""
    return torch.empty(size, dtype=torch.float64, device="meta")
