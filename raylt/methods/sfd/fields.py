"""The hyper-parameters of SFD, and what is refused before the first round."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import model_validator

from raylt.core.method import Method
from raylt.errors import ConfigError
from raylt.hyper import Choice, LogUniform, Uniform, hp
from raylt.methods.sfd.controls import Classifier

OFFICIAL: dict[str, Any] = {"delta": "negatives", "rf_dim": 3000, "weighting": "batches", "bias": "random",
                            "schedule": "iteration", "statistics_area": 0.93}


class Fields(Method):
    """Equation, table and appendix numbers are the paper's; "from the code": they stand in the authors' code only."""

    later: ClassVar[Mapping[str, tuple[str, ...]]] = {"finish": (
        "statistics_area", "rf_dim", "rf_type", "gamma_rbf", "m_min", "m_max", "synthesis_steps", "synthesis_lr",
        "synthesis_per", "synthesis_momentum", "epochs", "batch", "lr", "momentum", "weight_decay", "schedule", "bias",
        "safs", "aligner", "mmd", "arr", "classifier")}

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
    synthesis_per: Literal["bank", "sample"] = hp("bank", Choice("bank", "sample"), "what synthesis_lr is the rate of: "
                                                  "the bank, whose mean loss gives a sample 1/M_c of a gradient; or "
                                                  "each sample, M_c times as much; ours")
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

    classifier: Classifier = hp("safs", Choice("safs", "gaussian", "means", "ncm", "ridge", "oracle"), "what the last "
                                "phase makes it of; all but safs are controls of ours: CCVR's Gaussians, class means "
                                "with noise, FedNCM's, Fed3R's, and real features, an oracle")

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, fields: dict[str, Any]) -> dict[str, Any]:
        return OFFICIAL | fields if fields.get("preset") == "official" else fields

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
