"""Weights that a model starts from: a state dict in a file, or torchvision's from ImageNet."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from raylt.errors import ConfigError


def fetch(weights: Any) -> dict[str, Tensor]:
    """The state dict of one of torchvision's enumerated weights, from its cache or the net.

    Raises:
        ConfigError: no net, or another content than its name says.
    """
    try:
        return dict(weights.get_state_dict(progress=False, check_hash=True))
    except (OSError, RuntimeError) as error:
        raise ConfigError(f"weights = imagenet: {weights.url} could not be fetched ({' '.join(str(error).split())}); "
                          "fetch it elsewhere and set weights=PATH to the file") from None


def read(path: Path, model: str) -> dict[str, Tensor]:
    """The state dict in a file, of torch or of safetensors.

    Args:
        model: whose it should be, for the error.

    Raises:
        ConfigError: no such file, or nothing of the kind.
    """
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file
            return load_file(path)
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise ConfigError(f"weights = {path}: no such file; give a state dict of {model}, or imagenet to fetch "
                          "it") from None
    except Exception as error:          # whatever torch's unpickler trips over
        raise ConfigError(f"weights = {path}: not a file of weights that can be read "
                          f"({' '.join(str(error).split())[:200]})") from None
    return state if isinstance(state, dict) else {}


def load_body(body: nn.Module, state: dict[str, Tensor], classifiers: Sequence[str], weights: str, model: str) -> None:
    """Loads everything but the classifiers, which are for other classes.

    Args:
        classifiers: the paths of the layers in `body` that stay as they are.

    Raises:
        ConfigError: names or shapes are not those of the model.
    """
    theirs = tuple(f"{path}." for path in classifiers)
    own = {name: value for name, value in body.state_dict().items() if name.startswith(theirs)}
    kept = {name: value for name, value in state.items() if not name.startswith(theirs)}
    try:
        body.load_state_dict(kept | own)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"weights = {weights}: not a state dict of {model} "
                          f"({' '.join(str(error).split())[:200]})") from None


def for_channels(weight: Tensor, channels: int) -> Tensor:
    """A first convolution's weights [O, 3, k, k] for images of other channels, [O, channels, k, k].

    A grey image is as if it stood in all three; of more channels each takes the colours' in turn, scaled so that the
    activations keep their size. As timm does it.
    """
    if channels == 1:
        return weight.sum(1, keepdim=True)
    repeated = weight.repeat(1, -(-channels // 3), 1, 1)[:, :channels]
    return repeated * (3 / channels)
