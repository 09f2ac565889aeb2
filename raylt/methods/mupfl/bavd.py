"""`BAVD`: biased activation value dropout of MuPFL (Eq. 6), a layer behind an activation of any model here."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from raylt.core.client import Client
from raylt.data.samples import Batch
from raylt.errors import ConfigError
from raylt.models.split import SplitModel
from raylt.recordable import recordable
from raylt.tree import Tree

Map = Literal["chw", "hw", "bchw"]
Threshold = Literal["channel", "whole"]


@recordable
class BAVD(nn.Module):
    """Zeroes the activations whose place in the map M lies below M's mean; in evaluation mode, as a rule, nothing.

    M follows the activations and how the loss moved: after each training step `learn` takes that step's loss. It stays
    on the activations' device and nothing here waits for it. M is no entry of the model: it belongs to one client's
    training, which calls `reset` before it starts.

    Args:
        shape: C, H and W of the activations.
        kind: what M is over. chw: the mean over the batch, mask [1, C, H, W]; hw: the mean over batch and channels,
            mask [1, 1, H, W]; bchw: each place of the batch by itself, and a batch of another size than the first
            passes as it is.
        sign: of psi: +1 is l(t) - l(t - 1) as Eq. 6 has it, -1 makes it positive where a step lowered the loss.
        threshold: the mean that M is compared with: of each channel by itself, or over the whole of it.
        keeps: whether what `keep` found is zeroed in evaluation mode. The mask is then an entry of the model,
            "mask", bool [1, C or 1, H, W].
    """

    mask: Tensor

    def __init__(self, shape: Sequence[int], kind: Map = "chw", sign: int = -1, threshold: Threshold = "channel",
                 keeps: bool = False):
        super().__init__()
        channels, height, width = shape
        self.size = height * width * (1 if kind == "hw" else channels)
        self.kind, self.sign, self.threshold, self.keeps = kind, sign, threshold, keeps
        if keeps:
            of = (1, 1 if kind == "hw" else channels, height, width)
            self.register_buffer("mask", torch.ones(of, dtype=torch.bool))
        self._map, self._loss = torch.empty(0), torch.empty(())         # what they hold counts once it is not fresh
        self.reset()

    @property
    def map(self) -> Tensor | None:
        """M, float32 [1 or B, C or 1, H, W]; None before a batch has passed."""
        return None if self._fresh else self._map

    @property
    def loss(self) -> Tensor | None:
        """That of the batch before; None before a batch has passed."""
        return None if self._fresh else self._loss

    def reset(self, map: Tensor | None = None, loss: Tensor | None = None) -> None:
        """Forgets everything, or goes on from what `map` and `loss` were when another training ended."""
        self._fresh = map is None or loss is None       # the tensors stay: a recorded step goes on with the same ones
        if map is not None and loss is not None:
            self._map, self._loss = map.clone(), loss.clone()
        self._seen: Tensor | None = None

    def forward(self, h: Tensor) -> Tensor:
        if not self.training:
            return h * self.mask if self.keeps else h
        own = h.detach().float()
        if self.kind != "bchw":
            own = own.mean((0, 1) if self.kind == "hw" else 0).view(1, -1, *h.shape[2:])
        self._seen = own
        if self._fresh or self._map.shape != own.shape:
            return h
        return h * self._above(self._map)

    def learn(self, loss: Tensor) -> None:
        """Eq. 6, with the loss (a scalar) of the batch that passed just before."""
        assert self._seen is not None, "no batch has passed"
        loss = loss.detach().float()
        alike = self._map.shape == self._seen.shape and self._map.device == loss.device
        # in place: the steps between two resets are recorded
        if self._fresh and alike:
            self._map.copy_(self._seen)
            self._loss.copy_(loss)
        elif self._fresh:
            self._map, self._loss = self._seen.clone(), loss.clone()
        elif alike:
            self._map.add_(self.sign * (loss - self._loss) * self._seen)
            self._loss.copy_(loss)
        self._fresh = False

    def keep(self) -> None:
        """Makes what M zeroes now what is zeroed in evaluation mode; all is let through where there is no M yet."""
        if self.map is None:
            self.mask.fill_(True)
        else:                                       # the mean over the places of the batch, where M has any
            self.mask.copy_(self._above(self.map.mean(0, keepdim=True)))

    def normalised(self) -> Tensor:
        """M brought to [0, 1] by its smallest and largest value, float32 [size]; zeros where all values are one."""
        if self.map is None:
            return torch.zeros(self.size)
        flat = self.map.mean(0).flatten()           # over the places of the batch, where M has any
        low, high = flat.aminmax()
        return (flat - low) / (high - low).clamp(min=torch.finfo(flat.dtype).tiny)

    def _above(self, map: Tensor) -> Tensor:
        mean = map.mean((2, 3), keepdim=True) if self.threshold == "channel" else map.mean()
        return map >= mean


class WithMaps:
    """The loss of a batch, which moves the maps of the layers.

    Args:
        anew: whether the maps start anew in each epoch.
    """

    recordable = True

    def __init__(self, client: Client, layers: Sequence[BAVD], anew: bool):
        self._client, self._layers = client, layers
        self._period = client.steps(epochs=1) if anew else 0

    def __call__(self, batch: Batch) -> Tensor:
        value = self._client.cross_entropy(self._client.model(batch.x), batch.y)
        for layer in self._layers:
            layer.learn(value)
        return value

    def unlike(self, number: int) -> bool:
        """The first step of an epoch sees no map."""
        begins = self._period > 0 and (number - 1) % self._period == 0
        for layer in self._layers if begins else []:
            layer.reset()
        return begins


def add_bavd(model: SplitModel, shape: tuple[int, int, int], stages: Sequence[str] | Literal["last", "all"],
             kind: Map, sign: int, threshold: Threshold, keeps: bool) -> None:
    """Puts a BAVD layer behind stages of the encoder, each of which ends with an activation.

    Args:
        shape: height, width and channels of an image.
        stages: their names.
        kind, sign, threshold, keeps: as `BAVD` has them.

    Raises:
        ConfigError: there is no such stage.
    """
    found = {name: child for name, child in model.encoder.named_children()
             if name.startswith("stage") and isinstance(child, nn.Sequential)}
    names = list(found)[-1:] if stages == "last" else list(found) if stages == "all" else stages
    unknown = [name for name in names if name not in found]
    if unknown or not names:
        raise ConfigError(f"method.bavd_layers = {stages!r}: the model's stages are {', '.join(found) or 'none'}; "
                          "give some of them, last or all")
    shapes: dict[str, torch.Size] = {}

    def watch(name: str) -> RemovableHandle:
        return found[name].register_forward_hook(lambda _, __, h: shapes.update({name: h.shape[1:]}))

    hooks = [watch(name) for name in names]
    height, width, channels = shape
    training = model.training
    with torch.no_grad():
        model.eval()(torch.zeros(1, channels, height, width))
    model.train(training)
    for hook in hooks:
        hook.remove()
    for name in names:
        found[name].append(BAVD(shapes[name], kind, sign, threshold, keeps))


def layers_of(model: nn.Module) -> list[BAVD]:
    """The BAVD layers of a model, from its input on."""
    return [module for module in model.modules() if isinstance(module, BAVD)]


def memory(layers: Sequence[BAVD]) -> Tree:
    """What the layers know, for `recall`."""
    return {str(i): {name: None if value is None else value.clone() for name, value in (("map", layer.map), (
        "loss", layer.loss))} for i, layer in enumerate(layers)}


def recall(layers: Sequence[BAVD], known: Tree) -> None:
    """Sets the layers to what they knew at `memory`, or, from an empty tree, to their beginning."""
    for i, layer in enumerate(layers):
        layer.reset(**known.get(str(i), {}))
