"""Base class of models: an encoder and a classifier, which methods train and exchange separately."""

import copy
from collections.abc import Callable, Sequence
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from raylt.errors import ConfigError, did_you_mean
from raylt.recordability import recordable

#: Parameters and buffers of a model by name.
StateDict = dict[str, Tensor]

#: A function from class names and M to an image-text model's text tower (`raylt.models.prompts.Prompts`).
PromptMaker = Callable[[Sequence[str], int], nn.Module]


@recordable
class SplitModel(nn.Module):
    """A model that computes `classifier(encoder(x))`. A method may add further heads as attributes.

    Args:
        encoder: Module from images [B, channels, H, W] to features z [B, d].
        dim: The width of a feature, d.
        classes: Number of classes, C. The classifier starts as `nn.Linear(d, C)` and may be replaced.
    """

    head: ClassVar[type[nn.Linear]] = nn.Linear
    problem: ClassVar[Literal["classification", "segmentation"]] = "classification"

    def __init__(self, encoder: nn.Module, dim: int, classes: int):
        super().__init__()
        self.encoder: nn.Module = encoder
        self.classifier: nn.Module = self.head(dim, classes)
        self.dim = dim
        self.classes = classes
        self.method_heads: frozenset[str] = frozenset()  # attributes that a method added to the model
        self.local_buffers: frozenset[str] = frozenset()  # entries that never leave a client with any method
        self.prompts: PromptMaker | None = None  # None except for image-text models

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.encoder(x))

    def entries(self, prefix: str = "") -> StateDict:
        """Return the parameters and buffers that may leave a client, by name. They share the model's memory.

        Args:
            prefix: Prefix of the names, such as "encoder." for the encoder alone.

        Raises:
            ConfigError: The prefix begins with a part that the model does not have.
        """
        top = prefix.partition(".")[0]
        if "." in prefix and top not in self._modules:
            raise ConfigError(
                f"entries: the model has no part of this name ({top}). {did_you_mean(top, self._modules)}Choose one of "
                f"{', '.join(self._modules)}.",
                code="model.lacks-layer",
                key="entries",
                value=top,
            )
        entries = part(self.state_dict(), prefix)
        return {name: value for name, value in entries.items() if name not in self.local_buffers}


def part(entries: StateDict, prefix: str | None) -> StateDict:
    """Return the entries whose names start with `prefix`; none if the prefix is None."""
    return {} if prefix is None else {name: value for name, value in entries.items() if name.startswith(prefix)}


@recordable
class PixelLinear(nn.Linear):
    """Linear classifier of pixels with weights [C, d], for maps [B, d, h, w] and for single pixels [n, d]."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.movedim(1, -1)).movedim(-1, 1)


@recordable
class PixelModel(SplitModel):
    """Segmentation model: features are maps [B, d, h, w], and logits are resized to the images, [B, C, H, W].

    The classifier acts on each pixel's features separately. As in any SplitModel it can be trained on features [n, d],
    here of single pixels, or be replaced by a classifier that was trained on these.
    """

    head: ClassVar[type[nn.Linear]] = PixelLinear
    problem: ClassVar[Literal["classification", "segmentation"]] = "segmentation"

    def forward(self, x: Tensor) -> Tensor:
        return F.interpolate(super().forward(x), x.shape[2:], mode="bilinear", align_corners=False)


@recordable
class CutLinear(nn.Linear):
    """Linear layer that clips each input vector to the length `longest`, as during training."""

    longest: Tensor

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(clipped(input, self.longest))


@recordable
class CosineClassifier(nn.Module):
    """Classifier whose logits are a learned scale times the cosines between features and its rows.

    The scale is learned as its logarithm, as in CLIP (Radford et al., ICML 2021, section 2.3). CLIP's limit of 100 is
    left out, since OpenAI's models begin at it.

    Args:
        weight: Rows [C, d] of any length.
        log_scale: Logarithm of the scale, a scalar.
    """

    def __init__(self, weight: Tensor, log_scale: Tensor):
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.log_scale = nn.Parameter(log_scale)

    def forward(self, z: Tensor) -> Tensor:
        return self.log_scale.exp() * F.linear(F.normalize(z, dim=1), F.normalize(self.weight, dim=1))


def clipped(z: Tensor, length: float | Tensor) -> Tensor:
    """Scale down features [n, d] that are longer than the given length."""
    return z * (length / z.norm(dim=1, keepdim=True).clamp(min=1e-12)).clamp(max=1)


def with_classifier(
    model: SplitModel, weight: Tensor, bias: Tensor | None, longest: float | Tensor | None = None
) -> SplitModel:
    """Return a model with the same encoder, another linear classifier and no further heads.

    Args:
        model: The model.
        weight: Weights [C, d], used without a copy.
        bias: Bias [C], used without a copy; None for a classifier without bias.
        longest: The length to which features are clipped before the classifier; None: no clipping.
    """
    classifier = linear(weight, bias, model.head if longest is None else CutLinear)
    if longest is not None:
        classifier.register_buffer("longest", torch.as_tensor(longest, device=weight.device))
    return with_layer(model, classifier)


def with_layer(model: SplitModel, classifier: nn.Module) -> SplitModel:
    """Return a model with the same encoder, another layer as the classifier and no further heads."""
    other = copy.copy(model)
    kept = {name: module for name, module in model._modules.items() if name not in model.method_heads}
    other._modules = {**kept, "classifier": classifier}
    other.method_heads = frozenset()
    return other


def linear(weight: Tensor, bias: Tensor | None, kind: type[nn.Linear] = nn.Linear) -> nn.Linear:
    """Return a linear layer that uses the given tensors as parameters, without a copy.

    Args:
        weight: Weights [C, d].
        bias: Bias [C], or None.
        kind: Class of the layer.
    """
    layer = kind(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(weight)
    layer.register_parameter("bias", None if bias is None else nn.Parameter(bias))
    return layer


def with_encoder(model: SplitModel, encoder: nn.Module) -> SplitModel:
    """Return a copy of a model with another encoder. All other parts are shared with the given model."""
    other = copy.copy(model)
    other._modules = {**model._modules, "encoder": encoder}
    return other


def trained_names(model: nn.Module) -> frozenset[str]:
    """Return the names of the trained parameters, without buffers and frozen parameters."""
    return frozenset(name for name, value in model.named_parameters() if value.requires_grad)


def running_statistics(model: nn.Module) -> frozenset[str]:
    """Return the names of the buffers of all BatchNorm layers."""
    names = []
    for prefix, module in model.named_modules():
        if isinstance(module, _BatchNorm):
            names += [f"{prefix}.{name}" if prefix else name for name, _ in module.named_buffers(recurse=False)]
    return frozenset(names)


def has_no_negative_features(encoder: nn.Module) -> bool:
    """Return whether the encoder is known to have no negative features, for example because it ends in a ReLU.

    Layers after the ReLU that pool, flatten or drop keep the sign. Other encoders may have no negative features either.
    """
    return _sign(encoder) is True


# Types are compared for equality, because a subclass may compute something else. Blocks have the attribute
# `ends_in_relu`.
_NONNEGATIVE = nn.ReLU, nn.ReLU6, nn.Sigmoid, nn.Hardsigmoid
_KEEP_SIGNS = (
    nn.Flatten,
    nn.Identity,
    nn.Dropout,
    nn.AdaptiveAvgPool2d,
    nn.AvgPool2d,
    nn.AdaptiveMaxPool2d,
    nn.MaxPool2d,
)


def _sign(module: nn.Module) -> bool | None:
    """Return whether a module's outputs are never negative; None if they have the signs of the inputs."""
    if type(module) in _KEEP_SIGNS:
        return None
    if type(module) is nn.Sequential:
        signs = (_sign(layer) for layer in reversed(list(module)))
        return next((sign for sign in signs if sign is not None), None)
    return type(module) in _NONNEGATIVE or getattr(type(module), "ends_in_relu", False)


def set_training(model: nn.Module) -> None:
    """Set a model to training mode.

    Usually it is in training mode already. Checking all layers is faster than setting them, which matters because small
    clients train for milliseconds.
    """
    if not all(module.training for module in model.modules()):
        model.train()


@torch.no_grad()
def load_entries(model: nn.Module, params: StateDict) -> None:
    """Copy values into the model's entries of the same names. Other entries stay unchanged.

    Raises:
        KeyError: The model has no entry of a name.
        ValueError: An entry has another shape.
    """
    if not params:  # most clients keep no entries, and state_dict is slow with many clients
        return
    entries = model.state_dict()
    for name, value in params.items():
        if entries[name].shape != value.shape:
            raise ValueError(f"{name}: shape {list(value.shape)}, the model has {list(entries[name].shape)}")
        entries[name].copy_(value)


def with_entries(model: "SplitModel", params: StateDict) -> "SplitModel":
    """Return a copy of a model with `params` loaded; see `load_entries`."""
    other = copy.deepcopy(model)
    load_entries(other, params)
    return other


def pass_zeros(model: SplitModel, shape: tuple[int, int, int]) -> None:
    """Pass an image of zeros through a model, so that hooks see its layers. The model does not change.

    Args:
        model: The model.
        shape: Height, width and channels of the image.
    """
    height, width, channels = shape
    was_training = model.training
    with torch.no_grad():
        model.eval()(torch.zeros(1, channels, height, width))
    model.train(was_training)
