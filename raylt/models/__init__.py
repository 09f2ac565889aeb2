"""Models by name. All are `SplitModel`s, take any number of input channels and start from torch's global generator."""

from collections.abc import Callable

from raylt.errors import ConfigError
from raylt.models.cnn import cnn, cnn_proj, small
from raylt.models.foreign import foreign
from raylt.models.resnet import resnet8, resnet8_proj, resnet18, resnet32, resnet34, resnet50, resnet50_proj
from raylt.models.segment import LRASPPEncoder, lraspp
from raylt.models.split import SplitModel

__all__ = ["MODELS", "SEGMENTERS", "ModelFactory", "SplitModel", "build", "build_model"]

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
SEGMENTERS = frozenset({"lraspp"})          # give logits for each pixel; the others for each image

# the side at which every stride still halves something
_SMALLEST = {"resnet8": 4, "resnet8_proj": 4, "resnet18": 8, "resnet32": 4, "resnet34": 8, "resnet50": 32,
             "resnet50_proj": 32, "cnn": 16, "cnn_proj": 16, "small": 2, "lraspp": 16}


def build_model(name: str, classes: int, shape: tuple[int, int, int], weights: str | None = None) -> SplitModel:
    """A new model by its name: a key of `MODELS`, `torchvision:NAME` or `timm:NAME`; see `build`."""
    return build(classes, shape, name=name, factory=MODELS.get(name), weights=weights)


def build(classes: int, shape: tuple[int, int, int], *, name: str, factory: ModelFactory | None,
          weights: str | None) -> SplitModel:
    """A new model with random weights, but those of the encoder that `weights` brings.

    Args:
        classes: C.
        shape: height, width and channels of an image.
        name: what a configuration calls it.
        factory: makes it; None for a model of another library, found by its name.
        weights: "imagenet" or a file, see `LRASPPEncoder.load_imagenet` and `foreign`.

    Raises:
        ConfigError: the images are too small for this model, it is no `SplitModel`, or the weights cannot be had.
    """
    if factory is None:
        return foreign(name, classes, shape, weights)
    height, width, _ = shape
    if min(height, width) < _SMALLEST.get(name, 1):
        fitting = [other for other, side in _SMALLEST.items() if min(height, width) >= side
                   and (other in SEGMENTERS) == (name in SEGMENTERS)]
        raise ConfigError(f"model = {name}: images are {height}x{width}, it needs at least "
                          f"{_SMALLEST[name]}x{_SMALLEST[name]}; for these there are: {', '.join(fitting) or 'none'}")
    model = factory(classes, shape)
    if not isinstance(model, SplitModel):
        raise ConfigError(f"model = {name}: gave a {type(model).__name__}; a raylt.SplitModel(encoder, dim, classes) "
                          "is expected")
    if weights is not None:
        if not isinstance(model.encoder, LRASPPEncoder):
            raise ConfigError(f"weights = {weights}: model = {name} starts from random weights; leave weights out, or "
                              "set model=lraspp, torchvision:NAME or timm:NAME")
        model.encoder.load_imagenet(weights)
    return model
