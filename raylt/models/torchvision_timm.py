"""Image models of torchvision and timm. The last linear layer becomes the classifier, the rest the encoder."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raylt.config.yaml_text import parse
from raylt.errors import ConfigError, as_cause, did_you_mean
from raylt.models import pretrained
from raylt.models.split import SplitModel
from raylt.recordability import recordable

# Statistics of the images on which torchvision's models were trained.
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
# torchvision's models that were trained on images with mean and deviation 1/2. With `transform_input`, googlenet and
# inception_v3 rescale images to these statistics.
HALVES = ("efficientnet_v2_l", "googlenet", "inception_v3")
# Arguments of timm's `create_model` that other settings determine, or with which timm does not build a classifier.
DECIDED = (
    "pretrained",
    "num_classes",
    "in_chans",
    "checkpoint_path",
    "cache_dir",
    "pretrained_cfg",
    "pretrained_cfg_overlay",
    "features_only",
    "scriptable",
    "exportable",
    "no_jit",
)
# Auxiliary classifiers of googlenet and inception_v3, which are left out.
AUXILIARY = ("aux1.", "aux2.", "AuxLogits.")


@recordable
class Features(nn.Module):
    """A model without its last layer, which maps images [B, channels, H, W] to features [B, d]."""

    def __init__(self, body: nn.Module):
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).flatten(1)


@recordable
class PreparedFeatures(Features):
    """Encoder that resizes and normalises pixels in [0, 1] as in the model's training, for images of any size.

    Args:
        body: The model without its last layer.
        side: Height and width of the model's input in pixels.
        mean, std: Mean and standard deviation of the pixels, one value per channel.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, body: nn.Module, side: int, mean: Sequence[float], std: Sequence[float]):
        super().__init__(body)
        self.side = side
        self.register_buffer("mean", torch.tensor(mean)[:, None, None], persistent=False)
        self.register_buffer("std", torch.tensor(std)[:, None, None], persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[2:] != (self.side, self.side):
            smaller = max(x.shape[2:]) > self.side
            x = F.interpolate(x, (self.side, self.side), mode="bilinear", align_corners=False, antialias=smaller)
        return super().forward((x - self.mean) / self.std)


def library_model(
    name: str, classes: int, shape: tuple[int, int, int], weights: str | None, side: int | None = None
) -> SplitModel:
    """Build a torchvision or timm model with random weights, or with the weights that `weights` names.

    Args:
        name: `torchvision:NAME` or `timm:NAME`; arguments of timm's `create_model` may follow, for example
            `timm:vit_tiny_patch16_224,img_size=32,patch_size=4`.
        classes: The number of classes, C.
        shape: Height, width and channels of an image.
        weights: "imagenet" for the library's own weights, or a file with a state dict of that model. Its classifier,
            which is for other classes, is not used.
        side: The side to which the model resizes images before it normalises them as in its training; None: the model
            does neither.

    Raises:
        ConfigError: The library or model is unknown, the model does not accept these images, or the weights are not
            available.
    """
    library, _, architecture = name.partition(":")
    match library:
        case "torchvision":
            encoder, dim = _torchvision(name, architecture, shape, weights)
        case "timm":
            encoder, dim = _timm(name, architecture, shape, weights)
        case _:
            raise ConfigError(
                f"model: unknown model ({name}). Give a built-in one (small, resnet8, ...), torchvision:NAME, "
                "timm:NAME or clip:NAME.",
                code="config.unknown-name",
                key="model",
                value=name,
            )
    if side is not None:
        halves = library == "torchvision" and architecture in HALVES
        encoder = _prepared(encoder, side, shape[2], (0.5, 0.5, 0.5) if halves else None)
    try:
        with torch.no_grad():
            features = encoder.eval()(torch.zeros(1, shape[2], *shape[:2]))
    except Exception as error:  # libraries raise many types for sizes and arguments that do not fit
        got = f"{shape[0]}x{shape[1]}" if side is None else f"{side}x{side}"
        takes = _side_of(encoder.body)
        remedy = "Use" if takes is None else f"Set input={takes}, or use"
        arguments = " other arguments," if "," in architecture else ""
        raise ConfigError(
            f"model: {name} does not accept images of {got} ({_shortened(error)}). "
            f"{remedy} another model,{arguments} or other images (for image files, set data.size)"
            f"{'; timm: models accept arguments, such as timm:NAME,img_size=32' if library == 'timm' else ''}.",
            code="model.wrong-input",
            key="model",
            value=name,
        ) from None
    if features.shape != (1, dim):
        raise ConfigError(
            f"model: the features of {name} have the shape {list(features.shape)[1:]}, expected [{dim}]. "
            "Use a model that classifies images.",
            code="model.wrong-type",
            key="model",
            value=name,
        )
    return SplitModel(encoder.train(), dim, classes)


def _training_of(body: nn.Module) -> dict[str, Any]:
    """Return timm's description of the images on which a model was trained; {} for other models."""
    return getattr(body, "pretrained_cfg", None) or {}


def _side_of(body: nn.Module) -> int | None:
    """Return the side of the images for which a model was made, or None if the model does not declare it."""
    training = _training_of(body)
    own: int | None = getattr(body, "image_size", None)  # attribute of torchvision's ViTs
    return training["input_size"][-1] if "input_size" in training else own


def _prepared(
    encoder: Features, side: int, channels: int, statistics: tuple[float, float, float] | None
) -> PreparedFeatures:
    """Return an encoder that resizes and normalises images.

    For grey images, the statistics of the colours are averaged.

    Args:
        encoder: The encoder.
        side: Side of the resized images in pixels.
        channels: Number of channels of the images.
        statistics: Mean and deviation of each colour; None: timm's statistics of the model, or else ImageNet's.
    """
    training = _training_of(encoder.body)
    mean = list(statistics or training.get("mean", IMAGENET_MEAN))
    std = list(statistics or training.get("std", IMAGENET_STD))
    if channels != 3:
        mean = [sum(mean) / 3] * channels
        std = [sum(std) / 3] * channels
    return PreparedFeatures(encoder.body, side, mean, std)


def _torchvision(
    name: str, architecture: str, shape: tuple[int, int, int], weights: str | None
) -> tuple[Features, int]:
    """Build an encoder from a torchvision model; return the encoder and the length of its features."""
    import torchvision.models
    from torchvision.models import get_model, list_models

    architectures = list_models(module=torchvision.models)
    if architecture not in architectures:
        raise ConfigError(
            f"model: torchvision has no classifier {architecture!r} ({name}). "
            f"{did_you_mean(architecture, architectures, 'torchvision:')}"
            "torchvision.models.list_models(module=torchvision.models) lists all.",
            code="config.unknown-name",
            key="model",
            value=name,
        )
    options = {"aux_logits": False, "init_weights": True} if architecture in ("googlenet", "inception_v3") else {}
    body = get_model(architecture, weights=None, **options)
    layers = [(path, layer) for path, layer in body.named_modules() if isinstance(layer, nn.Linear)]
    if not layers:
        raise ConfigError(
            f"model: {name} does not end in a linear layer. Use a model that classifies images.",
            code="model.wrong-type",
            key="model",
            value=name,
        )
    path, last = layers[-1]
    first, convolution = next((path, layer) for path, layer in body.named_modules() if isinstance(layer, nn.Conv2d))
    if shape[2] != 3:
        body.set_submodule(first, _with_channels(convolution, shape[2]))
    if weights is not None:
        state = _for_channels(_torchvision_state(architecture, weights), [first], shape[2])
        pretrained.load_body(body, state, [path], weights, f"torchvision's {architecture}")
    body.set_submodule(path, nn.Identity())
    return Features(body), last.in_features


def _torchvision_state(architecture: str, weights: str) -> dict[str, Tensor]:
    from torchvision.models import get_model_weights

    if weights == "imagenet":
        state = pretrained.fetch(get_model_weights(architecture).DEFAULT)  # pyright: ignore
    else:
        state = pretrained.read(Path(weights).expanduser(), f"torchvision's {architecture}")
    return {_present_name(key): value for key, value in state.items() if not key.startswith(AUXILIARY)}


def _present_name(entry: str) -> str:
    """Return the current name of an entry. torchvision's files for DenseNets have the names of an old version."""
    return re.sub(r"(denselayer\d+\.(?:norm|conv))\.([12]\.)", r"\1\2", entry)


def _for_channels(state: dict[str, Tensor], layers: Iterable[str], channels: int) -> dict[str, Tensor]:
    """Return a state dict whose first convolutions take images with this number of channels.

    Weights for three channels are converted; others stay, so that a file for these channels is loaded as it is.

    Args:
        state: The state dict.
        layers: Names of the first convolutions.
        channels: Number of input channels.
    """
    for layer in layers:
        weight = state.get(f"{layer}.weight")
        if channels != 3 and weight is not None and weight.ndim == 4 and weight.shape[1] == 3:
            state = state | {f"{layer}.weight": pretrained.for_channels(weight, channels)}
    return state


def _with_channels(first: nn.Conv2d, channels: int) -> nn.Conv2d:
    """Return a convolution with random weights that is like another one, for this number of input channels."""
    return nn.Conv2d(
        channels,
        first.out_channels,
        first.kernel_size,  # pyright: ignore
        first.stride,  # pyright: ignore
        first.padding,  # pyright: ignore
        first.dilation,  # pyright: ignore
        first.groups,
        first.bias is not None,
        first.padding_mode,
    )


def _timm(name: str, architecture: str, shape: tuple[int, int, int], weights: str | None) -> tuple[Features, int]:
    """Build an encoder from a timm model; return the encoder and the length of its features."""
    try:
        import timm
    except ImportError:
        raise ConfigError(
            f"model: timm is not installed ({name}). Run pip install '.[timm]' in the clone.",
            code="config.missing-package",
            key="model",
            value=name,
            package="timm",
        ) from None
    architecture, *pairs = architecture.split(",")
    options = _options(name, pairs)
    if not timm.is_model(architecture):
        architectures = timm.list_models()
        raise ConfigError(
            f"model: timm has no model {architecture!r} ({name}). "
            f"{did_you_mean(architecture, architectures, 'timm:')}timm.list_models() lists all.",
            code="config.unknown-name",
            key="model",
            value=name,
        )
    if weights is None:
        body = _timm_untrained(name, architecture, shape[2], options)
    else:
        body = _timm_pretrained(name, architecture, shape[2], weights, options)
    # num_features ignores the layer that some models have between their last feature map and their classifier
    return Features(body), int(getattr(body, "head_hidden_size", None) or body.num_features)  # pyright: ignore


def _options(name: str, pairs: list[str]) -> dict[str, Any]:
    """Parse the arguments of timm's `create_model` from a model's name.

    Raises:
        ConfigError: An argument is not KEY=VALUE, or other settings determine it.
    """
    options = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        try:
            options[key] = parse(text)
        except ValueError:
            equals = ""
        if not equals or not key.isidentifier() or key in DECIDED:
            raise ConfigError(
                f"model: not an allowed argument of a timm model ({pair!r} in {name}). Write timm:NAME,KEY=VALUE, "
                "such as img_size=32; other settings determine channels, classes and weights, and the model must stay "
                "a classifier.",
                code="config.malformed",
                key="model",
                value=name,
                argument=pair,
            )
    return options


def _timm_untrained(name: str, architecture: str, channels: int, options: dict[str, Any]) -> nn.Module:
    import timm

    try:
        return timm.create_model(architecture, pretrained=False, num_classes=0, in_chans=channels, **options)
    except Exception as error:  # libraries raise many types for arguments that do not fit
        if options:
            given = ", ".join(f"{key}={value}" for key, value in options.items())
            raise ConfigError(
                f"model: timm's {architecture} does not accept these arguments ({given}: {_shortened(error)}). Leave "
                "them out, or use another model.",
                code="config.conflict",
                key="model",
                value=name,
            ) from None
        if not isinstance(error, RuntimeError):
            raise
        # the part of the name after the dot names unknown weights
        pattern = architecture.partition(".")[0] + "*"
        raise ConfigError(
            f"model: timm cannot build {name} ({_shortened(error)}). timm.list_pretrained({pattern!r}) lists the "
            "available names.",
            code="config.unknown-name",
            key="model",
            value=name,
        ) from None


def _timm_pretrained(name: str, architecture: str, channels: int, weights: str, options: dict[str, Any]) -> nn.Module:
    """Build a pretrained timm model without its classifier, for the given number of input channels."""
    import timm

    if weights == "imagenet":
        try:
            with pretrained.hub_errors_only():
                return timm.create_model(architecture, pretrained=True, num_classes=0, in_chans=channels, **options)
        except Exception as error:  # no network, or no weights of this name; timm has no error class for them
            raise ConfigError(
                f"weights: timm cannot fetch the weights of {name} ({_shortened(error)}). Give a state dict of "
                f"timm's {architecture} in a file.",
                code="model.weights-unavailable",
                key="weights",
                value=weights,
                model=name,
            ) from None
    body = _timm_untrained(name, architecture, channels, options)
    state = pretrained.read(Path(weights).expanduser(), f"timm's {architecture}")
    timm_config: Any = body.pretrained_cfg
    state = _for_channels(state, _names(timm_config["first_conv"]), channels)
    pretrained.load_body(body, state, _names(timm_config["classifier"]), weights, f"timm's {architecture}")
    return body


def _names(layers: str | Sequence[str] | None) -> list[str]:
    """Return the names of layers in an entry of timm's configurations: one name, several or none."""
    return [layers] if isinstance(layers, str) else list(layers or ())


def _shortened(error: Exception) -> str:
    """Return an error as a cause. The text of a KeyError is only the key."""
    return f"{type(error).__name__} {as_cause(error)}" if isinstance(error, KeyError) else as_cause(error)
