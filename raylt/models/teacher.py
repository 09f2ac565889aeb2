"""`Teacher`: a frozen image-text model; `FeatureFile`: one that has done its work elsewhere."""

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence, Set
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from raylt.data.samples import Samples
from raylt.data.split import hash_labels
from raylt.data.task import Task
from raylt.errors import ConfigError

Wording = Literal["phrase", "label"]
TEXTS: dict[Wording, str] = {"phrase": "text", "label": "text_label"}
WNID = re.compile(r"n\d{8}")


class Teacher(ABC):
    """One image-text model, frozen.

    Args:
        name: what a configuration calls it.
    """

    def __init__(self, name: str):
        self.name = name

    @property
    def about(self) -> str:
        """What a result must say of it."""
        return self.name

    @property
    @abstractmethod
    def dim(self) -> int:
        """d of the joint space."""

    def check(self, task: Task, wordings: Set[Wording], student: int | None = None) -> None:
        """Fetches what is missing, and raises what would end a run later.

        Args:
            wordings: of the texts that will be asked for.
            student: length of a student's features that the teacher's are to be compared with, its projection
                trained; None where neither happens.

        Raises:
            ConfigError: names what is missing or does not fit, where it was looked for, and the alternatives.
        """
        self._check(task, wordings, student is not None)
        if student not in (None, self.dim):
            raise ConfigError(f"model: its features have d = {student}, those of method.teacher = {self.name} "
                              f"{self.dim}; method.finetune=true needs them alike, as in resnet8_proj, "
                              "cnn_proj and resnet50_proj with CLIP's ViT-B-32")

    @abstractmethod
    def _check(self, task: Task, wordings: Set[Wording], trainable: bool) -> None:
        """The same for one kind of teacher; `trainable`: whether its projection is to be trained."""

    @abstractmethod
    def text(self, names: Sequence[str], wording: Wording, device: torch.device) -> Tensor:
        """Embeddings of class names, float32 [C, d], as the model gives them, on the CPU."""

    @abstractmethod
    def images(self, samples: Samples) -> Tensor:
        """Features [n, w] of all samples, without augmentation, float32 on the samples' device.

        What `projection` brings to the joint space; not normalised.
        """

    @abstractmethod
    def projection(self, device: torch.device) -> Tensor | None:
        """The last, linear layer of the image tower, float32 [w, d]; None where `images` are behind it already."""


class FeatureFile(Teacher):
    """Features that were computed elsewhere, an npz file of arrays:

        image [N, d]        of every training sample of the source, in its order; float16 or float32
        y [N]               their labels: they tell whether the file belongs to the source
        text [C, d]         of the phrases "a photo of a {label}"
        class_names [C]     in the order of the labels
        text_label [C, d]   optional: of the labels alone
        about               optional: what they come from
    """

    def __init__(self, path: Path):
        super().__init__(f"npz:{path}")
        self.path = path

    @property
    def dim(self) -> int:
        return self._read("image")["image"].shape[-1]

    @property
    def about(self) -> str:
        said = self._read(optional=("about",))
        return f"{said['about']} ({self.name})" if said else self.name

    def _check(self, task: Task, wordings: Set[Wording], trainable: bool) -> None:
        texts = [TEXTS[wording] for wording in sorted(wordings)]
        arrays = self._read("image", "y", "class_names", *texts)
        if arrays["class_names"].tolist() != list(task.class_names):
            raise ConfigError(f"method.teacher = {self.name}: class_names are not those of {task.name} "
                              f"({', '.join(task.class_names[:3])}, ...), in that order; compute the features of it")
        labels = arrays["y"]
        if labels.dtype.kind not in "iu" or hash_labels(labels) != task.split.labels_sha256:
            raise ConfigError(f"method.teacher = {self.name}: y are not the labels of {task.name}'s training samples, "
                              "in their order; compute the features of it")
        dim = arrays["image"].shape[-1] if arrays["image"].ndim else 0
        shapes = {"image": (len(labels), dim)} | dict.fromkeys(texts, (task.classes, dim))
        for key, shape in shapes.items():
            array = arrays[key]
            if array.dtype not in (np.float16, np.float32) or array.shape != shape or not np.isfinite(array).all():
                raise ConfigError(f"method.teacher = {self.name}: {key} is {array.dtype} {list(array.shape)}; finite "
                                  f"float16 or float32 {list(shape)} is expected")

    def text(self, names: Sequence[str], wording: Wording, device: torch.device) -> Tensor:
        return torch.from_numpy(self._read(TEXTS[wording])[TEXTS[wording]]).float()

    def images(self, samples: Samples) -> Tensor:
        assert samples.ids is not None
        return torch.from_numpy(self._read("image")["image"][samples.ids]).float().to(samples.x.device)

    def projection(self, device: torch.device) -> Tensor | None:
        """The identity: the features are those of the joint space, and what is trained starts from there."""
        return torch.eye(self.dim, device=device)

    def _read(self, *keys: str, optional: Sequence[str] = ()) -> dict[str, np.ndarray]:
        try:
            with np.load(self.path, allow_pickle=False) as file:
                found = {key: file[key] for key in (*keys, *(key for key in optional if key in file))}
            if strange := [key for key, value in found.items() if not isinstance(value, np.ndarray)]:
                raise ValueError(f"{strange[0]} is no array")
            return found
        except Exception as error:          # numpy and zipfile raise whatever a damaged file makes them stumble over
            cause = "no such file" if isinstance(error, FileNotFoundError) else shorten(error)
            raise ConfigError(f"method.teacher = {self.name}: cannot be read ({cause}); an npz "
                              "file with image, y, text and class_names is expected, and text_label where "
                              "method.wording=label asks for it") from None


def describe(names: Sequence[str], wording: Wording) -> list[str]:
    """"a photo of a {label}", or the labels alone; underscores become spaces, ImageNet's 1000 ids the usual names.

    Raises:
        ConfigError: ids of which nobody here knows the names.
    """
    if any(WNID.fullmatch(name) for name in names):
        if len(names) != 1000:
            raise ConfigError(f"method.teacher: class names such as {names[0]} tell a text encoder nothing, and names "
                              "are known for all 1000 ids of ImageNet only; give the classes names that can be read")
        from open_clip import IMAGENET_CLASSNAMES  # in the order of the ids

        rank = {wnid: place for place, wnid in enumerate(sorted(names))}
        names = [IMAGENET_CLASSNAMES[rank[name]] for name in names]
    labels = [name.replace("_", " ") for name in names]
    return [f"a photo of a {label}" for label in labels] if wording == "phrase" else labels


def shorten(error: Exception) -> str:
    """What an exception says, in a line."""
    said = " ".join(str(error).split()) or type(error).__name__
    return said if len(said) <= 200 else f"{said[:197]}..."
