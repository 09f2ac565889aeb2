"""`SplitModel`: an encoder and a classifier, the two halves that every method here speaks of."""

import copy
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from raylt.recordable import recordable

Params = dict[str, Tensor]


@recordable
class SplitModel(nn.Module):
    """`classifier(encoder(x))`; further heads that a method needs become further attributes.

    Args:
        encoder: images [B, channels, H, W] -> features z [B, d].
        dim: d.
        classes: C; the classifier starts as `nn.Linear(d, C)` and may be replaced.
    """

    head: ClassVar[type[nn.Linear]] = nn.Linear
    problem: ClassVar[Literal["classification", "segmentation"]] = "classification"

    def __init__(self, encoder: nn.Module, dim: int, classes: int):
        super().__init__()
        self.encoder: nn.Module = encoder
        self.classifier: nn.Module = self.head(dim, classes)
        self.dim, self.classes = dim, classes
        self.stays: frozenset[str] = frozenset()        # entries that never leave a client, whatever the method

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.encoder(x))

    def entries(self, prefix: str = "") -> Params:
        """Parameters and buffers that may travel, by name; they share the model's memory.

        Args:
            prefix: what their names start with: "encoder." for the encoder alone.
        """
        return {name: value for name, value in part(self.state_dict(), prefix).items() if name not in self.stays}


def part(entries: Params, prefix: str | None) -> Params:
    """The entries whose names start so; none for None."""
    return {} if prefix is None else {name: value for name, value in entries.items() if name.startswith(prefix)}


@recordable
class PixelLinear(nn.Linear):
    """A 1x1 convolution with the weights of a linear layer [C, d]: of maps [B, d, h, w] and of pixels [n, d] alike."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.movedim(1, -1)).movedim(-1, 1)


@recordable
class PixelModel(SplitModel):
    """A SplitModel whose features are maps [B, d, h, w]; logits are brought to the images' size, [B, C, H, W].

    The classifier acts on one pixel's features at a time, so it may be trained on, or replaced by one trained on,
    features [n, d] of single pixels, like that of any SplitModel.
    """

    head: ClassVar[type[nn.Linear]] = PixelLinear
    problem: ClassVar[Literal["classification", "segmentation"]] = "segmentation"

    def forward(self, x: Tensor) -> Tensor:
        return F.interpolate(super().forward(x), x.shape[2:], mode="bilinear", align_corners=False)


@recordable
class CutLinear(nn.Linear):
    """A linear layer that was fitted to features [n, d] cut to a length, and so cuts them; `longest` is a number."""

    longest: Tensor

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(clipped(input, self.longest))


def clipped(z: Tensor, length: float | Tensor) -> Tensor:
    """Features [n, d], each cut to a length."""
    return z * (length / z.norm(dim=1, keepdim=True).clamp(min=1e-12)).clamp(max=1)


def with_classifier(model: SplitModel, weight: Tensor, bias: Tensor | None,
                    longest: float | Tensor | None = None) -> SplitModel:
    """The model with another linear classifier and without further heads; it shares the encoder.

    Args:
        weight: [C, d]; bias: [C], or None for a classifier without one. Used as they are, not copied.
        longest: the length that features are cut to before it; None leaves them.
    """
    other = type(model)(model.encoder, model.dim, model.classes)
    other.classifier = linear(weight, bias, model.head if longest is None else CutLinear)
    if longest is not None:
        other.classifier.register_buffer("longest", torch.as_tensor(longest, device=weight.device))
    other.stays = model.stays
    return other


def linear(weight: Tensor, bias: Tensor | None, kind: type[nn.Linear] = nn.Linear) -> nn.Linear:
    """A linear layer over the given tensors."""
    layer = kind(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(weight)
    layer.register_parameter("bias", None if bias is None else nn.Parameter(bias))
    return layer


def with_encoder(model: SplitModel, encoder: nn.Module) -> SplitModel:
    """The model with another encoder; it shares everything else."""
    other = copy.copy(model)
    other._modules = {**model._modules, "encoder": encoder}
    return other


def trained_names(model: nn.Module) -> frozenset[str]:
    """Names of the entries that are trained: no buffers, nothing frozen."""
    return frozenset(name for name, value in model.named_parameters() if value.requires_grad)


def running_statistics(model: nn.Module) -> frozenset[str]:
    """Names of the buffers of every BatchNorm layer."""
    return frozenset(f"{prefix}.{name}" if prefix else name for prefix, module in model.named_modules()
                     if isinstance(module, _BatchNorm) for name, _ in module.named_buffers(recurse=False))


@torch.no_grad()
def load_entries(model: nn.Module, params: Params) -> None:
    """Copies values into the entries of those names; entries that are not named stay.

    Raises:
        KeyError: the model has no such entry.
        ValueError: another shape.
    """
    own = model.state_dict() if params else {}      # most clients keep nothing of a model, and small ones are many
    for name, value in params.items():
        if own[name].shape != value.shape:
            raise ValueError(f"{name}: shape {list(value.shape)}, the model has {list(own[name].shape)}")
        own[name].copy_(value)
