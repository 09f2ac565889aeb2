"""Image models of torchvision and timm: their last linear layer is the classifier, the rest the encoder."""

import torch
from torch import Tensor, nn

from raylt.errors import ConfigError
from raylt.models.split import SplitModel


class Features(nn.Module):
    """A model whose last layer was taken out: images [B, channels, H, W] -> features [B, d]."""

    def __init__(self, body: nn.Module):
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).flatten(1)


def foreign(name: str, classes: int, shape: tuple[int, int, int], weights: str | None) -> SplitModel:
    """A new model of another library, with random weights.

    Args:
        name: `torchvision:NAME` or `timm:NAME`.
        classes: C.
        shape: height, width and channels of an image.
        weights: must be None: what they were trained on belongs to them, see open_clip for teachers.

    Raises:
        ConfigError: no such library or model, or it does not take these images.
    """
    library, _, inner = name.partition(":")
    if weights is not None:
        raise ConfigError(f"weights = {weights}: model = {name} starts from random weights; leave weights out")
    match library:
        case "torchvision":
            encoder, dim = _torchvision(name, inner, shape)
        case "timm":
            encoder, dim = _timm(name, inner, shape)
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


def _torchvision(name: str, inner: str, shape: tuple[int, int, int]) -> tuple[nn.Module, int]:
    from torchvision.models import get_model, list_models

    if inner not in list_models():
        raise ConfigError(f"model = {name}: torchvision has no model {inner!r}; torchvision.models.list_models() has "
                          "those that there are")
    extra = {"aux_logits": False, "init_weights": True} if inner in ("googlenet", "inception_v3") else {}
    body = get_model(inner, weights=None, **extra)
    layers = {path: layer for path, layer in body.named_modules() if isinstance(layer, nn.Linear)}
    if not layers:
        raise ConfigError(f"model = {name}: does not end in a linear layer; take a model that classifies images")
    path, last = list(layers.items())[-1]
    body.set_submodule(path, nn.Identity())
    if shape[2] != 3:
        _take_channels(body, shape[2])
    return Features(body), last.in_features


def _take_channels(body: nn.Module, channels: int) -> None:
    """Replaces the first convolution by one that takes so many channels."""
    path, first = next((path, layer) for path, layer in body.named_modules() if isinstance(layer, nn.Conv2d))
    body.set_submodule(path, nn.Conv2d(
        channels, first.out_channels, first.kernel_size, first.stride, first.padding, first.dilation,   # pyright: ignore
        first.groups, first.bias is not None, first.padding_mode))


def _timm(name: str, inner: str, shape: tuple[int, int, int]) -> tuple[nn.Module, int]:
    try:
        import timm
    except ImportError:
        raise ConfigError(f"model = {name}: timm is not installed; pip install 'raylt[timm]'") from None
    if not timm.is_model(inner):
        near = ", ".join(timm.list_models(f"{inner[:4]}*")[:5]) or "none"
        raise ConfigError(f"model = {name}: timm has no model {inner!r}; those whose names begin alike: {near}")
    body = timm.create_model(inner, pretrained=False, num_classes=0, in_chans=shape[2])
    return Features(body), int(body.num_features)       # pyright: ignore[reportArgumentType]
