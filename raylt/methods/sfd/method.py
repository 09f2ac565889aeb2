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
`preset=official` takes what the authors' code does otherwise (`OFFICIAL`); fields given besides it win. Not taken: the
code's order of the orthogonal frequencies, which are as random in ours, and its report of the best test accuracy.
"""

import math
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from pydantic import model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from raylt import tree
from raylt.core.client import Client, Message, Reply
from raylt.core.features import features
from raylt.core.fitting import fit_classifier
from raylt.core.fleet import Fleet
from raylt.core.method import Method
from raylt.core.reductions import total
from raylt.core.server import Server
from raylt.core.training import Objective
from raylt.data.augment import resized_crop_flip
from raylt.data.samples import Batch
from raylt.data.task import Facts
from raylt.errors import ConfigError
from raylt.hyper import Choice, LogUniform, Uniform, hp
from raylt.methods.sfd.fourier import draw_frequencies, fourier_sum
from raylt.methods.sfd.losses import adaptive_supcon, adjusted_prior, logit_shift
from raylt.methods.sfd.synthesis import Target, Terms, bank_sizes, cholesky, synthesise
from raylt.models.split import Params, SplitModel, with_classifier
from raylt.ops.moments import class_sums, moments, moments_fault
from raylt.seeds import seed_for
from raylt.tree import Tree

OFFICIAL: dict[str, Any] = {"delta": "negatives", "rf_dim": 3000, "weighting": "batches", "bias": "random",
                            "schedule": "iteration", "statistics_area": 0.93}
SHOWN_CLASSES, SHOWN_FEATURES = 10, 200     # kept for `raylt features`: 4 MB at d = 512


class SFD(Method):
    """ABBL, statistics aggregation and SAFS. Table 2: `abbl=ce`, `abbl=la`, `beta_pi=0`, `delta=none`; Table 3:
    `safs=false`, `aligner=false`, `mmd=false`, `arr=false`."""

    name: ClassVar[str] = "sfd"
    paper: ClassVar[str] = "Zhu et al., KDD 2025"

    preset: Literal["paper", "official"] = hp("paper", Choice("paper", "official"), "official: as the authors' code")
    gamma: float = hp(0.1, Choice(0.1, 1.0), "strength of the logit adjustment, Eq. 5", ge=0)
    beta_pi: float = hp(1.0, Choice(0.0, 1.0), "missing classes count as this share of the smallest, Eq. 6", ge=0, le=1)
    tau: float = hp(0.07, LogUniform(0.03, 0.5), "temperature, Eq. 7", gt=0)
    beta1: float = hp(0.1, Choice(0.1, 1.0), "weight of the contrastive loss in round 0, Eq. 28; CIFAR-100-LT: 1", ge=0)
    abbl: Literal["full", "ce", "la"] = hp("full", Choice("full", "ce", "la"), "local loss: ABBL, cross-entropy or "
                                           "logit adjustment, Table 2")
    delta: Literal["all", "negatives", "none"] = hp("all", Choice("all", "negatives", "none"), "whose similarity is "
                                                    "raised by log n, Eq. 7")
    scl_self: bool = hp(True, Choice(True, False), "whether A(i) holds i, Eq. 7")
    hidden: int = hp(256, Choice(128, 256, 512), "width of the projector's hidden layer; from the code", ge=1)
    projection: int = hp(128, Choice(64, 128, 256), "length of h; from the code", ge=1)
    weighting: Literal["samples", "batches"] = hp("samples", Choice("samples", "batches"), "of a client in the average")
    statistics_area: float = hp(1.0, Choice(0.93, 1.0), "smallest share of an image that its statistics are taken of; "
                                "below 1 images are cropped and flipped", gt=0, le=1)
    rf_dim: int = hp(5000, Choice(1000, 3000, 5000), "D, appendix C.2", ge=2, multiple_of=2)
    rf_type: Literal["orf", "iid"] = hp("orf", Choice("orf", "iid"), "random features, Eq. 3; orf from the code")
    gamma_rbf: float = hp(0.01, LogUniform(1e-3, 0.1), "of the RBF kernel, appendix C.2", gt=0)
    m_min: int | None = hp(None, Choice(None, 600), "M_c of the largest class, appendix B; None: 600, at least d + 88")
    m_max: int | None = hp(None, Choice(None, 2000), "M_c of the smallest class, appendix B; None: 2000, or 10/3 m_min")
    synthesis_steps: int = hp(100, Choice(50, 100, 200), "T, Algorithm 1; from the code", ge=0)
    synthesis_lr: float = hp(1.0, LogUniform(0.1, 10), "learning rate of the bank; from the code", gt=0)
    synthesis_momentum: float = hp(0.9, Uniform(0, 0.99), "momentum of the bank; from the code", ge=0, lt=1)
    epochs: int = hp(100, Choice(10, 50, 100), "of re-training; from the code", ge=0)
    batch: int = hp(64, Choice(32, 64, 128), "of re-training; from the code", ge=1)
    lr: float = hp(0.01, LogUniform(1e-3, 0.1), "of re-training, appendix C.2", gt=0)
    momentum: float = hp(0.9, Uniform(0, 0.99), "of re-training, appendix C.2", ge=0, lt=1)
    weight_decay: float = hp(1e-5, LogUniform(1e-6, 1e-3), "of re-training; from the code", ge=0)
    schedule: Literal["epoch", "iteration"] = hp("epoch", Choice("epoch", "iteration"), "of re-training: cosine over "
                                                 "the epochs, or of period 2 * epochs steps")
    bias: Literal["zero", "random"] = hp("zero", Choice("zero", "random"), "of the classifier, before re-training")
    safs: bool = hp(True, Choice(True, False), "synthesis and re-training, Table 3")
    aligner: bool = hp(True, Choice(True, False), "MeanCov aligner, Eq. 11-14, Table 3")
    mmd: bool = hp(True, Choice(True, False), "L_MMD, Eq. 15, Table 3")
    arr: bool = hp(True, Choice(True, False), "L_ARR, Eq. 16, Table 3")

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, fields: dict[str, Any]) -> dict[str, Any]:
        return OFFICIAL | fields if fields.get("preset") == "official" else fields

    def build(self, task: Facts, base: SplitModel) -> SplitModel:
        base.classifier.register_parameter("bias", None)        # [3]
        if self.abbl == "full":
            base.add_module("projector", nn.Sequential(
                nn.Linear(base.dim, self.hidden), nn.BatchNorm1d(self.hidden), nn.ReLU(inplace=True),
                nn.Linear(self.hidden, self.projection)))
        return base

    def bank(self, dim: int) -> tuple[int, int]:
        """Synthetic features of the largest and of the smallest class.

        Raises:
            ConfigError: fewer than the aligner can work with.
        """
        low = max(600, dim + 88) if self.m_min is None else self.m_min
        high = max(2000, low * 10 // 3) if self.m_max is None else self.m_max
        if self.aligner and low <= dim:                         # [6]
            raise ConfigError(f"method.m_min = {low}: features have d = {dim}, and the aligner needs at least d + 1 = "
                              f"{dim + 1} synthetic ones per class; set method.m_min={dim + 88} or leave it out")
        if not 1 <= low <= high:
            raise ConfigError(f"method.m_min = {low} and method.m_max = {high}: 1 <= m_min <= m_max is expected")
        return low, high

    # local training (4.1)

    def objective(self, client: Client, message: Message) -> Objective:
        """L_ABBL, Eq. 8."""
        model, counts = client.model, client.counts
        prior = counts.float() if self.abbl == "la" else adjusted_prior(counts, self.beta_pi)      # pi, Eq. 6
        shift = logit_shift(prior, 0.0 if self.abbl == "ce" else self.gamma)     # [C]
        beta, log_counts = message["beta"], counts.log()        # a batch holds no class whose log n is -inf

        def loss(batch: Batch) -> Tensor:
            z = model.encoder(batch.x)                          # [B, d]
            adaptive_ce = F.cross_entropy(model.classifier(z) + shift, batch.y)                    # Eq. 5
            if beta == 0 or self.abbl != "full":
                return adaptive_ce
            h = F.normalize(model.get_submodule("projector")(z), dim=1)          # [B, h]
            return adaptive_ce + beta * adaptive_supcon(h, batch.y, log_counts, self.tau, self.delta, self.scl_self)

        return loss

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
                        classes=total.within(dict.fromkeys(range(server.model.classes), of_class)).where(moments_fault))
        sums = dict(sorted(got["classes"].items(), key=lambda held: (held[1]["n"], held[0])))   # largest bank first [7]
        sizes = bank_sizes([of_class["n"] for of_class in sums.values()], *self.bank(server.model.dim))
        with server.stages.time("synthesis"):
            made = fleet.map(self.synthesise, [
                {"sums": sums[c], "size": size, "fourier": seed, "bank": seed_for(server.seed("bank"), c)}
                for c, size in zip(sums, sizes, strict=True)])
        z = torch.cat([m["z"] for m in made]).to(server.device)                                 # [M, d]
        y = torch.repeat_interleave(torch.tensor(list(sums)), torch.tensor(sizes)).to(server.device)
        with server.stages.time("re-training"):
            loss = self.retrain(server, z, y)
        every = max(1, len(sums) / SHOWN_CLASSES)               # evenly over the class sizes, as the paper's Fig. 5
        shown = [int(i * every) for i in range(min(len(sums), SHOWN_CLASSES))]
        shown_z = [made[i]["z"][:SHOWN_FEATURES] for i in shown]
        shown_y = torch.tensor(list(sums))[shown].repeat_interleave(torch.tensor([len(part) for part in shown_z]))
        server.state["synthetic"] = {"z": torch.cat(shown_z), "y": shown_y}
        server.log(synthetic=len(z), retrain_loss=loss, jitter=max(m["jitter"] for m in made),
                   synthesis_loss=[sum(m["losses"][t] for m in made) / len(made) for t in (0, -1)])

    def synthesise(self, item: Tree) -> Tree:
        """Algorithm 1 for one class."""
        sums = item["sums"]
        of_class = moments(sums)                                # Eq. 10 [2]
        factor, jitter = cholesky(of_class.cov, 1e-5)           # Eq. 11 and appendix B
        target = Target(of_class.mean, factor, sums["phi"] / sums["n"],
                        self.frequencies(len(of_class.mean), item["fourier"]).to(factor.device))
        z, losses = synthesise(target, item["size"], Terms(self.aligner, self.mmd, self.arr), self.synthesis_steps,
                             self.synthesis_lr, self.synthesis_momentum, torch.Generator().manual_seed(item["bank"]))
        return {"z": z, "jitter": jitter, "losses": losses}

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
        own = {"weight": server.model.state_dict()["classifier.weight"], "bias": None}
        return with_classifier(server.model, **tree.to(server.state.get("classifier", own), server.device))


def encoder(model: SplitModel) -> Params:
    """The entries of the encoder that travel."""
    return model.entries("encoder.")


def sums_like(size: int) -> Tensor:
    """What a sum over samples looks like: float64 [size]."""
    return torch.empty(size, dtype=torch.float64, device="meta")
