"""What the names of a configuration stand for, found once, where a run is started."""

from functools import partial

from raylt.config import Config
from raylt.core.setup import Setup
from raylt.data.augment import AUGMENTATIONS
from raylt.methods import make_method
from raylt.models import build_model


def resolve(config: Config) -> Setup:
    """The method, the model and the augmentation that a configuration names.

    Raises:
        ConfigError: no such name, or a field of the method that cannot be.
    """
    return Setup(config, make_method(config.method), partial(build_model, config.model, weights=config.weights),
                 AUGMENTATIONS[config.augment])
