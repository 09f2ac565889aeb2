"""Initial weights of a model: a state dict from a file, or torchvision's ImageNet weights."""

import logging
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from raylt import store
from raylt.disk import exists
from raylt.errors import ConfigError, RayltError, as_cause


def fetch(weights: Any) -> dict[str, Tensor]:
    """Return a torchvision weight set as a state dict, from torchvision's cache or after a download.

    Raises:
        ConfigError: The file cannot be fetched, or its content does not match the hash in its name.
    """
    try:
        return dict(weights.get_state_dict(progress=False, check_hash=True))
    except (OSError, RuntimeError) as error:
        raise ConfigError(
            f"weights: {weights.url} could not be fetched ({' '.join(str(error).split())}). "
            "Fetch it elsewhere and set weights=PATH to the file.",
            code="model.weights-unavailable",
            key="weights",
            value="imagenet",
            url=weights.url,
        ) from None


@contextmanager
def hub_errors_only() -> Iterator[None]:
    """Silence the warnings of Hugging Face's hub inside the block.

    Without a network it warns of each of many attempts; the final error reports the same once.
    """
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def read(path: Path, model: str) -> dict[str, Tensor]:
    """Read a state dict from a torch or safetensors file.

    Args:
        path: Path of the file.
        model: Name of the model in error messages.

    Raises:
        ConfigError: The file does not exist, or has no weights.
    """
    if not exists(path):
        raise ConfigError(
            f"weights: no such file ({path}). Give a state dict of {model}, or imagenet to fetch it.",
            code="model.weights-unavailable",
            key="weights",
            value=str(path),
        )
    try:
        state = _load(store.plain_file(path))
    except Exception as error:  # torch's unpickler raises many types for a damaged file
        raise ConfigError(
            f"weights: {path} is not a file of weights that can be read ({_reason(error)}). "
            f"Give a state dict of {model}.",
            code="model.weights-mismatch",
            key="weights",
            value=str(path),
        ) from None
    _check_bare(state, path)
    for name, value in state.items():
        if isinstance(value, Tensor) and value.is_floating_point() and not value.isfinite().all():
            raise ConfigError(
                f"weights: {path} has values that are infinite or not a number ({name}). Give other weights.",
                code="model.not-finite",
                key="weights",
                value=str(path),
                entry=name,
            )
    return state


def _reason(error: Exception) -> str:
    """Return the reason why a file of weights cannot be read, in one line without a full stop."""
    text = " ".join(str(error).split())
    if named := re.search(r"Unsupported global: GLOBAL (\S+)", text):
        return f"it holds {named[1]}, and only tensors are loaded"
    if isinstance(error, RayltError | ValueError | OSError | RuntimeError | SafetensorError):
        return as_cause(error)
    return "neither torch.save nor safetensors wrote it"


def _load(file: Path) -> dict[str, Tensor]:
    if file.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(file)
    store.check_archive(file)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about the formats of damaged files
        state = torch.load(file, map_location="cpu", weights_only=True)
    if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
        raise ValueError("it is not a state dict")
    return state


def _check_bare(state: dict[str, Any], path: Path) -> None:
    """Raise an error for a training checkpoint, which has the state dict as one of its parts."""
    for name, part in state.items():
        if isinstance(part, dict) and part and all(isinstance(value, Tensor) for value in part.values()):
            raise ConfigError(
                f"weights: {path} is a checkpoint that has a state dict as a part ({name}). Save only that part, "
                f'with torch.save(torch.load({path.name!r})["{name}"], "weights.pt").',
                code="model.weights-mismatch",
                key="weights",
                value=str(path),
                entry=name,
            )


def load_body(body: nn.Module, state: dict[str, Tensor], classifiers: Sequence[str], weights: str, model: str) -> None:
    """Load a state dict into a model, except the classifiers' entries, which were trained on other classes.

    Files of old versions of torch have no batch counts (`num_batches_tracked`); the model's counts then do not change.

    Args:
        body: The model, which is changed in place.
        state: The state dict.
        classifiers: Paths of the layers in `body` that are not changed.
        weights: Name of the weights in error messages.
        model: Name of the model in error messages.

    Raises:
        ConfigError: Names or shapes do not match the model.
    """
    prefixes = tuple(f"{path}." for path in classifiers)
    own = body.state_dict()
    kept = {name: value for name, value in own.items() if name.startswith(prefixes)}
    kept |= {name: value for name, value in own.items() if name.endswith(".num_batches_tracked") and name not in state}
    loaded = {name: value for name, value in state.items() if not name.startswith(prefixes)}
    _check_entries(own, loaded | kept, weights, model)
    try:
        body.load_state_dict(loaded | kept)
    except (RuntimeError, TypeError) as error:
        raise mismatch(weights, model, error) from None


def _check_entries(expected: dict[str, Tensor], given: dict[str, Any], weights: str, model: str) -> None:
    """Raise an error for the first entry of a state dict that does not fit the model."""
    for name in [*expected, *sorted(given)]:
        if name not in expected:
            fault = f"{name} is not an entry of the model"
        elif not isinstance(given.get(name), Tensor):
            fault = f"the entry {name} is missing"
        elif given[name].shape != expected[name].shape:
            fault = f"{name} has the shape {list(given[name].shape)} instead of {list(expected[name].shape)}"
        else:
            continue
        strange = [each for each in given if each not in expected]
        prefix = min(strange, default="").partition(".")[0] + "."
        if name not in given and f"{prefix}{name}" in given and all(each.startswith(prefix) for each in strange):
            fault += f"; all names in it begin with {prefix}, which must be removed"
        raise ConfigError(
            f"weights: {weights} does not fit {model}: {fault}. Give a state dict of {model}.",
            code="model.weights-mismatch",
            key="weights",
            value=weights,
            entry=name,
        )


def mismatch(weights: str, model: str, error: Exception) -> ConfigError:
    """Return the error for a state dict that belongs to another model."""
    return ConfigError(
        f"weights: {weights} is not a state dict of {model} ({as_cause(error)}). Give a state dict of {model}.",
        code="model.weights-mismatch",
        key="weights",
        value=weights,
    )


def for_channels(weight: Tensor, channels: int) -> Tensor:
    """Convert the weights [O, 3, k, k] of a first convolution to another number of input channels.

    A grey image is treated as the same image in all three channels. More channels use the weights of the three colours
    in turn, scaled so that activations keep their size. timm does the same.
    """
    if channels == 1:
        return weight.sum(1, keepdim=True)
    repeated = weight.repeat(1, -(-channels // 3), 1, 1)[:, :channels]
    return repeated * (3 / channels)
