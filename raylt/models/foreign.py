"""Image models of torchvision and timm: their last linear layer is the classifier, the rest the encoder."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from raylt.errors import ConfigError
from raylt.models import pretrained
from raylt.models.split import SplitModel
from raylt.recordable import recordable


@recordable
class Features(nn.Module):
    """A model whose last layer was taken out: images [B, channels, H, W] -> features [B, d]."""

    def __init__(self, body: nn.Module):
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).flatten(1)


# classifiers on the way, of googlenet and inception_v3, which are left out
AUXILIARY = ("aux1.", "aux2.", "AuxLogits.")


def foreign(name: str, classes: int, shape: tuple[int, int, int], weights: str | None) -> SplitModel:
    """A new model of another library, with random weights or, but for its classifier, those that `weights` brings.

    Args:
        name: `torchvision:NAME` or `timm:NAME`.
        classes: C.
        shape: height, width and channels of an image.
        weights: "imagenet" for the library's own, or a file with a state dict of that model; its classifier, which is
            for other classes, is not taken over.

    Raises:
        ConfigError: no such library or model, it does not take these images, or the weights cannot be had.
    """
    library, _, inner = name.partition(":")
    match library:
        case "torchvision":
            encoder, dim = _torchvision(name, inner, shape, weights)
        case "timm":
            encoder, dim = _timm(name, inner, shape, weights)
        case _:
            raise ConfigError(f"model = {name}: torchvision:NAME or timm:NAME is expected")
    try:
        with torch.no_grad():
            made = encoder.eval()(torch.zeros(1, shape[2], *shape[:2]))
    except (RuntimeError, AssertionError, ValueError) as error:
        raise ConfigError(f"model = {name}: does not take images of {shape[0]}x{shape[1]} "
                          f"({' '.join(str(error).split())[:200]}); set data.size, or take another model") from None
    if made.shape != (1, dim):
        raise ConfigError(f"model = {name}: its features have the shape {list(made.shape)[1:]}, [{dim}] is expected; "
                          "take a model that classifies images")
    return SplitModel(encoder.train(), dim, classes)


def _torchvision(name: str, inner: str, shape: tuple[int, int, int], weights: str | None) -> tuple[nn.Module, int]:
    import torchvision.models
    from torchvision.models import get_model, get_model_weights, list_models

    if inner not in list_models(module=torchvision.models):
        raise ConfigError(f"model = {name}: torchvision has no classifier {inner!r}; "
                          "torchvision.models.list_models(module=torchvision.models) has those that there are")
    extra = {"aux_logits": False, "init_weights": True} if inner in ("googlenet", "inception_v3") else {}
    body = get_model(inner, weights=None, **extra)
    layers = {path: layer for path, layer in body.named_modules() if isinstance(layer, nn.Linear)}
    if not layers:
        raise ConfigError(f"model = {name}: does not end in a linear layer; take a model that classifies images")
    path, last = list(layers.items())[-1]
    if weights is not None:
        state = (pretrained.fetch(get_model_weights(inner).DEFAULT) if weights == "imagenet"    # pyright: ignore
                 else pretrained.read(Path(weights).expanduser(), f"torchvision's {inner}"))
        state = {key: value for key, value in state.items() if not key.startswith(AUXILIARY)}
        pretrained.load_body(body, state, [path], weights, f"torchvision's {inner}")
    body.set_submodule(path, nn.Identity())
    if shape[2] != 3:
        _take_channels(body, shape[2], keep=weights is not None)
    return Features(body), last.in_features


def _take_channels(body: nn.Module, channels: int, keep: bool) -> None:
    """Replaces the first convolution by one that takes so many channels.

    Args:
        keep: whether its weights are worth keeping.
    """
    path, first = next((path, layer) for path, layer in body.named_modules() if isinstance(layer, nn.Conv2d))
    other = nn.Conv2d(
        channels, first.out_channels, first.kernel_size, first.stride, first.padding, first.dilation,   # pyright: ignore
        first.groups, first.bias is not None, first.padding_mode)
    if keep:
        other.load_state_dict(first.state_dict() | {"weight": pretrained.for_channels(first.weight.detach(), channels)})
    body.set_submodule(path, other)


def _timm(name: str, inner: str, shape: tuple[int, int, int], weights: str | None) -> tuple[nn.Module, int]:
    try:
        import timm
    except ImportError:
        raise ConfigError(f"model = {name}: timm is not installed; pip install 'raylt[timm]'") from None
    if not timm.is_model(inner):
        near = ", ".join(timm.list_models(f"{inner[:4]}*")[:5]) or "none"
        raise ConfigError(f"model = {name}: timm has no model {inner!r}; those whose names begin alike: {near}")
    if weights is not None:
        return Features(body := _timm_pretrained(name, inner, shape[2], weights)), int(body.num_features)  # pyright: ignore
    body = _timm_untrained(name, inner, shape[2])
    return Features(body), int(body.num_features)       # pyright: ignore[reportArgumentType]


def _timm_untrained(name: str, inner: str, channels: int) -> nn.Module:
    import timm

    try:
        return timm.create_model(inner, pretrained=False, num_classes=0, in_chans=channels)
    except RuntimeError as error:           # what follows the dot names weights that there are not
        raise ConfigError(f"model = {name}: {' '.join(str(error).split())[:200]}; "
                          f"timm.list_pretrained({inner.partition('.')[0] + '*'!r}) has those that there are") from None


def _timm_pretrained(name: str, inner: str, channels: int, weights: str) -> nn.Module:
    """Without its classifier, and with a first convolution for the channels."""
    import timm

    if weights == "imagenet":
        try:
            return timm.create_model(inner, pretrained=True, num_classes=0, in_chans=channels)
        except Exception as error:          # no net, or no weights of that name
            raise ConfigError(f"weights = imagenet: model = {name}: {' '.join(str(error).split())[:200]}; give a state "
                              f"dict of timm's {inner} in a file") from None
    body = _timm_untrained(name, inner, channels)
    state = pretrained.read(Path(weights).expanduser(), f"timm's {inner}")
    facts: Any = body.pretrained_cfg
    first, classifier = f"{facts['first_conv']}.weight", facts["classifier"]      # of distilled models there are two
    if channels != 3 and first in state:
        state = state | {first: pretrained.for_channels(state[first], channels)}
    classifiers = [classifier] if isinstance(classifier, str) else classifier
    pretrained.load_body(body, state, classifiers, weights, f"timm's {inner}")
    return body
