"""SFD: bi-branch local training, then a classifier re-trained on synthetic features (Zhu et al., KDD 2025).

Equation numbers are the paper's. Departures from the text, each marked at its line:
[1] Clients upload sums of z, z z^T and phi(z) of each owned class, in float64, not means of every class. Eq. 10
    computes sums of these, an absent class costs nothing, and float32 would lose more than the jitter of 1e-5.
[2] Eq. 10's S_g is the covariance that Eq. 11 calls Sigma_g.
[3] The classifier has no bias while clients train; a bias that starts at 0 is added when it is re-trained. The paper
    does not state either; its code does the same, but draws the bias at random.
[4] r of Eq. 28 counts from 0, so beta is beta1 in the first round and never reaches 0.
[5] These come from the authors' code only: 100 steps of SGD on the whole bank at 1.0 with momentum 0.9 and a cosine
    schedule; epochs, batch and weight decay of re-training.
[6] M_c >= d + 1 is enforced: with fewer rows Eq. 12 is singular. Features wider than 512 get larger banks.
[7] A class without samples at any client gets no synthetic features.
[8] L_MMD and L_ARR are reported before the first step and after the last, as means over the classes. The floor of L_MMD
    is reported too: its value for the same number of real features, drawn with replacement. Below it L_MMD measures
    noise. The floor of L_ARR is 0 after a ReLU. At the learning rate of [5] the bank hardly changes, because a sample
    gets 1/M_c of the gradient of a mean; `synthesis_per=sample` multiplies it by M_c.
[9] The paper does not state the initial distribution of the bank: N(0, I) here, as in the code. It matters without the
    aligner (Table 3), when the bank keeps its own mean and scale: `bank_start`.
[10] A `classifier` other than safs gives the encoder another classifier (`controls.py`), as our control.
`preset=official` uses the settings of the authors' code (`OFFICIAL`); other given fields override it. It leaves out the
code's order of the orthogonal frequencies, which are equally random here, and reporting the best test accuracy. With
`weighting=batches` a client's weight is the number of batches that it trains on; the code's also counts a last batch of
one image, which raylt drops.
"""

import math
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from pydantic import model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from raylt import tree
from raylt.config import Config
from raylt.core.client import Client, Message, Reply
from raylt.core.fleet.fleet import Fleet
from raylt.core.fleet.item_progress import report_steps
from raylt.core.fleet.reductions import each, total
from raylt.core.fleet.upload_limit import check_class_uploads
from raylt.core.method import Group, Method, train_clients
from raylt.core.round_stats import StageProgress
from raylt.core.server import Server
from raylt.core.training.estimates import about
from raylt.core.training.features import features
from raylt.core.training.fit_classifier import fit_classifier
from raylt.core.training.loss_terms import Terms
from raylt.core.training.sgd import Objective
from raylt.data.augment import resized_crop_flip
from raylt.data.samples import Batch
from raylt.data.task import Task, TaskSpec
from raylt.errors import ConfigError
from raylt.hyper import Choice, LogUniform, Uniform, hp
from raylt.methods.sfd.controls import Classifier, closed_form, draws
from raylt.methods.sfd.fourier import bootstrap_floor, draw_frequencies, fourier_sum
from raylt.methods.sfd.local_losses import adaptive_supcon, adjusted_prior, logit_shift
from raylt.methods.sfd.synthesis import Parts, Start, Target, bank_sizes, cholesky, synthesise
from raylt.models.layers import check_linear_classifier
from raylt.models.split import SplitModel, StateDict, with_classifier
from raylt.ops.bootstrap import bootstrap_of_clients, class_bootstrap
from raylt.ops.moments import (
    LONGEST_FEATURE,
    class_sums,
    moments_fault,
    moments_from_sums,
    nearest_moments,
    sample_lengths,
    sums_fault,
)
from raylt.seeds import seed_for
from raylt.tree import Tree

OFFICIAL: dict[str, Any] = {
    "delta": "negatives",
    "rf_dim": 3000,
    "weighting": "batches",
    "bias": "random",
    "retrain_schedule": "iteration",
    "statistics_area": 0.93,
}


# 100 steps of synthesis gained 0.08 ± 0.69 points over no steps on Fashion-MNIST-LT (studies/sfd_fashion.yaml).
QUICK: dict[str, Any] = {"synthesis_steps": 5}
PRESETS = {"official": OFFICIAL, "quick": QUICK}

CLOSED_FORMS = ("ncm", "ridge")  # Values of `classifier` that need no features.
TIMED_STEPS = 3  # Synthesis steps from which the duration in plans is estimated.
SHOWN_CLASSES, SHOWN_FEATURES = 10, 200  # Features kept for `raylt plot features`: 4 MB at d = 512.


class SFD(Method):
    """FedAvg with bi-branch local training (ABBL), then a classifier re-trained on synthetic features (SAFS).

    The synthesis uses feature statistics aggregated over all clients.

    Table 2: `abbl=ce`, `abbl=la`, `beta_pi=0`, `delta=none scl_self=false`. Table 3: `safs=false`, `aligner=false`,
    `mmd=false`, `arr=false`. Sources: equation, table and appendix numbers are the paper's; "from the code": only the
    authors' code has it.
    """

    name: ClassVar[str] = "sfd"
    paper: ClassVar[str] = "Zhu et al., KDD 2025"
    link: ClassVar[str | None] = "https://github.com/zhb2000/SFD"
    group: ClassVar[Group | None] = "statistics"
    sums_samples: ClassVar[bool] = True
    later: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "finish": (
            "statistics_area",
            "rf_dim",
            "rf_type",
            "gamma_rbf",
            "m_min",
            "m_max",
            "synthesis_steps",
            "synthesis_lr",
            "synthesis_per",
            "synthesis_momentum",
            "bank_start",
            "retrain_epochs",
            "retrain_batch",
            "retrain_lr",
            "retrain_momentum",
            "retrain_weight_decay",
            "retrain_schedule",
            "bias",
            "safs",
            "aligner",
            "mmd",
            "arr",
            "classifier",
        )
    }

    encoder_fields: ClassVar[tuple[str, ...]] = ("tau", "beta1", "delta", "scl_self", "hidden", "projection")

    preset: Literal["paper", "official", "quick"] = hp(
        "paper",
        Choice("paper", "official"),
        "preset fields; official: as in the authors' code; quick: 5 steps of synthesis instead of 100, which changes "
        "the accuracy on the digits by 0.06 ± 0.14 points (studies/sfd_steps.yaml)",
    )
    gamma: float = hp(0.1, Choice(0.1, 1.0), "strength of the logit adjustment, Eq. 5", ge=0)
    beta_pi: float = hp(
        1.0, Choice(0.0, 1.0), "count of a missing class, as a share of the smallest class, Eq. 6", ge=0, le=1
    )
    tau: float = hp(0.07, LogUniform(0.03, 0.5), "temperature, Eq. 7", gt=0)
    beta1: float = hp(0.1, Choice(0.1, 1.0), "weight of the contrastive loss in round 0, Eq. 28; CIFAR-100-LT: 1", ge=0)
    abbl: Literal["full", "ce", "la"] = hp(
        "full", Choice("full", "ce", "la"), "local loss: ABBL, cross-entropy or logit adjustment, Table 2"
    )
    delta: Literal["all", "negatives", "none"] = hp(
        "all", Choice("all", "negatives", "none"), "pairs whose similarity is raised by log n, Eq. 7"
    )
    scl_self: bool = hp(True, Choice(True, False), "inclusion of i in A(i), Eq. 7")
    hidden: int = hp(256, Choice(128, 256, 512), "width of the projector's hidden layer; from the code", ge=1)
    projection: int = hp(128, Choice(64, 128, 256), "length of h; from the code", ge=1)
    weighting: Literal["samples", "batches"] = hp(
        "samples", Choice("samples", "batches"), "weight of a client in the average"
    )
    statistics_area: float = hp(
        1.0,
        Choice(0.93, 1.0),
        "minimum share of an image that its statistics use; below 1, images are cropped and flipped",
        gt=0,
        le=1,
    )
    rf_dim: int = hp(
        5000, Choice(1000, 3000, 5000), "dimension D of the random features, appendix C.2", ge=2, multiple_of=2
    )
    rf_type: Literal["orf", "iid"] = hp("orf", Choice("orf", "iid"), "random features, Eq. 3; orf from the code")
    gamma_rbf: float = hp(0.01, LogUniform(1e-3, 0.1), "gamma of the RBF kernel, appendix C.2", gt=0)
    m_min: int | None = hp(None, Choice(None, 600), "M_c of the largest class, appendix B; None: 600, at least d + 88")
    m_max: int | None = hp(None, Choice(None, 2000), "M_c of the smallest class, appendix B; None: 2000, or 10/3 m_min")
    # [5] [9]
    synthesis_steps: int = hp(100, Choice(50, 100, 200), "T, Algorithm 1; from the code", ge=0)
    synthesis_lr: float = hp(1.0, LogUniform(0.1, 10), "learning rate of the bank; from the code", gt=0)
    synthesis_per: Literal["bank", "sample"] = hp(
        "bank",
        Choice("bank", "sample"),
        "unit to which synthesis_lr applies: the bank, whose mean loss gives a sample 1/M_c of a gradient; or each "
        "sample, M_c times as much; ours",
    )
    synthesis_momentum: float = hp(0.9, Uniform(0, 0.99), "momentum of the bank; from the code", ge=0, lt=1)
    bank_start: Start = hp(
        "noise",
        Choice("noise", "scaled", "mean"),
        "distribution of the initial bank: N(0, I); N(0, s^2 I) with the class's mean variance s^2; or N(mu, s^2 I); "
        "not stated",
    )
    retrain_epochs: int = hp(100, Choice(10, 50, 100), "re-training epochs; from the code", ge=0)
    retrain_batch: int = hp(64, Choice(32, 64, 128), "re-training batch size; from the code", ge=1)
    retrain_lr: float = hp(0.01, LogUniform(1e-3, 0.1), "re-training learning rate, appendix C.2", gt=0)
    retrain_momentum: float = hp(0.9, Uniform(0, 0.99), "re-training momentum, appendix C.2", ge=0, lt=1)
    retrain_weight_decay: float = hp(1e-5, LogUniform(1e-6, 1e-3), "re-training weight decay; from the code", ge=0)
    retrain_schedule: Literal["epoch", "iteration"] = hp(
        "epoch",
        Choice("epoch", "iteration"),
        "learning-rate schedule of re-training: cosine over the epochs, or with period 2 * epochs steps",
    )
    bias: Literal["zero", "random"] = hp("zero", Choice("zero", "random"), "bias of the classifier before re-training")
    safs: bool = hp(True, Choice(True, False), "synthesis and re-training, Table 3")
    aligner: bool = hp(True, Choice(True, False), "MeanCov aligner, Eq. 11-14, Table 3")
    mmd: bool = hp(True, Choice(True, False), "L_MMD, Eq. 15, Table 3")
    arr: bool = hp(True, Choice(True, False), "L_ARR, Eq. 16, Table 3")

    classifier: Classifier = hp(
        "safs",
        Choice("safs", "gaussian", "means", "ncm", "ridge", "oracle"),
        "final classifier; all but safs are our controls: CCVR's Gaussians, class means with noise, FedNCM's, "
        "Fed3R's, and real features, an oracle",
    )

    @property
    def augments(self) -> bool:
        return self.statistics_area < 1

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, fields: dict[str, Any]) -> dict[str, Any]:
        preset = fields.get("preset")
        return PRESETS.get(preset, {}) | fields if isinstance(preset, str) else fields

    def bank(self, dim: int) -> tuple[int, int]:
        """Return the numbers of synthetic features for the largest and for the smallest class.

        Raises:
            ConfigError: The numbers are too small for the aligner, or out of order.
        """
        low = max(600, dim + 88) if self.m_min is None else self.m_min
        high = max(2000, low * 10 // 3) if self.m_max is None else self.m_max
        if self.aligner and self.classifier == "safs" and low <= dim:  # [6]
            raise ConfigError(
                f"method.m_min: features have d = {dim}; the aligner needs at least d + 1 = {dim + 1} synthetic ones "
                f"per class ({low}). Set method.m_min={dim + 88}, or leave it out.",
                code="config.out-of-range",
                key="method.m_min",
                value=low,
            )
        if not 1 <= low <= high:
            raise ConfigError(
                f"method.m_min: must be at least 1 and at most method.m_max ({low} and {high}). Change one of them.",
                code="config.out-of-range",
                key="method.m_min",
                value=low,
                m_max=high,
            )
        return low, high

    def build(self, spec: TaskSpec, base: SplitModel) -> SplitModel:
        base.classifier.register_parameter("bias", None)  # [3]
        if self.abbl == "full":
            base.add_module(
                "projector",
                nn.Sequential(
                    nn.Linear(base.dim, self.hidden),
                    nn.BatchNorm1d(self.hidden),
                    nn.ReLU(inplace=True),
                    nn.Linear(self.hidden, self.projection),
                ),
            )
        return base

    # local training (4.1)

    @property
    def terms(self) -> tuple[str, ...]:
        return ("cross_entropy", "contrastive") if self.abbl == "full" else ()

    def objective(self, client: Client, message: Message) -> Objective:
        """Return the bi-branch loss L_ABBL, Eq. 8."""
        model = client.model
        counts = client.counts
        prior = counts.float() if self.abbl == "la" else adjusted_prior(counts, self.beta_pi)  # pi, Eq. 6
        shift = logit_shift(prior, 0.0 if self.abbl == "ce" else self.gamma)  # [C]
        beta = message["beta"]
        log_counts = counts.log()  # finite for all classes of a batch

        if self.abbl != "full":
            return lambda batch: F.cross_entropy(model(batch.x) + shift, batch.y)

        def terms(batch: Batch) -> dict[str, Tensor]:
            z = model.encoder(batch.x)  # [B, d]
            branches = {"cross_entropy": F.cross_entropy(model.classifier(z) + shift, batch.y)}  # Eq. 5
            if beta:
                h = F.normalize(model.get_submodule("projector")(z), dim=1)  # [B, h]
                scl = adaptive_supcon(h, batch.y, log_counts, self.tau, self.delta, self.scl_self)
                branches["contrastive"] = beta * scl
            return branches

        return Terms(client, terms)

    def train(self, client: Client, message: Message) -> Reply:
        reply = super().train(client, message)
        if self.weighting == "samples":
            return reply
        return replace(reply, weight=float(max(1, client.steps(epochs=1))))

    # statistics (4.2)

    def statistics(self, client: Client, message: Message) -> Reply:
        """Report the count and sums of features z, z z^T and phi(z) for each class, Eq. 9 and Algorithm 2 [1]."""
        client.receive(message["model"])
        crop = None if self.statistics_area == 1 else partial(resized_crop_flip, least=self.statistics_area)
        z, y = features(client, crop)  # [n, d], [n]
        omega = self.frequencies(z.shape[1], message["seed"]).to(z.device)
        sums = class_sums(z, y)
        for c, of_class in sums.items():
            of_class["phi"] = fourier_sum(z[y == c], omega)
        return client.reply(classes=sums)

    def frequencies(self, dim: int, seed: int) -> Tensor:
        """Return the frequencies Omega [D/2, d] of Eq. 3. Messages carry only their seed."""
        return draw_frequencies(dim, self.rf_dim, self.gamma_rbf, self.rf_type, seed)

    @property
    def sees_each(self) -> tuple[str, ...]:
        return ("features",) if self.classifier == "oracle" else ()

    # at the server

    def message(self, server: Server) -> Message:
        r = server.round - 1  # [4]
        return super().message(server) | {"beta": self.beta1 * 0.5 * (1 + math.cos(math.pi * r / server.rounds))}

    def round(self, server: Server, fleet: Fleet) -> None:
        train_clients(self, server, fleet, weights=self.weights(server, fleet))

    def weights(self, server: Server, fleet: Fleet) -> dict[int, float] | None:
        """Return each client's weight in the average, by id; None if clients are weighted by sample count."""
        if self.weighting == "samples":
            return None
        steps = partial(server.config.local.step_count, epochs=1)
        return {id: float(max(1, steps(n))) for id, n in fleet.sizes.items()}

    @property
    def finishes(self) -> bool:
        return self.safs

    def prepare(self, task: Task, config: Config, model: SplitModel) -> None:
        check_linear_classifier(self.name, config, model, bias=False)
        if not self.safs:
            return
        check_class_uploads(task, model, self.class_sums_like(model.dim))
        if self.classifier not in CLOSED_FORMS:
            self.bank(model.dim)
        if self.classifier == "safs" and not (self.aligner or self.mmd):
            raise ConfigError(
                "method.aligner: without it and method.mmd, synthetic features do not approach real ones (false). "
                "Set one of them to true, or method.safs=false.",
                code="config.conflict",
                key="method.aligner",
                value=False,
            )

    def class_sums_like(self, d: int) -> Tree:
        """Return empty tensors with the shapes of one class's feature sums, for features of width d."""
        return {"n": 1, "z": sums_like(d), "zz": sums_like(d * (d + 1) // 2), "phi": sums_like(self.rf_dim)}

    def finish(self, server: Server, fleet: Fleet) -> None:
        """Aggregate class statistics, synthesise features (Algorithms 2 and 1), and train the classifier on them."""
        seed, d = server.seed("fourier"), server.model.dim
        of_class = self.class_sums_like(d)
        message = {"model": tree.snapshot(encoder(server.model)), "seed": seed}
        got = fleet.ask(
            self.statistics,
            fleet.everyone,
            message,
            classes=total.within(dict.fromkeys(range(server.model.classes), of_class))
            .counting("n")
            .where(moments_fault)
            .over_samples(partial(sums_fault, **server.feature_limits))
            .bounded(sample_lengths(server.config.privacy.clip) | {"phi": 1.0}, nearest_moments),
        )
        sums = dict(
            sorted(got["classes"].items(), key=lambda entry: (entry[1]["n"], entry[0]))
        )  # largest bank first [7]
        if self.classifier in CLOSED_FORMS:  # [10]
            server.state["classifier"] = closed_form(self.classifier, sums, server.model.classes)
            return
        sizes = bank_sizes([of_class["n"] for of_class in sums.values()], *self.bank(server.model.dim))
        with server.timings.time("synthesis"):
            if self.classifier == "safs":
                made = fleet.map(
                    self.synthesise,
                    [
                        {"sums": sums[c], "size": size, "fourier": seed, "bank": seed_for(server.seed("bank"), c)}
                        for c, size in zip(sums, sizes, strict=True)
                    ],
                )
            elif self.classifier == "oracle":
                made = self.real(server, fleet, dict(zip(sums, sizes, strict=True)))
            else:
                made = [{"z": z} for z in draws(self.classifier, sums, sizes, server.seed("bank"))]
        z = torch.cat([m["z"] for m in made]).to(server.device)  # [M, d]
        y = torch.repeat_interleave(torch.tensor(list(sums)), torch.tensor(sizes)).to(server.device)
        with server.timings.time("re-training") as progress:
            loss = self.retrain(server, z, y, progress)
        most = min(len(sums), SHOWN_CLASSES)  # spread evenly over the class sizes, including both ends
        shown = [round(i * (len(sums) - 1) / max(most - 1, 1)) for i in range(most)]
        shown_z = [made[i]["z"][:SHOWN_FEATURES] for i in shown]
        shown_y = torch.tensor(list(sums))[shown].repeat_interleave(torch.tensor([len(part) for part in shown_z]))
        server.state["synthetic"] = {"z": torch.cat(shown_z), "y": shown_y}
        server.log(synthetic=len(z), retrain_loss=loss)
        if self.classifier == "safs":
            jitter = max(of_class["jitter"] for of_class in made)
            server.log(jitter=jitter, mmd=class_mean(made, "mmd"), arr=class_mean(made, "arr"))  # [8]

    def last_phase(self, spec: TaskSpec, model: SplitModel) -> str:
        """Describe the synthesis after the last round, with a duration estimated from timed steps."""
        seconds = self.last_phase_seconds(spec, model)
        if seconds is None:
            return ""
        work = f"synthesis of {spec.classes} classes in {self.synthesis_steps} steps each"
        quick = "" if self.synthesis_steps <= QUICK["synthesis_steps"] else "; method.preset=quick takes 5 steps"
        return f"{work}, {about(seconds)}{quick}"

    def last_phase_seconds(self, spec: TaskSpec, model: SplitModel) -> float | None:
        if not self.safs or self.classifier != "safs" or not (self.mmd or self.arr) or not self.synthesis_steps:
            return None
        low, high = self.bank(model.dim)
        mean = torch.zeros(model.dim, dtype=torch.float64)
        factor = torch.eye(model.dim, dtype=torch.float64)
        target = Target(mean, factor, torch.zeros(self.rf_dim), self.frequencies(model.dim, 0).cpu())
        parts = Parts(self.aligner, self.mmd, self.arr)
        ends: list[float] = []
        synthesise(
            target,
            high,
            parts,
            TIMED_STEPS,
            self.synthesis_lr,
            self.synthesis_momentum,
            torch.Generator().manual_seed(0),
            progress=lambda *_: ends.append(time.perf_counter()),
        )
        step = (ends[-1] - ends[0]) / (TIMED_STEPS - 1)  # without the first, which is slower
        return step * self.synthesis_steps * spec.classes * (low + high) / (2 * high)

    def real(self, server: Server, fleet: Fleet, sizes: dict[int, int]) -> list[Tree]:
        """Return real features of each class, drawn with replacement from features that clients upload.

        Args:
            server: The server.
            fleet: The clients.
            sizes: Number of features to draw, by class.
        """
        most = max(sizes.values())
        of_class = {"n": 1, "z": torch.empty(most, server.model.dim, device="meta")}
        message = {"model": tree.snapshot(encoder(server.model)), "size": most}
        replies = fleet.ask(
            self.hand_over,
            fleet.everyone,
            message,
            features=each.within(dict.fromkeys(range(server.model.classes), of_class))
            .counting("n")
            .up_to(LONGEST_FEATURE),
        )["features"]
        z = bootstrap_of_clients(list(replies.values()), torch.Generator().manual_seed(server.seed("bank")))
        return [{"z": z[c][:size]} for c, size in sizes.items()]

    def hand_over(self, client: Client, message: Message) -> Reply:
        """Report, for each class of the client, the count and `size` real features drawn with replacement.

        This is only used by the oracle.
        """
        client.receive(message["model"])
        return client.reply(features=class_bootstrap(*features(client), message["size"], client.order))

    def synthesise(self, item: Tree) -> Tree:
        """Synthesise the features of one class, Algorithm 1."""
        sums = item["sums"]
        of_class = moments_from_sums(sums)  # Eq. 10 [2]
        factor, jitter = cholesky(of_class.cov, 1e-5)  # Eq. 11 and appendix B
        target = Target(
            of_class.mean,
            factor,
            sums["phi"] / sums["n"],
            self.frequencies(len(of_class.mean), item["fourier"]).to(factor.device),
        )
        rate = self.synthesis_lr * (item["size"] if self.synthesis_per == "sample" else 1)
        parts = Parts(self.aligner, self.mmd, self.arr)
        draw = torch.Generator().manual_seed(item["bank"])
        z, (start, end) = synthesise(
            target,
            item["size"],
            parts,
            self.synthesis_steps,
            rate,
            self.synthesis_momentum,
            draw,
            self.bank_start,
            report_steps,
        )
        floor = bootstrap_floor(target.phi, target.omega, of_class.mean, of_class.cov, item["size"])
        return {
            "z": z,
            "jitter": jitter,
            "arr": {"start": start.arr, "end": end.arr},
            "mmd": {"start": start.mmd, "end": end.mmd, "floor": floor},
        }

    def retrain(self, server: Server, z: Tensor, y: Tensor, progress: StageProgress | None = None) -> float:
        """Train the classifier on synthetic features (4.3); return the loss of the last epoch.

        Args:
            server: The server, whose state gets the trained classifier.
            z: Synthetic features, [n, d].
            y: Their labels, [n].
            progress: Called after each epoch with the numbers of completed and of all epochs.
        """
        weight = server.model.state_dict()["classifier.weight"].clone()
        bound = 0.0 if self.bias == "zero" else 1 / math.sqrt(server.model.dim)  # [3]
        generator = torch.Generator().manual_seed(server.seed("bias"))
        bias = torch.empty(len(weight)).uniform_(-bound, bound, generator=generator).to(server.device)
        classifier = with_classifier(server.model, weight, bias).classifier
        loss = fit_classifier(
            classifier,
            z,
            y,
            epochs=self.retrain_epochs,
            batch=self.retrain_batch,
            lr=self.retrain_lr,
            momentum=self.retrain_momentum,
            weight_decay=self.retrain_weight_decay,
            seed=server.seed("retrain"),
            schedule=self.retrain_schedule,
            progress=progress,
        )
        server.state["classifier"] = tree.snapshot(classifier.state_dict())
        return loss

    # evaluated model: without the projector, which is only used in training

    def global_model(self, server: Server) -> SplitModel:
        if "classifier" not in server.state:
            return with_classifier(server.model, server.model.state_dict()["classifier.weight"], None)
        return with_classifier(
            server.model, **tree.to(server.state["classifier"], server.device), longest=server.config.privacy.longest
        )


def encoder(model: SplitModel) -> StateDict:
    """Return the encoder's parameters and buffers, which are sent to clients."""
    return model.entries("encoder.")


def class_mean(made: list[Tree], loss: str) -> dict[str, float]:
    """Average each value of the loss `loss` over classes; return the averages by name."""
    return {name: sum(of_class[loss][name] for of_class in made) / len(made) for name in made[0][loss]}


def sums_like(size: int) -> Tensor:
    """Return an empty tensor, float64 [size], with the shape of a sum of vectors over samples."""
    return torch.empty(size, dtype=torch.float64, device="meta")
