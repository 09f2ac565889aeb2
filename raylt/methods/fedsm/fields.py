"""The hyper-parameters of FedSM (semantic mixup), and what is refused before a run starts."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import field_validator, model_validator

from raylt.config import Config
from raylt.core.method import Method
from raylt.data.task import Task
from raylt.errors import ConfigError
from raylt.hyper import Choice, LogUniform, Uniform, hp
from raylt.methods.fedsm.mixup import Partner, Similarity, Unit
from raylt.models.clip import open_teacher
from raylt.models.split import SplitModel
from raylt.models.teacher import Wording

# 91 rounds: the code's option is 90, and its comparison adds one
OFFICIAL: dict[str, Any] = {"retrain": "after", "norm": "l2", "wording": "label", "unit": "sample", "lam_low": 0.35,
                            "lam_high": 0.95, "rounds": 91, "epochs": 60, "batch": 256}


class Fields(Method):
    """Equation, table and figure numbers are the journal's; what is not stated there stands in `method.py`."""

    later: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "retraining": ("similarity", "softmax", "partner", "unit", "lam_low", "lam_high", "size", "norm", "retrain",
                       "encoders", "rounds", "epochs", "batch", "lr")}

    preset: Literal["paper", "official"] = hp("paper", Choice("paper", "official"), "official: as the authors' code")
    teacher: str = hp("ViT-B-32/openai", Choice("ViT-B-32/openai", "ViT-B-32/metaclip_400m", "none"), "open_clip's "
                      "MODEL/TAG[:FILE], local-dir:FOLDER or npz:FILE; none: no distillation, uniform relevance")
    kd: float = hp(1.0, Uniform(0.0, 2.0), "weight of the KL term, Eq. 1", ge=0)
    temperature: float = hp(3.0, LogUniform(0.5, 10), "T of the KL term; from the code", gt=0)
    scale: float = hp(100.0, LogUniform(10, 200), "of q, Eq. 1, and of fine-tuning's logits; CLIP's", gt=0)
    similarity: Similarity = hp("cosine", Choice("cosine", "dot", "l1", "l2"), "of two class names, Eq. 5, Fig. 4")
    softmax: float | None = hp(None, Choice(None, 0.02, 0.05, 0.1, 1.0), "temperature of Nonlinear, Eq. 5; None: none",
                               gt=0)
    wording: Wording = hp("phrase", Choice("phrase", "label"), "of the texts of Eq. 5")
    partner: Partner = hp("probabilistic", Choice("probabilistic", "deterministic", "random", "inverted"), "v of Eq. "
                          "4, Table III; inverted: what is least alike is drawn most, a control")
    unit: Unit = hp("class", Choice("class", "sample"), "what alpha weights: classes, or samples by their class (code)")
    lam_low: float = hp(0.65, Uniform(0.2, 0.8), "smallest lambda, Eq. 4, Table V", ge=0, le=1)
    lam_high: float = hp(0.9, Uniform(0.8, 1.0), "largest lambda, Eq. 4, Table V", ge=0, le=1)
    size: int = hp(100, Choice(50, 100, 150, 200), "S, pseudo-features per class, Eq. 6, Fig. 5", ge=1)
    norm: Literal["none", "l2"] = hp("none", Choice("none", "l2"), "of features and prototypes that are mixed")
    retrain: Literal["before", "after"] = hp("before", Choice("before", "after"), "local classifiers, before they are "
                                             "averaged, Algorithm 1; or new ones after it, only to be judged (code)")
    encoders: Literal["global", "trained"] = hp("global", Choice("global", "trained"), "whose features the prototypes "
                                                "of Eq. 3 are means of: the global encoder's over all clients, or "
                                                "those that the round's clients have trained")
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

    def stages(self, rounds: int) -> dict[str, int]:
        return super().stages(rounds) | {"retraining": max(0, rounds - self.rounds)}

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
        related = self.partner in ("deterministic", "inverted") and self.rounds > 0
        if self.teacher == "none" and (self.finetune or related):
            what = "method.finetune=true" if self.finetune else f"method.partner={self.partner}"
            raise ConfigError(f"method.teacher = none: {what} needs a teacher; name one, as ViT-B-32/openai")
        if self.encoders == "trained" and self.retrain == "after":
            raise ConfigError("method.encoders = trained: with method.retrain=after no client's encoder is used, only "
                              "their average; set method.encoders=global or method.retrain=before")
        if self.wordings:
            open_teacher(self.teacher).check(task, self.wordings, model.dim if self.finetune else None)
