"""BAVD, the biased activation value dropout of MuPFL (Eq. 6): a layer that can follow any activation."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from raylt.core.client import Client
from raylt.data.samples import Batch
from raylt.errors import ConfigError
from raylt.models.layers import layer_remedy
from raylt.models.split import SplitModel, pass_zeros
from raylt.tree import Tree

Map = Literal["chw", "hw", "bchw"]
Threshold = Literal["channel", "whole"]
Stages = Sequence[str] | Literal["last", "all"]


class BAVD(nn.Module):
    """Dropout layer that, in training mode, zeroes activations where its map M is below the mean of M.

    M follows the activations and the change of the loss: after each training step, `learn` receives the loss of that
    step. M stays on the activations' device without synchronisation. It is not an entry of the model, because it
    belongs to the training of one client, which calls `reset` before it starts.

    Args:
        shape: C, H and W of the activations.
        kind: Dimensions of M. chw: the mean over the batch, mask [1, C, H, W]. hw: the mean over batch and channels,
            mask [1, 1, H, W]. bchw: a separate value for each sample of the batch; a batch of another size than the
            first passes unchanged.
        sign: Sign of psi. +1 is l(t) - l(t - 1) as in Eq. 6; -1 makes psi positive if a step lowered the loss.
        threshold: The mean with which M is compared: of each channel separately, or over the whole map.
        keeps: Whether the layer also zeroes, in evaluation mode, the activations that `keep` has selected. The mask is
            then an entry of the model, "mask", bool [1, C or 1, H, W].
    """

    mask: Tensor

    def __init__(
        self,
        shape: Sequence[int],
        kind: Map = "chw",
        sign: int = -1,
        threshold: Threshold = "channel",
        keeps: bool = False,
    ):
        super().__init__()
        channels, height, width = shape
        self.size = height * width * (1 if kind == "hw" else channels)
        self.kind, self.sign, self.threshold, self.keeps = kind, sign, threshold, keeps
        if keeps:
            mask_shape = (1, 1 if kind == "hw" else channels, height, width)
            self.register_buffer("mask", torch.ones(mask_shape, dtype=torch.bool))
        self._map = torch.empty(0)  # valid unless the layer is fresh
        self._loss = torch.empty(())
        self.reset()

    @property
    def map(self) -> Tensor | None:
        """Return the map M, float32 [1 or B, C or 1, H, W]; None before the first batch."""
        return None if self._fresh else self._map

    @property
    def loss(self) -> Tensor | None:
        """Return the loss of the previous batch; None before the first batch."""
        return None if self._fresh else self._loss

    def reset(self, map: Tensor | None = None, loss: Tensor | None = None) -> None:
        """Set the layer's map and loss to copies of the given tensors.

        Without both tensors, the layer is in the state before its first batch.
        """
        self._fresh = map is None or loss is None  # keep the tensors' memory, because a recorded step uses it
        if map is not None and loss is not None:
            self._map = map.clone()
            self._loss = loss.clone()
        self._batch_map: Tensor | None = None

    def forward(self, h: Tensor) -> Tensor:
        if not self.training:
            return h * self.mask if self.keeps else h
        batch_map = h.detach().float()
        if self.kind != "bchw":
            batch_map = batch_map.mean((0, 1) if self.kind == "hw" else 0).view(1, -1, *h.shape[2:])
        self._batch_map = batch_map
        if self._fresh or self._map.shape != batch_map.shape:
            return h
        return h * self._above(self._map)

    def learn(self, loss: Tensor) -> None:
        """Update the map M with the loss (a scalar) of the batch just passed through the layer, Eq. 6."""
        assert self._batch_map is not None, "no batch has passed through the layer"
        loss = loss.detach().float()
        alike = self._map.shape == self._batch_map.shape and self._map.device == loss.device
        # The map changes in place, because the steps between two resets may be recorded as a CUDA graph.
        if self._fresh and alike:
            self._map.copy_(self._batch_map)
            self._loss.copy_(loss)
        elif self._fresh:
            self._map = self._batch_map.clone()
            self._loss = loss.clone()
        elif alike:
            self._map.add_(self.sign * (loss - self._loss) * self._batch_map)
            self._loss.copy_(loss)
        self._fresh = False

    def keep(self) -> None:
        """Store the current dropout mask for use in evaluation mode.

        Before the first batch there is no map, and the stored mask drops nothing.
        """
        if self.map is None:
            self.mask.fill_(True)
        else:  # the mean over the batch dimension, if M has one
            self.mask.copy_(self._above(self.map.mean(0, keepdim=True)))

    def normalised(self) -> Tensor:
        """Return the map M scaled linearly to [0, 1], float32 [size]; zeros if all values are equal."""
        if self.map is None:
            return torch.zeros(self.size)
        flat = self.map.mean(0).flatten()  # the mean over the batch dimension, if M has one
        low, high = flat.aminmax()
        return (flat - low) / (high - low).clamp(min=torch.finfo(flat.dtype).tiny)

    def _above(self, map: Tensor) -> Tensor:
        mean = map.mean((2, 3), keepdim=True) if self.threshold == "channel" else map.mean()
        return map >= mean


class WithMaps:
    """Training objective that also updates the maps of the BAVD layers with each batch's loss.

    Args:
        client: The client.
        layers: The BAVD layers of its model.
        reset_each_epoch: Whether to reset the maps at the start of each epoch.
    """

    def __init__(self, client: Client, layers: Sequence[BAVD], reset_each_epoch: bool):
        self._client = client
        self._layers = layers
        self._period = client.steps(epochs=1) if reset_each_epoch else 0

    def __call__(self, batch: Batch) -> Tensor:
        value = self._client.cross_entropy(self._client.model(batch.x), batch.y)
        for layer in self._layers:
            layer.learn(value)
        return value

    def unlike(self, number: int) -> bool:
        """Return whether step `number` is the first step of an epoch, and reset the maps if so."""
        begins = self._period > 0 and (number - 1) % self._period == 0
        for layer in self._layers if begins else []:
            layer.reset()
        return begins


def add_bavd(
    model: SplitModel,
    shape: tuple[int, int, int],
    stages: Stages,
    kind: Map,
    sign: int,
    threshold: Threshold,
    keeps: bool,
) -> None:
    """Append a BAVD layer to the chosen stages of the encoder. Each stage must end with an activation.

    Args:
        model: The model.
        shape: Height, width and channels of an image.
        stages: Names of the stages.
        kind, sign, threshold, keeps: As for `BAVD`.

    Raises:
        ConfigError: The encoder has no stage with one of the names.
    """
    named = stages_of(model, stages)
    shapes: dict[str, torch.Size] = {}

    def watch(name: str) -> RemovableHandle:
        return named[name].register_forward_hook(lambda _, __, h: shapes.update({name: h.shape[1:]}))

    hooks = [watch(name) for name in named]
    pass_zeros(model, shape)
    for hook in hooks:
        hook.remove()
    for name, stage in named.items():
        stage.append(BAVD(shapes[name], kind, sign, threshold, keeps))


def add_dropout(model: SplitModel, stages: Stages, rate: float) -> None:
    """Append plain dropout to the chosen stages of the encoder, for comparison with BAVD (3.3).

    Args:
        model: The model.
        stages: Names of the stages.
        rate: Dropout rate.

    Raises:
        ConfigError: The encoder has no stage with one of the names.
    """
    for stage in stages_of(model, stages).values():
        stage.append(nn.Dropout(rate))


def stages_of(model: SplitModel, stages: Stages) -> dict[str, nn.Sequential]:
    """Return the encoder's stages that `stages` selects.

    Raises:
        ConfigError: The encoder has no stage with one of the names.
    """
    all_stages = {
        name: child
        for name, child in model.encoder.named_children()
        if name.startswith("stage") and isinstance(child, nn.Sequential)
    }
    if stages in ("last", "all"):
        names = list(all_stages)[-1:] if stages == "last" else list(all_stages)
    else:
        names = list(stages)
    unknown = [name for name in names if name not in all_stages]
    if unknown or not names:
        raise ConfigError(
            f"method.bavd_layers: the model has no stage {', '.join(unknown) or 'at all'} ({stages!r}). "
            f"{layer_remedy(model.encoder, list(all_stages), 'Give last, all or some of')}"
            f"{'' if all_stages else ' method.bavd=false with method.dropout=0 accepts any model.'}",
            code="model.lacks-layer",
            key="method.bavd_layers",
            value=stages,
            layers=list(all_stages),
        )
    return {name: all_stages[name] for name in names}


def layers_of(model: nn.Module) -> list[BAVD]:
    """Return the BAVD layers of a model, from input to output."""
    return [module for module in model.modules() if isinstance(module, BAVD)]


def memory(layers: Sequence[BAVD]) -> Tree:
    """Return copies of the layers' maps and losses, from which `recall` restores the layers."""
    return {str(i): {"map": copy_of(layer.map), "loss": copy_of(layer.loss)} for i, layer in enumerate(layers)}


def copy_of(value: Tensor | None) -> Tensor | None:
    """Return a copy of a tensor; None for None."""
    return None if value is None else value.clone()


def recall(layers: Sequence[BAVD], remembered: Tree) -> None:
    """Restore BAVD layers from the copies that `memory` returned.

    Layers without a copy are reset.
    """
    for i, layer in enumerate(layers):
        layer.reset(**remembered.get(str(i), {}))
