"""Teachers for distillation: a frozen image-text model, or a file of its precomputed features."""

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence, Set
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from raylt.data.images.decoding import ArrayHeaders, read_npz
from raylt.data.samples import Samples
from raylt.data.splits.split import hash_labels
from raylt.data.task import Task
from raylt.errors import ConfigError, DataError, as_cause, on_one_line

Wording = Literal["phrase", "label"]
TrainedPart = Literal["projection", "encoder"]  # the last linear layer of an image tower, or the whole tower
TEXTS: dict[Wording, str] = {"phrase": "text", "label": "text_label"}
# Allowed kinds of dtype and number of dimensions, by array.
_LAYOUT = {
    "image": ("f", 2),
    "y": ("iu", 1),
    "text": ("f", 2),
    "text_label": ("f", 2),
    "class_names": ("U", 1),
    "about": ("U", 0),
}
MAX_TEXT_BYTES = 4096  # size limit of a class name or of `about`, at four bytes per character
ALWAYS_ALLOWED_BYTES = 2**28  # size of arrays that any file may declare
MAX_DENSITY = 64  # maximum bytes of larger arrays per byte of the file; features hardly compress
WNID = re.compile(r"n\d{8}")


class Teacher(ABC):
    """Base class of teachers: a frozen image-text model.

    Args:
        name: The teacher's name in a configuration.
    """

    def __init__(self, name: str):
        self.name = name

    @property
    def about(self) -> str:
        """Return a description of the teacher for the results of a run."""
        return self.name

    @property
    @abstractmethod
    def dim(self) -> int:
        """Return d, the dimension of the joint image-text space."""

    def check(
        self,
        task: Task,
        wordings: Set[Wording],
        student: int | None = None,
        trained: TrainedPart = "projection",
    ) -> None:
        """Download missing files, and raise an error for every problem that would otherwise stop a run later.

        Args:
            task: The data.
            wordings: Wordings of the texts that the run needs.
            student: Length of the student's features, if the run compares them with the teacher's and trains the
                teacher; otherwise None.
            trained: The part of the teacher's image tower that the run then trains.

        Raises:
            ConfigError: A file is missing or does not fit; the message names its expected path and the alternatives.
        """
        self._check(task, wordings, None if student is None else trained)
        if student not in (None, self.dim):
            raise ConfigError(
                f"model: its features have d = {student}, the features of method.teacher = {self.name} have "
                f"{self.dim}. Set method.finetune=false, or a model with the same d: resnet8_proj, cnn_proj and "
                "resnet50_proj have the d of CLIP's ViT-B-32.",
                code="model.teacher-mismatch",
                key="model",
                value=student,
                teacher=self.name,
            )

    @abstractmethod
    def _check(self, task: Task, wordings: Set[Wording], trained: TrainedPart | None) -> None:
        """Run the checks that are specific to this kind of teacher, as part of `check`.

        Args:
            task: The data.
            wordings: Wordings of the texts that the run needs.
            trained: The part of the image tower that the run trains, or None.
        """

    @abstractmethod
    def text(self, names: Sequence[str], wording: Wording, device: torch.device) -> Tensor:
        """Return the teacher's embeddings of class names, float32 [C, d], on the CPU."""

    @abstractmethod
    def images(self, samples: Samples) -> Tensor:
        """Return the features [n, w] of all samples without augmentation, float32 on the samples' device.

        `projection` maps the features to the joint space. They are not normalised.
        """

    @abstractmethod
    def projection(self, device: torch.device) -> Tensor | None:
        """Return the last linear layer of the image tower, float32 [w, d]; None if `images` already applies it."""


class FeatureFile(Teacher):
    """A teacher whose features were precomputed and stored in an npz file.

    image [N, d]        features of all training samples of the source, in order; float16 or float32
    y [N]               labels of the samples, to check that the file belongs to the source
    text [C, d]         features of the phrases "a photo of a {label}"
    class_names [C]     class names in the order of the labels
    text_label [C, d]   optional: features of the labels alone
    about               optional: the origin of the features
    """

    def __init__(self, path: Path):
        super().__init__(f"npz:{path}")
        self.path = path

    @cached_property
    def dim(self) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self._read("image")["image"].shape[-1]

    @property
    def about(self) -> str:
        entries = self._read(optional=("about",))
        return f"{on_one_line(str(entries['about']))} ({self.name})" if entries else self.name

    def _check(self, task: Task, wordings: Set[Wording], trained: TrainedPart | None) -> None:
        if trained == "encoder":
            raise self._mismatch(
                "a file of features has no image encoder that could be trained",
                "Give a model of open_clip, such as ViT-B-32/openai, or set method.teacher_trains=projection.",
            )
        texts = [TEXTS[wording] for wording in sorted(wordings)]
        arrays = self._read("image", "y", "class_names", *texts)
        if arrays["class_names"].tolist() != list(task.class_names):
            raise self._mismatch(
                f"class_names are not the classes of {task.name} ({', '.join(task.class_names[:3])}, ...) in order",
                f"Compute the features of {task.name}.",
            )
        labels = arrays["y"]
        if labels.dtype.kind not in "iu" or hash_labels(labels) != task.split.labels_sha256:
            raise self._mismatch(
                f"y are not the labels of {task.name}'s training samples in order",
                f"Compute the features of {task.name}.",
            )
        dim = arrays["image"].shape[-1] if arrays["image"].ndim else 0
        shapes = {"image": (len(labels), dim)} | dict.fromkeys(texts, (task.classes, dim))
        for key, shape in shapes.items():
            array = arrays[key]
            if array.dtype not in (np.float16, np.float32) or array.shape != shape or not np.isfinite(array).all():
                raise self._mismatch(
                    f"{key} is {array.dtype} {list(array.shape)}",
                    f"Give finite float16 or float32 {list(shape)}.",
                )

    def _mismatch(self, problem: str, remedy: str) -> ConfigError:
        return teacher_error(self.name, problem, remedy, code="model.teacher-mismatch")

    def text(self, names: Sequence[str], wording: Wording, device: torch.device) -> Tensor:
        return torch.from_numpy(self._read(TEXTS[wording])[TEXTS[wording]]).float()

    def images(self, samples: Samples) -> Tensor:
        assert samples.ids is not None
        return torch.from_numpy(self._read("image")["image"][samples.ids]).float().to(samples.x.device)

    def projection(self, device: torch.device) -> Tensor | None:
        """Return the identity matrix as the initial projection, since the features are already in the joint space."""
        return torch.eye(self.dim, device=device)

    def _read(self, *keys: str, optional: Sequence[str] = ()) -> dict[str, np.ndarray]:
        try:
            entries = read_npz(self.path, (*keys, *optional), self._check_headers)
            if absent := [key for key in keys if key not in entries]:
                raise DataError(f"it has no {', '.join(absent)}", code="data.malformed")
            return entries
        except DataError as error:
            missing = error.code == "data.not-found"
            raise teacher_error(
                self.name,
                f"the file cannot be read ({'no such file' if missing else as_cause(error)})",
                "Give an npz file with image, y, text and class_names, and with text_label for method.wording=label.",
                code="model.teacher-unavailable" if missing else "model.teacher-mismatch",
            ) from None

    def _check_headers(self, headers: ArrayHeaders) -> None:
        """Raise an error if an array has a wrong shape or type, before it is read into memory.

        Raises:
            ValueError: An array has another shape than a teacher's, or declares an implausibly large size.
        """
        for key, (shape, dtype) in headers.items():
            kinds, dimensions = _LAYOUT[key]
            if dtype.kind not in kinds or len(shape) != dimensions or dtype.itemsize > MAX_TEXT_BYTES:
                raise ValueError(f"{key} is {dtype} {list(shape)}")
        declared = sum(math.prod(shape) * dtype.itemsize for shape, dtype in headers.values())
        limit = max(ALWAYS_ALLOWED_BYTES, MAX_DENSITY * self.path.stat().st_size)
        if declared > limit:
            raise ValueError(f"its arrays declare {declared:,} bytes, more than the {limit:,} that are plausible")


def describe(names: Sequence[str], wording: Wording, setting: str = "method.teacher") -> list[str]:
    """Return a text for each class name: "a photo of a {label}", or the label alone.

    Underscores become spaces, and ImageNet's 1000 ids become the usual names.

    Args:
        names: The class names.
        wording: "phrase" or "label".
        setting: The setting that requires the texts, for error messages.

    Raises:
        ConfigError: The names are WordNet ids, but not all 1000 of ImageNet.
    """
    if any(WNID.fullmatch(name) for name in names):
        if len(names) != 1000:
            raise ConfigError(
                f"{setting}: a text encoder needs readable class names, which only all 1000 ids of ImageNet have "
                f"({names[0]}, ...). Give the classes readable names.",
                code="model.teacher-mismatch",
                key=setting,
                name=names[0],
            )
        from open_clip import IMAGENET_CLASSNAMES  # in the order of the ids

        rank = {wnid: position for position, wnid in enumerate(sorted(names))}
        names = [IMAGENET_CLASSNAMES[rank[name]] for name in names]
    labels = [name.replace("_", " ") for name in names]
    return [f"a photo of a {label}" for label in labels] if wording == "phrase" else labels


def teacher_error(name: str, problem: str, remedy: str, *, code: str, setting: str = "method.teacher") -> ConfigError:
    """Return the error for an image-text model that cannot be used.

    Args:
        name: The model's name.
        problem: The problem, without a full stop.
        remedy: The remedy, as a sentence.
        code: Code of the error.
        setting: The setting that names the model.
    """
    return ConfigError(f"{setting}: {problem} ({name}). {remedy}", code=code, key=setting, value=name)
