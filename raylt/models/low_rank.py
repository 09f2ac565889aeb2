"""LoRA: low-rank updates of the weights of an encoder's layers (`trainable=lora:R`; Hu et al., ICLR 2022)."""

import math
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from raylt.recordability import recordable

LINEAR = (nn.Linear, NonDynamicallyQuantizableLinear)  # the second is the output layer of nn.MultiheadAttention


class LowRank(nn.Module):
    """Layer whose weight W has a low-rank update: W + up @ down, initially up = 0.

    The scale alpha / r is 1. The entries keep the names of the original layer. The attribute of the weight is the sum,
    because some modules multiply by the weight of a layer and never call the layer.

    Attributes:
        adapted: Name of the weight.
    """

    adapted: ClassVar[str] = "weight"
    down: nn.Parameter
    up: nn.Parameter

    def _adapt(self, weight: Tensor, rank: int) -> None:
        setattr(self, self.adapted, weight)
        outputs, inputs = weight.shape[:2]
        self.down = nn.Parameter(torch.empty(rank, inputs))
        self.up = nn.Parameter(torch.zeros(outputs, rank))
        nn.init.kaiming_uniform_(self.down, a=math.sqrt(5))

    def __getattr__(self, name: str) -> Any:
        if name == self.adapted and "up" in self.__dict__.get("_parameters", ()):
            return self.merged()
        return super().__getattr__(name)

    @property
    def base(self) -> Tensor:
        """Return W, the weight without the update."""
        weight = self._parameters[self.adapted]
        assert weight is not None
        return weight

    def added(self) -> list[nn.Parameter]:
        """Return the two matrices of the low-rank update."""
        return [self.down, self.up]

    def merged(self) -> Tensor:
        """Return the weight plus the product of the two matrices, in the weight's shape and strides.

        A weight of a 1x1 convolution has two kinds of strides, and torch chooses the kernel by them.
        """
        base = self.base
        merged = base + (self.up @ self.down).view_as(base)
        is_dense = base.numel() * base.element_size() == base.untyped_storage().nbytes()
        if base.ndim == 4 and is_dense and merged.stride() != base.stride():
            return merged.as_strided(base.shape, base.stride())
        return merged

    def plain(self) -> nn.Module:
        """Return a plain layer of torch with the merged weight."""
        raise NotImplementedError


@recordable
class LowRankLinear(LowRank, nn.Linear):
    """Linear layer with a low-rank update. In evaluation mode it uses the merged weight."""

    def __init__(self, layer: nn.Linear, rank: int):
        nn.Linear.__init__(self, layer.in_features, layer.out_features, layer.bias is not None, device="meta")
        self._adapt(layer.weight, rank)
        self.bias = layer.bias

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return F.linear(input, self.merged(), self.bias)
        return F.linear(input, self.base, self.bias) + F.linear(F.linear(input, self.down), self.up)

    def plain(self) -> nn.Linear:
        layer = nn.Linear(self.in_features, self.out_features, self.bias is not None, device="meta")
        layer.weight = nn.Parameter(self.merged().detach())
        layer.bias = self.bias
        return layer


@recordable
class LowRankConv(LowRank, nn.Conv2d):
    """1x1 convolution with a low-rank update, like `LowRankLinear`."""

    def __init__(self, layer: nn.Conv2d, rank: int):
        nn.Conv2d.__init__(
            self,
            layer.in_channels,
            layer.out_channels,
            1,
            layer.stride,  # pyright: ignore[reportArgumentType]
            bias=layer.bias is not None,
            device="meta",
        )
        self._adapt(layer.weight, rank)
        self.bias = layer.bias

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return self._conv_forward(input, self.merged(), self.bias)
        narrow = F.conv2d(input, self.down[:, :, None, None], stride=self.stride)
        return self._conv_forward(input, self.base, self.bias) + F.conv2d(narrow, self.up[:, :, None, None])

    def plain(self) -> nn.Conv2d:
        stride: Any = self.stride
        layer = nn.Conv2d(self.in_channels, self.out_channels, 1, stride, bias=self.bias is not None, device="meta")
        layer.weight = nn.Parameter(self.merged().detach())
        layer.bias = self.bias
        return layer


@recordable
class LowRankAttention(LowRank, nn.MultiheadAttention):
    """Attention whose joint weight of queries, keys and values [3 d, d] has a low-rank update.

    The forward pass is that of torch, which reads the merged weight, without dropout, as in every frozen layer. The
    output layer has an update of its own.
    """

    adapted: ClassVar[str] = "in_proj_weight"

    def __init__(self, layer: nn.MultiheadAttention, rank: int):
        _init_like(self, layer)
        self.dropout = 0.0
        self._adapt(_joint_weight(layer), rank)

    def plain(self) -> nn.MultiheadAttention:
        layer = nn.MultiheadAttention.__new__(nn.MultiheadAttention)
        _init_like(layer, self)
        layer.in_proj_weight = nn.Parameter(self.merged().detach())
        return layer


def _init_like(attention: nn.MultiheadAttention, layer: nn.MultiheadAttention) -> None:
    """Initialise an attention with the settings and entries of another, apart from the joint weight."""
    nn.MultiheadAttention.__init__(
        attention,
        layer.embed_dim,
        layer.num_heads,
        layer.dropout,
        bias=layer.in_proj_bias is not None,
        add_zero_attn=layer.add_zero_attn,
        batch_first=layer.batch_first,
        device="meta",
    )
    attention.in_proj_bias, attention.out_proj = layer.in_proj_bias, layer.out_proj
    attention.bias_k, attention.bias_v = layer.bias_k, layer.bias_v
    attention.training = layer.training


def _joint_weight(layer: nn.MultiheadAttention) -> Tensor:
    weight = layer._parameters["in_proj_weight"]
    assert weight is not None
    return weight


def add_low_rank(encoder: nn.Module, rank: int) -> Iterator[LowRank]:
    """Replace every layer that can have a low-rank update by one that has, and yield the new layers."""
    for path, _ in list(_adaptable(encoder)):
        layer = encoder.get_submodule(path)  # an attention was replaced before its output layer
        if isinstance(layer, nn.MultiheadAttention):
            adapted = LowRankAttention(layer, rank)
        elif isinstance(layer, nn.Conv2d):
            adapted = LowRankConv(layer, rank)
        else:
            assert isinstance(layer, nn.Linear)
            adapted = LowRankLinear(layer, rank)
        encoder.set_submodule(path, adapted)
        yield adapted


def widest_update(encoder: nn.Module) -> int:
    """Return the largest rank that an update of a layer can have; 0 if no layer can have one."""
    return max((min(weight.shape[:2]) for _, weight in _adaptable(encoder)), default=0)


def _adaptable(encoder: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the path and the weight of each linear layer, 1x1 convolution and joint attention weight."""
    for path, layer in encoder.named_modules():
        if type(layer) is nn.MultiheadAttention and layer.in_proj_weight is not None:
            yield path, _joint_weight(layer)
        elif isinstance(layer, nn.Linear | nn.Conv2d) and _has_plain_weight(layer):
            yield path, layer.weight


def _has_plain_weight(layer: nn.Linear | nn.Conv2d) -> bool:
    if "weight" not in layer._parameters:  # spectral normalisation computes it from other entries
        return False
    return type(layer) in LINEAR or (type(layer) is nn.Conv2d and _is_pointwise(layer))


def _is_pointwise(layer: nn.Conv2d) -> bool:
    return layer.kernel_size == (1, 1) and layer.groups == 1 and layer.padding in ((0, 0), "same", "valid")
