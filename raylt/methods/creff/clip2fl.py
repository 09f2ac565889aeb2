"""CLIP2FL: CReFF with an image-text teacher for the clients and for the federated features (Shi et al., AAAI 2024).

Equation numbers are the paper's. Departures from the text, and from the authors' code for details that the text does
not state, in addition to CReFF's:
[1] The teacher's similarities are scaled by 100, CLIP's own scale, and the KL term has temperature 3 and the factor
    T^2, as in the code. Teacher features are encoded once, from images without augmentation.
[2] The prototype contrast, Eq. 8, is the cross-entropy of F T^T / 0.1 over the classes' unit texts, F unscaled. The
    code repeats each text once per feature and leaves out the text of the feature itself, which is the same up to a
    share of 1 / 100.
[3] Only matched features are attracted by their texts: the features of classes that some client of the round owns. The
    contrast is the mean over these features; the code divides by the number of all classes.
The evaluated classifier is trained on federated features, so the distillation acts only through the encoder. With a
frozen encoder, CLIP2FL differs from CReFF only in the contrast.
"""

from collections.abc import Callable
from typing import ClassVar

import torch
from pydantic import field_validator
from torch import Tensor
from torch.nn import functional as F

from raylt.config import Config
from raylt.core.client import Client, Message
from raylt.core.fleet.fleet import Fleet
from raylt.core.server import Server
from raylt.core.training.features import teacher_features
from raylt.core.training.loss_terms import Terms
from raylt.core.training.sgd import Objective
from raylt.data.samples import Batch
from raylt.data.task import Task
from raylt.errors import ConfigError
from raylt.hyper import Choice, LogUniform, Uniform, hp
from raylt.methods.creff.method import CReFF
from raylt.models.clip import open_teacher
from raylt.models.split import SplitModel
from raylt.ops.distillation import distillation
from raylt.tree import Tree


class CLIP2FL(CReFF):
    """CReFF with distillation from an image-text teacher and a contrastive loss on prototypes.

    With kd = 0 and contrast = 0 it equals CReFF and opens no teacher.
    """

    name: ClassVar[str] = "clip2fl"
    paper: ClassVar[str] = "Shi et al., AAAI 2024"
    link: ClassVar[str | None] = "https://arxiv.org/abs/2312.08648"

    teacher: str = hp(
        "ViT-B-32/openai",
        Choice("ViT-B-32/openai", "ViT-B-32/metaclip_400m"),
        "open_clip's MODEL/TAG[:FILE], local-dir:FOLDER or npz:FILE",
    )
    kd: float = hp(1.0, Uniform(0.0, 2.0), "weight of the KL term; from the code", ge=0)
    temperature: float = hp(3.0, LogUniform(0.5, 10), "temperature T of the KL term; from the code", gt=0)
    scale: float = hp(100.0, LogUniform(10, 200), "scale of the teacher's similarities; CLIP's", gt=0)
    contrast: float = hp(0.001, LogUniform(1e-4, 1.0), "weight of the prototype contrast, Eq. 8; from the code", ge=0)
    contrast_temperature: float = hp(
        0.1, LogUniform(0.01, 1.0), "temperature of the prototype contrast; from the code", gt=0
    )

    @field_validator("teacher")
    @classmethod
    def _absolute(cls, name: str) -> str:
        return open_teacher(name, "; without a teacher it is method=creff").name

    @property
    def taught(self) -> bool:
        """Return whether the settings require a teacher."""
        return self.kd > 0 or self.contrast > 0

    @property
    def sees_images(self) -> bool:
        return self.taught and not self.teacher.startswith("npz:")

    @property
    def image_teacher(self) -> str | None:
        return self.teacher

    def prepare(self, task: Task, config: Config, model: SplitModel) -> None:
        super().prepare(task, config, model)
        if not self.taught:
            return
        if not self.contrast and not any(parameter.requires_grad for parameter in model.encoder.parameters()):
            raise ConfigError(
                "method.kd: the distillation acts on the training of the encoder, which has no trained parameters "
                f"({self.kd:g}). Set trainable to norm, last:N or lora:R, or use method=creff.",
                code="config.conflict",
                key="method.kd",
                value=self.kd,
            )
        teacher = open_teacher(self.teacher)
        teacher.check(task, {"phrase"})
        if self.contrast and model.dim != teacher.dim:
            raise ConfigError(
                f"model: method.contrast compares features of {config.model} (d = {model.dim}) with texts of "
                f"method.teacher = {teacher.name} (d = {teacher.dim}). Set method.contrast=0. CLIP's ViT-B-32 "
                "also fits model=resnet8_proj, cnn_proj or resnet50_proj.",
                code="model.wrong-width",
                key="model",
                value=config.model,
                dim=model.dim,
                needed=teacher.dim,
            )

    @property
    def terms(self) -> tuple[str, ...]:
        return ("cross_entropy", "distillation") if self.kd else ()

    def objective(self, client: Client, message: Message) -> Objective:
        """Return the cross-entropy plus the divergence from the teacher's prediction for each image [1]."""
        if not self.kd:
            return super().objective(client, message)
        model = client.model
        similarity = teacher_features(client, self.teacher).float() @ message["text"].T  # [n, C]
        log_q = (self.scale * similarity / self.temperature).log_softmax(1)

        def terms(batch: Batch) -> dict[str, Tensor]:
            logits = model(batch.x)
            return {
                "cross_entropy": F.cross_entropy(logits, batch.y),
                "distillation": self.kd
                * distillation(logits, log_teacher=log_q[batch.rows], temperature=self.temperature),
            }

        return Terms(client, terms)

    def start(self, server: Server, fleet: Fleet) -> None:
        super().start(server, fleet)
        if self.taught:
            teacher = open_teacher(self.teacher)
            text = teacher.text(server.spec.class_names, "phrase", server.device)
            server.state |= {"text": F.normalize(text, dim=1), "teacher": teacher.about}

    def message(self, server: Server) -> Message:
        return super().message(server) | ({"text": server.state["text"]} if self.kd else {})

    def round(self, server: Server, fleet: Fleet) -> None:
        super().round(server, fleet)
        if self.taught:
            server.log(teacher=server.state["teacher"])

    def match(self, server: Server, gradients: Tree, penalty: Callable[[Tensor], Tensor] | None = None) -> float:
        if self.contrast:
            penalty = self.prototype_contrast(server, torch.tensor(sorted(gradients)))
        return super().match(server, gradients, penalty)

    def prototype_contrast(self, server: Server, classes: Tensor) -> Callable[[Tensor], Tensor]:
        """Return a function for the contrastive loss of federated features and text prototypes, Eq. 8 [2] [3]."""
        text = server.state["text"].to(server.device)
        y = classes.repeat_interleave(self.per_class).to(server.device)
        return lambda h: self.contrast * F.cross_entropy(h.flatten(0, 1) @ text.T / self.contrast_temperature, y)
