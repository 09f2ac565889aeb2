"""The table of models by name. Each entry builds a `SplitModel` with random weights for any number of channels."""

from collections.abc import Callable

from raylt.errors import ConfigError, own_function, user_fault
from raylt.models.cnn import cnn, cnn_proj, small
from raylt.models.image_text import PREFIX, image_text_model
from raylt.models.resnet import resnet8, resnet8_proj, resnet18, resnet32, resnet34, resnet50, resnet50_proj
from raylt.models.segment import LRASPPEncoder, lraspp
from raylt.models.split import SplitModel
from raylt.models.torchvision_timm import library_model
from raylt.models.trial import check_weights, materialise, try_model

__all__ = [
    "LIBRARIES",
    "MODELS",
    "SEGMENTERS",
    "ModelFactory",
    "SplitModel",
    "build",
    "build_model",
    "check_weights",
    "try_model",
]

ModelFactory = Callable[[int, tuple[int, int, int]], SplitModel]

MODELS: dict[str, ModelFactory] = {
    "resnet8": resnet8,
    "resnet8_proj": resnet8_proj,
    "resnet18": resnet18,
    "resnet32": resnet32,
    "resnet34": resnet34,
    "resnet50": resnet50,
    "resnet50_proj": resnet50_proj,
    "cnn": cnn,
    "cnn_proj": cnn_proj,
    "small": small,
    "lraspp": lraspp,
}
SEGMENTERS = frozenset({"lraspp"})  # models with logits for each pixel instead of each image
LIBRARIES = frozenset({"torchvision", "timm", "clip"})  # allowed names before the colon of a library's model

# Minimum side of an image at which every stride still halves something.
_SMALLEST = {
    "resnet8": 4,
    "resnet8_proj": 4,
    "resnet18": 8,
    "resnet32": 4,
    "resnet34": 8,
    "resnet50": 32,
    "resnet50_proj": 32,
    "cnn": 16,
    "cnn_proj": 16,
    "small": 2,
    "lraspp": 16,
}


def build_model(name: str, classes: int, shape: tuple[int, int, int], weights: str | None = None) -> SplitModel:
    """Build the model that `name` names: a key of `MODELS`, `torchvision:NAME`, `timm:NAME` or `clip:NAME`.

    Args:
        name: The model's name in a configuration.
        classes: The number of classes, C.
        shape: Height, width and channels of an image.
        weights: "imagenet", a file, or None for random weights.
    """
    return build(classes, shape, name=name, factory=MODELS.get(name), weights=weights, side=None)


def build(
    classes: int,
    shape: tuple[int, int, int],
    *,
    name: str,
    factory: ModelFactory | None,
    weights: str | None,
    side: int | None,
) -> SplitModel:
    """Build a model with random weights, or with the pretrained encoder weights that `weights` names.

    Args:
        classes: The number of classes, C.
        shape: Height, width and channels of an image.
        name: The model's name in a configuration.
        factory: Function that builds the model; None for a model of a library, which is built by its name.
        weights: "imagenet" or a file, see `LRASPPEncoder.load_imagenet` and `library_model`.
        side: The side to which a model of torchvision or timm resizes images; None: no resizing.

    Raises:
        ConfigError: The images are too small for this model, the factory does not return a `SplitModel`, or the weights
            are not available.
    """
    if factory is None and name.startswith(PREFIX):
        return image_text_model(name, classes, shape, weights, side)
    if factory is None:
        return library_model(name, classes, shape, weights, side)
    if side is not None:
        raise ConfigError(
            f"input: model = {name} does not resize images ({side}). Leave input out, or set model=torchvision:NAME or "
            "timm:NAME.",
            code="config.conflict",
            key="input",
            value=side,
            model=name,
        )
    _check_side(name, min(shape[:2]), shape)
    with own_function("model", name):
        model = factory(classes, shape)
    if not isinstance(model, SplitModel):
        raise ConfigError(
            f"model: {name} returned a {type(model).__name__}. Return a raylt.SplitModel(encoder, dim, classes).",
            code="model.wrong-type",
            key="model",
            value=name,
        )
    _materialise(name, model, shape)
    if weights is not None:
        if not isinstance(model.encoder, LRASPPEncoder):
            raise ConfigError(
                f"weights: model = {name} starts from random weights ({weights}). Leave weights out, or set "
                "model=lraspp, torchvision:NAME or timm:NAME.",
                code="config.conflict",
                key="weights",
                value=weights,
                model=name,
            )
        model.encoder.load_imagenet(weights)
    return model


def _materialise(name: str, model: SplitModel, shape: tuple[int, int, int]) -> None:
    try:
        materialise(model, shape)
    except Exception as error:  # from the user's code
        raise ConfigError(
            f"model: a pass over images does not initialise the lazy layers of {name} ({user_fault(error)}). Correct "
            "its layers.",
            code="model.failed",
            key="model",
            value=name,
        ) from error


def _check_side(name: str, side: int, shape: tuple[int, int, int]) -> None:
    needed = _SMALLEST.get(name, 1)
    if side >= needed:
        return
    same_problem = [model for model in _SMALLEST if (model in SEGMENTERS) == (name in SEGMENTERS)]
    fitting = [model for model in same_problem if side >= _SMALLEST[model]]
    raise ConfigError(
        f"model: {name} needs images of at least {needed}x{needed} ({shape[0]}x{shape[1]}). "
        f"Give larger images (for image files, raise data.size), or use a model for this size: "
        f"{', '.join(fitting) or 'none'}.",
        code="model.images-too-small",
        key="model",
        value=name,
        smallest=needed,
        fitting=fitting,
    )
