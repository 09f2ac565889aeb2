"""CLIP2FL: CReFF whose clients learn from an image-text model, and whose features are drawn to its texts (Shi et al.,
AAAI 2024).

Equation numbers are the paper's. Departures from the text, and from the authors' code where the text is silent, beside
CReFF's:
[1] The teacher's similarities are scaled by 100, CLIP's own, and the KL term has temperature 3 and the factor T^2, as
    in the code; teacher features are encoded once, of images that are not augmented.
[2] The prototype contrast, Eq. 8, is the cross-entropy of F T^T / 0.1 over the classes' unit texts, F as it is; the
    code repeats each text as often as there are features and leaves a feature's own out, which is the same up to a
    share of 1 / 100.
[3] Only features that are matched are drawn to their texts: those of classes that some client of the round owns.
"""

from collections.abc import Callable
from typing import ClassVar

from pydantic import field_validator
from torch import Tensor
from torch.nn import functional as F

from raylt.config import Config
from raylt.core.client import Client, Message
from raylt.core.fleet import Fleet
from raylt.core.server import Server
from raylt.core.teaching import encoded
from raylt.core.terms import Terms
from raylt.core.training import Objective
from raylt.data.samples import Batch
from raylt.data.task import Task
from raylt.errors import ConfigError
from raylt.hyper import Choice, LogUniform, Uniform, hp
from raylt.methods.creff.method import CReFF
from raylt.models.clip import open_teacher
from raylt.models.split import SplitModel
from raylt.ops.distillation import distillation
from raylt.recordable import recordable


class CLIP2FL(CReFF):
    """kd = 0 and contrast = 0 is CReFF, and then no teacher is opened."""

    name: ClassVar[str] = "clip2fl"
    paper: ClassVar[str] = "Shi et al., AAAI 2024"
    link: ClassVar[str | None] = "https://arxiv.org/abs/2312.08648"

    teacher: str = hp("ViT-B-32/openai", Choice("ViT-B-32/openai", "ViT-B-32/metaclip_400m"), "open_clip's "
                      "MODEL/TAG[:FILE], local-dir:FOLDER or npz:FILE")
    kd: float = hp(1.0, Uniform(0.0, 2.0), "weight of the KL term; from the code", ge=0)
    temperature: float = hp(3.0, LogUniform(0.5, 10), "T of the KL term; from the code", gt=0)
    scale: float = hp(100.0, LogUniform(10, 200), "of the teacher's similarities; CLIP's", gt=0)
    contrast: float = hp(0.001, LogUniform(1e-4, 1.0), "weight of the prototype contrast, Eq. 8; from the code", ge=0)
    contrast_temperature: float = hp(0.1, LogUniform(0.01, 1.0), "of the prototype contrast; from the code", gt=0)

    @field_validator("teacher")
    @classmethod
    def _absolute(cls, name: str) -> str:
        return open_teacher(name).name

    @property
    def taught(self) -> bool:
        """Whether a teacher is needed."""
        return self.kd > 0 or self.contrast > 0

    def prepare(self, task: Task, config: Config, model: SplitModel) -> None:
        if not self.taught:
            return
        teacher = open_teacher(self.teacher)
        teacher.check(task, {"phrase"})
        if self.contrast and model.dim != teacher.dim:
            raise ConfigError(f"model = {config.model}: its features have d = {model.dim}, the texts of method.teacher "
                              f"= {teacher.name} {teacher.dim}, and method.contrast compares them; set "
                              "model=resnet8_proj, cnn_proj or resnet50_proj with CLIP's ViT-B-32, or "
                              "method.contrast=0")

    @property
    def terms(self) -> tuple[str, ...]:
        return ("cross_entropy", "distillation") if self.kd else ()

    def objective(self, client: Client, message: Message) -> Objective:
        """Cross-entropy, and the divergence from what the teacher says of each image [1]."""
        if not self.kd:
            return super().objective(client, message)
        model, similarity = client.model, encoded(client, self.teacher).float() @ message["text"].T      # [n, C]
        log_q = (self.scale * similarity / self.temperature).log_softmax(1)

        @recordable
        def terms(batch: Batch) -> dict[str, Tensor]:
            logits = model(batch.x)
            return {"cross_entropy": F.cross_entropy(logits, batch.y),
                    "distillation": self.kd * distillation(logits, log_q[batch.rows], self.temperature)}

        return Terms(client, terms)

    def start(self, server: Server, fleet: Fleet) -> None:
        super().start(server, fleet)
        if self.taught:
            teacher = open_teacher(self.teacher)
            text = teacher.text(server.facts.class_names, "phrase", server.device)
            server.state |= {"text": F.normalize(text, dim=1), "teacher": teacher.about}

    def message(self, server: Server) -> Message:
        return super().message(server) | ({"text": server.state["text"]} if self.kd else {})

    def round(self, server: Server, fleet: Fleet) -> None:
        super().round(server, fleet)
        if self.taught:
            server.log(teacher=server.state["teacher"])

    def also(self, server: Server, classes: Tensor) -> Callable[[Tensor], Tensor] | None:
        """The prototype contrast of the features that are matched, Eq. 8 [2] [3]."""
        if not self.contrast:
            return None
        text = server.state["text"].to(server.device)
        y = classes.repeat_interleave(self.per_class).to(server.device)
        return lambda h: self.contrast * F.cross_entropy(h.flatten(0, 1) @ text.T / self.contrast_temperature, y)
