"""`StackedModel`: one network that computes the networks of several clients at once.

A batch of K clients is [B, K * C, H, W], channels-last. A convolution has one group for each client, BatchNorm has
statistics of K * C channels, and a linear layer is a batched product. On a CPU a small step spends most of its time on
calling operations, and here one call serves all clients. The clients' numbers never mix.

On processors with AVX-512, a client's bits depend neither on the other clients of its stack nor on their number, if
there are at least two. On other processors the kernels of convolutions depend on the number of groups, so runs do not
stack clients. torch uses other kernels for a single group, so a single client must be computed in a stack of two. Some
kernels also compute the last numbers of a row differently, or depend on the position of a row in memory. So the widths
of BatchNorm and linear layers must be multiples of `WIDTH`, and another kernel computes the mean of a map.
"""

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raylt.models.resnet import BasicBlock
from raylt.models.split import SplitModel, StateDict, trained_names, with_encoder
from raylt.models.trainable import FrozenEncoder

WIDTH = 16  # numbers in a vector register
TRIAL = 3  # number of images on which a stack and a model are compared
# Types are compared for equality, because a subclass may compute something else.
_CONTAINERS = (SplitModel, nn.Sequential, BasicBlock)
_CHANNEL_BY_CHANNEL = (nn.ReLU, nn.ReLU6, nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.Identity)


class _Convolution(nn.Module):
    """Convolutions of several clients, as one grouped convolution."""

    def __init__(self, layer: nn.Conv2d):
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias
        self._options: dict[str, Any] = {
            "stride": layer.stride,
            "padding": layer.padding,
            "dilation": layer.dilation,
        }
        self._out = layer.out_channels
        self._groups = layer.groups

    def forward(self, x: Tensor) -> Tensor:
        clients = len(self.weight) // self._out
        return F.conv2d(x, self.weight, self.bias, groups=clients * self._groups, **self._options)


class _BatchNorm(nn.Module):
    """BatchNorm layers of several clients in training, as one layer."""

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def __init__(self, layer: nn.BatchNorm2d):
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias
        for name, value in layer.named_buffers(recurse=False):
            self.register_buffer(name, value)
        self._momentum = layer.momentum
        self._eps = layer.eps

    def forward(self, x: Tensor) -> Tensor:
        self.num_batches_tracked.add_(1)
        assert self._momentum is not None
        return F.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, True, self._momentum, self._eps
        )


class _GroupNorm(nn.Module):
    """GroupNorm layers of several clients, as one layer."""

    def __init__(self, layer: nn.GroupNorm):
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias
        self._groups = layer.num_groups
        self._channels = layer.num_channels
        self._eps = layer.eps

    def forward(self, x: Tensor) -> Tensor:
        clients = x.shape[1] // self._channels
        return F.group_norm(x, clients * self._groups, self.weight, self.bias, self._eps)


class _MapMean(nn.Module):
    """The mean of each channel's map, [B, n, h, w] to [B, n, 1, 1]."""

    def forward(self, x: Tensor) -> Tensor:
        return F.avg_pool2d(x, (x.shape[2], x.shape[3]))


class _Flatten(nn.Module):
    """Flattening of several clients' maps [B, K * C, h, w] to features [K, B, C * h * w].

    Args:
        span: Object with the number of clients.
    """

    def __init__(self, span: "_Span"):
        super().__init__()
        self._span = span

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim == 3:  # already features
            return x
        return x.reshape(len(x), self._span.clients, -1).transpose(0, 1)


class _Linear(nn.Module):
    """Linear layers of several clients, as a batched product of features [K, B, d]."""

    def __init__(self, layer: nn.Linear):
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias

    def forward(self, z: Tensor) -> Tensor:
        weight = self.weight.transpose(1, 2)
        return torch.bmm(z, weight) if self.bias is None else torch.baddbmm(self.bias[:, None], z, weight)


class _Span:
    """The number of clients that a stacked network currently computes."""

    clients = 0


class StackedModel:
    """The networks of several clients in training, one in each slot.

    Args:
        model: A network without an `unstackable_layer`; all slots start as copies of it.
        slots: The number of clients.

    Attributes:
        entries: The state-dict entries of all slots by name, [slots, ...].
        trained: Names of the trained parameters.
    """

    def __init__(self, model: SplitModel, slots: int):
        self.slots = slots
        self.entries: StateDict = {name: _copies(value, slots) for name, value in model.state_dict().items()}
        names = trained_names(model)
        self.trained = [name for name in self.entries if name in names]
        self._span = _Span()
        self._net = _replaced(copy.deepcopy(without_frozen_encoder(model)), self._span)
        self._owners = {name: self._net.get_submodule(name.rpartition(".")[0]) for name in self.entries}
        self._views: dict[tuple[int, int], dict[str, Tensor]] = {}
        self._bound: tuple[int, int] | None = None

    def slot(self, slot: int) -> StateDict:
        """Return the entries of the client in a slot, which share the stack's memory."""
        return {name: values[slot] for name, values in self.entries.items()}

    @torch.no_grad()
    def load(self, slots: slice, values: StateDict) -> None:
        """Copy the same values into the entries of some slots. Other entries stay unchanged."""
        for name, value in values.items():
            self.entries[name][slots].copy_(value)

    def flat(self, name: str, values: Tensor) -> Tensor:
        """Return the values of an entry for several clients, [n, ...], in the shape that its layer computes with."""
        return values if values.ndim == 1 or isinstance(self._owners[name], _Linear) else values.flatten(0, 1)

    def by_client(self, name: str, values: Tensor, clients: int) -> Tensor:
        """Return values of an entry for several clients in the shape before `flat`, [clients, ...]."""
        return values if isinstance(self._owners[name], _Linear) else values.unflatten(0, (clients, -1))

    def parameters(self, start: int, stop: int) -> list[Tensor]:
        """Return the trained parameters of the slots from `start` to before `stop`, in the order of `trained`."""
        views = self._flat_views(start, stop)
        return [views[name] for name in self.trained]

    def __call__(self, start: int, stop: int, x: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the networks of the n slots from `start` to before `stop`.

        Args:
            start: Number of the first slot.
            stop: Number after the last slot.
            x: Images [B, n * C, H, W], channels-last, or features of a frozen encoder [n, B, d].

        Returns:
            Features [n, B, d] and logits [n, B, classes].
        """
        if self._bound != (start, stop):
            for name, view in self._flat_views(start, stop).items():
                owner: Any = self._owners[name]
                leaf = name.rpartition(".")[2]
                (owner._parameters if leaf in owner._parameters else owner._buffers)[leaf] = view
            self._bound = start, stop
            self._span.clients = stop - start
        z = self._net.encoder(x)
        return z, self._net.classifier(z)

    def _flat_views(self, start: int, stop: int) -> dict[str, Tensor]:
        if (start, stop) not in self._views:
            views = {name: self.flat(name, values[start:stop]) for name, values in self.entries.items()}
            for name, value in self._net.named_parameters():
                views[name] = nn.Parameter(views[name], value.requires_grad)
            self._views[start, stop] = views
        return self._views[start, stop]


def without_frozen_encoder(model: SplitModel) -> SplitModel:
    """Return a copy of a model with the identity as encoder if its encoder is frozen, otherwise the model itself.

    The inputs of a stack are then features, usually those that were computed before any client trained.
    """
    return with_encoder(model, nn.Identity()) if isinstance(model.encoder, FrozenEncoder) else model


def unstackable_layer(model: nn.Module) -> str | None:
    """Return the kind of a layer that `StackedModel` cannot compute; None if there is none."""
    if not isinstance(model, SplitModel) or _is_tied(model) or not trained_names(model):
        return type(model).__name__
    model = without_frozen_encoder(model)
    # entries that are hidden from the state belong to frozen layers
    if {name for name, _ in model.named_parameters()} - model.state_dict().keys():
        return type(model.encoder).__name__
    for layer in model.modules():
        if not _is_stackable(layer):
            return type(layer).__name__
        width = getattr(layer, "num_features", getattr(layer, "in_features", WIDTH))
        if width % WIDTH:
            return f"{type(layer).__name__} of {width} inputs, which is not a multiple of {WIDTH}"
    return None


def computes_as_alone(model: SplitModel, shape: tuple[int, int, int]) -> bool:
    """Return whether a stack of two clients computes the same logits as the model computes for each client.

    Layers that `unstackable_layer` accepts may be in positions where a stack computes something else, such as GroupNorm
    after a linear layer, or a linear layer before the flattening.

    Args:
        model: A model without an `unstackable_layer`.
        shape: Height, width and channels of an image.
    """
    generator = torch.Generator().manual_seed(0)
    alone = copy.deepcopy(without_frozen_encoder(model)).float().train()
    height, width, channels = shape
    frozen = isinstance(model.encoder, FrozenEncoder)
    size = (TRIAL, model.dim) if frozen else (TRIAL, channels, height, width)
    x = torch.randn(size, generator=generator)
    stack = StackedModel(alone, 2)
    try:
        with torch.no_grad():
            _, logits = stack(0, 2, side_by_side([x, x]))
            expected = alone(x)
    except Exception:  # torch raises many types for a wrong shape
        return False
    return logits.shape == (2, *expected.shape) and all(
        torch.allclose(of_client, expected, rtol=1e-3, atol=1e-3) for of_client in logits
    )


def _is_tied(model: nn.Module) -> bool:
    """Return whether two entries of a model are the same parameter."""
    return len(list(model.parameters())) < len(list(model.named_parameters(remove_duplicate=False)))


def _is_stackable(layer: nn.Module) -> bool:
    if layer._forward_hooks or layer._forward_pre_hooks or "forward" in vars(layer):
        return False
    kind = type(layer)
    match layer:
        case nn.Conv2d():
            return kind is nn.Conv2d and layer.padding_mode == "zeros"
        case nn.BatchNorm2d():
            return kind is nn.BatchNorm2d and layer.affine and layer.track_running_stats and layer.momentum is not None
        case nn.GroupNorm():
            return kind is nn.GroupNorm and layer.affine
        case nn.Flatten():
            return kind is nn.Flatten and (layer.start_dim, layer.end_dim) == (1, -1)
    return kind is nn.Linear or kind in _CONTAINERS or kind in _CHANNEL_BY_CHANNEL


def _replaced(module: Any, span: _Span) -> Any:
    """Replace the layers of a network by layers that compute several clients."""
    for name, child in module.named_children():
        match child:
            case nn.Conv2d():
                setattr(module, name, _Convolution(child))
            case nn.BatchNorm2d():
                setattr(module, name, _BatchNorm(child))
            case nn.GroupNorm():
                setattr(module, name, _GroupNorm(child))
            case nn.Linear():
                setattr(module, name, _Linear(child))
            case nn.AdaptiveAvgPool2d() if child.output_size in (1, (1, 1)):
                setattr(module, name, _MapMean())
            case nn.Flatten():
                setattr(module, name, _Flatten(span))
            case _:
                _replaced(child, span)
    return module


def as_rows(values: Tensor) -> Tensor:
    """Return the values of several slots as a matrix [slots, n] in memory order. It shares the memory."""
    return values.as_strided((len(values), values.stride(0)), (values.stride(0), 1))


def _copies(value: Tensor, slots: int) -> Tensor:
    """Return copies of a tensor, [slots, ...], each with the memory layout of the tensor."""
    strides = value.numel(), *value.stride()
    copies = torch.empty_strided((slots, *value.shape), strides, dtype=value.dtype, device=value.device)
    return copies.copy_(value.detach())


def side_by_side(images: list[Tensor]) -> Tensor:
    """Return the batches of n clients as one batch.

    Images [B, C, H, W] become [B, n * C, H, W], channels-last, and features [B, d] become [n, B, d].
    """
    if images[0].ndim == 2:
        return torch.stack(images)
    return torch.stack([x.permute(0, 2, 3, 1) for x in images], dim=3).flatten(3).permute(0, 3, 1, 2)
