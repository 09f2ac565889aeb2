"""Models by name. All are `SplitModel`s, take any number of input channels and start from torch's global generator."""

from collections.abc import Callable

from raylt.errors import ConfigError
from raylt.models.cnn import cnn, small
from raylt.models.resnet import resnet8, resnet8_proj, resnet18, resnet50, resnet50_proj
from raylt.models.split import SplitModel

__all__ = ["MODELS", "SplitModel", "build_model"]

MODELS: dict[str, Callable[[int, tuple[int, int, int]], SplitModel]] = {
    "resnet8": resnet8,
    "resnet8_proj": resnet8_proj,
    "resnet18": resnet18,
    "resnet50": resnet50,
    "resnet50_proj": resnet50_proj,
    "cnn": cnn,
    "small": small,
}

# the side at which every stride still halves something
_SMALLEST = {"resnet8": 4, "resnet8_proj": 4, "resnet18": 8, "resnet50": 32, "resnet50_proj": 32, "cnn": 16,
             "small": 2}


def build_model(name: str, classes: int, shape: tuple[int, int, int]) -> SplitModel:
    """A new model with random weights.

    Args:
        name: a key of `MODELS`.
        classes: C.
        shape: height, width and channels of an image.

    Raises:
        ConfigError: the images are too small for this model.
    """
    height, width, _ = shape
    if min(height, width) < _SMALLEST[name]:
        fitting = [other for other, side in _SMALLEST.items() if min(height, width) >= side]
        raise ConfigError(f"model = {name}: images are {height}x{width}, it needs at least "
                          f"{_SMALLEST[name]}x{_SMALLEST[name]}; for these there are: {', '.join(fitting) or 'none'}")
    return MODELS[name](classes, shape)
