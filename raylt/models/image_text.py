"""Image-text models as networks: the image tower is the encoder, and texts of the class names can be the classifier.

    clip:MODEL/TAG          open_clip's names, such as clip:ViT-B-32/openai; weights are fetched into the user's cache
    clip:MODEL/TAG:FILE     the weights of that tag, in a file
    clip:local-dir:FOLDER   the user's own model: open_clip_config.json and the weights, as open_clip saves them

Features and texts have the length sqrt(s), where s is the scale of the model's logits (100 in OpenAI's). The inner
product of a feature z and a text t is then s cos(z, t), the image-text model's logit, and the classifier can be an
ordinary linear layer. With a `CosineClassifier` the logits remain cosines, and s is learned.
"""

import copy
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raylt.errors import ConfigError
from raylt.models.clip import OpenClip, TowerDescription, new_tower, open_clip_named
from raylt.models.prompts import Prompts, open_clip_prompts
from raylt.models.split import CosineClassifier, SplitModel
from raylt.models.teacher import describe
from raylt.models.trainable import Frozen

PREFIX = "clip:"


class ImageTower(nn.Module):
    """The image tower of an image-text model, for images of any size.

    It maps pixels in [0, 1], [B, channels, H, W], to features [B, d] that all have the same length. It resizes and
    normalises the pixels as in the model's training. Grey images are repeated in three channels.

    Args:
        body: The image tower of an open_clip model.
        description: Description of the tower.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, body: nn.Module, description: TowerDescription):
        super().__init__()
        preprocessing = description["preprocessing"]
        size = preprocessing["size"]
        self.body = body
        self.description = description
        self.height, self.width = (size, size) if isinstance(size, int) else size
        self.interpolation = preprocessing["interpolation"]
        self.crops = preprocessing["resize_mode"] == "shortest"
        self.length = description["length"]
        self.register_buffer("mean", torch.tensor(preprocessing["mean"])[:, None, None], persistent=False)
        self.register_buffer("std", torch.tensor(preprocessing["std"])[:, None, None], persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        z = self.body((self._resized(x.expand(-1, 3, -1, -1)) - self.mean) / self.std)
        z = z[0] if isinstance(z, tuple) else z
        return F.normalize(z.float(), dim=1) * self.length

    def _resized(self, x: Tensor) -> Tensor:
        height, width = self._covering(x.shape[2], x.shape[3]) if self.crops else (self.height, self.width)
        if x.shape[2:] != (height, width):
            x = F.interpolate(x, (height, width), mode=self.interpolation, align_corners=False, antialias=True)
        top = round((height - self.height) / 2)
        left = round((width - self.width) / 2)
        return x[:, :, top : top + self.height, left : left + self.width].clamp(0, 1)

    def _covering(self, height: int, width: int) -> tuple[int, int]:
        """Return the smallest size with the image's ratio that covers the input, rounded as open_clip rounds it."""
        if self.height == self.width:
            shorter = min(height, width)
            return self.height * height // shorter, self.width * width // shorter
        ratio = max(self.height / height, self.width / width)
        return round(height * ratio), round(width * ratio)


def image_text_model(
    name: str, classes: int, shape: tuple[int, int, int], weights: str | None, side: int | None
) -> SplitModel:
    """Build a model whose encoder is the image tower of an image-text model.

    Args:
        name: One of the forms in this module's docstring.
        classes: The number of classes, C.
        shape: Height, width and channels of an image.
        weights, side: The settings `weights` and `input`, which must be None: the name and the tower determine both.

    Raises:
        ConfigError: The model is unknown, its weights are not available, or it does not accept these images.
    """
    for key, value in (("weights", weights), ("input", side)):
        if value is not None:
            raise ConfigError(
                f"{key}: model = {name} names its weights, and its tower sets the size of images ({value}). Leave "
                f"{key} out; give a file of weights as model=clip:MODEL/TAG:FILE.",
                code="config.conflict",
                key=key,
                value=value,
                model=name,
            )
    if shape[2] not in (1, 3):
        raise ConfigError(
            f"model: {name} accepts grey or colour images, and these have {shape[2]} channels. Use another model.",
            code="model.wrong-input",
            key="model",
            value=name,
        )
    tower = open_tower(name)
    network = _loaded(tower.name)
    description = tower.describe_tower(network)
    if description["preprocessing"]["resize_mode"] == "longest" and shape[0] != shape[1]:
        raise ConfigError(
            f"model: {name} pads images to a square, which raylt does not, and these are {shape[0]}x{shape[1]}. Give "
            "square images (for image files, set data.size), or use another model.",
            code="model.wrong-input",
            key="model",
            value=name,
        )
    encoder = ImageTower(copy.deepcopy(network.visual).requires_grad_(), description)
    model = SplitModel(encoder.train(), description["dim"], classes)
    model.prompts = partial(open_prompts, PREFIX + tower.name)
    return model


def described_model(classes: int, shape: tuple[int, int, int], *, description: TowerDescription) -> SplitModel:
    """Build a model with random weights whose encoder is the described image tower.

    Args:
        classes: The number of classes, C.
        shape: Height, width and channels of an image; the tower accepts images of any size.
        description: Description of the tower.

    Raises:
        ValueError: The description is not valid.
    """
    encoder = ImageTower(new_tower(description), description)
    return SplitModel(encoder.train(), description["dim"], classes)


def tower_of(model: nn.Module) -> ImageTower | None:
    """Return the image tower in a model, frozen or not, or None if there is none."""
    for module in model.modules():
        inner = module.body if isinstance(module, Frozen) else module
        if isinstance(inner, ImageTower):
            return inner
    return None


def start_from_texts(model: SplitModel, name: str, class_names: Sequence[str], kind: str) -> None:
    """Set a new model's classifier to the texts "a photo of a {class}". It then classifies as the image-text model.

    Args:
        model: The model, which is changed in place.
        name: Name of the model, as in `image_text_model`.
        class_names: The class names.
        kind: The setting `classifier`: "text" for a linear layer, "text_cosine" for a `CosineClassifier`.

    Raises:
        ConfigError: The model has no text tower, or the class names are not readable.
    """
    if not name.startswith(PREFIX):
        raise ConfigError(
            f"classifier: model = {name} has no text tower ({kind}). Set model=clip:NAME, or classifier=random.",
            code="config.conflict",
            key="classifier",
            value=kind,
            model=name,
        )
    texts = _texts(open_tower(name).name, tuple(class_names))
    if kind == "text_cosine":
        length = texts.norm(dim=1).mean()
        model.classifier = CosineClassifier(texts / length, 2 * length.log())
        return
    assert isinstance(model.classifier, nn.Linear)
    with torch.no_grad():
        model.classifier.weight.copy_(texts)
        model.classifier.bias.zero_()


def open_prompts(name: str, class_names: Sequence[str], context: int) -> Prompts:
    """Return the text tower of an image-text model for prompts of learned vectors and a class name.

    Args:
        name: Name of the model, as in `open_tower`.
        class_names: The class names.
        context: Number of vectors, M.

    Raises:
        ConfigError: The tower does not read texts from left to right or accepts fewer vectors, or the class names are
            not readable.
    """
    tower = open_tower(name)
    _texts(tower.name, tuple(class_names))  # raises errors that name the setting
    labels = describe(class_names, "label", "model")
    return open_clip_prompts(_loaded(tower.name), tower.tokenizer(), labels, context, name)


def open_tower(name: str) -> OpenClip:
    """Return the open_clip model that `clip:NAME` names, without reading any file.

    Raises:
        ConfigError: It is not the name of a model.
    """
    tower = open_clip_named(name.removeprefix(PREFIX), "model")
    if tower is None:
        raise ConfigError(
            f"model: not the name of an image-text model ({name!r}). Give clip:MODEL/TAG such as "
            "clip:ViT-B-32/openai, clip:MODEL/TAG:FILE or clip:local-dir:FOLDER.",
            code="config.unknown-name",
            key="model",
            value=name,
        )
    return tower


@lru_cache(maxsize=1)
def _loaded(name: str) -> Any:
    """Return the open_clip model with this name, cached, since a process builds many models from one file."""
    return open_tower(name).load()


@lru_cache(maxsize=1)
def _texts(name: str, class_names: tuple[str, ...]) -> Tensor:
    """Return the texts of class names, float32 [C, d], each as long as a feature."""
    texts = open_tower(name).text(class_names, "phrase", torch.device("cpu"))
    return F.normalize(texts.float(), dim=1) * open_tower(name).describe_tower(_loaded(name))["length"]
