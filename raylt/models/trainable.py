"""Limits training to a part of a pretrained model (`trainable`). Frozen entries are hidden from the model's state.

    all            every parameter
    classifier     the classifier; the encoder is a `FrozenEncoder`
    norm           the classifier and the normalisation layers
    last:N         the classifier and the last N blocks of the encoder
    lora:R         the classifier and two matrices of rank R next to the weights of linear layers, attention and 1x1
                   convolutions

Frozen entries are hidden from `state_dict`: they are not sent, not aggregated, get no noise and are in no checkpoint.
Every process builds them from the same weights. `whole_model` returns a plain model with all entries. Every frozen
layer stays in evaluation mode, such as BatchNorm, dropout and spectral normalisation.
"""

import copy
from collections import OrderedDict
from collections.abc import Generator, Iterable, Iterator
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from raylt.errors import ConfigError
from raylt.models.low_rank import LowRank, add_low_rank, widest_update
from raylt.models.split import SplitModel, StateDict
from raylt.recordability import recordable

NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
# layers of torch that compute something else in training mode
MODES = (
    _NormBase,
    _DropoutNd,
    nn.MultiheadAttention,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
    nn.RReLU,
)
CONTAINERS = (nn.Sequential, nn.ModuleList)
BLOCKS = ("blocks", "layers", "resblocks")  # names of the containers of blocks in timm, torchvision and open_clip


def limit(model: SplitModel, trainable: str) -> SplitModel:
    """Freeze the parts of a new model that `trainable` excludes from training.

    Args:
        model: The model, which is changed in place.
        trainable: The setting `Config.trainable`.

    Raises:
        ConfigError: The encoder does not have the part that `trainable` names.
    """
    kind, _, number = trainable.partition(":")
    if kind == "all":
        return model
    model.encoder.requires_grad_(False)
    learning: list[nn.Module] = []
    match kind:
        case "classifier":
            model.encoder = FrozenEncoder(model.encoder)
            return model
        case "norm":
            learning = [module for module in model.encoder.modules() if _normalises(module)]
            _expect(bool(learning), trainable, "the encoder has no normalisation layer. Set trainable=last:1")
        case "last":
            blocks = blocks_of(model.encoder)
            _expect(
                int(number) <= len(blocks),
                trainable,
                f"the encoder has {len(blocks)} blocks. Give at most last:{len(blocks)}, or all",
            )
            learning = [module for block in blocks[-int(number) :] for module in block]
        case "lora":
            widest = widest_update(model.encoder)
            _expect(
                widest > 0,
                trainable,
                "the encoder has no linear layer and no 1x1 convolution that could be adapted. Set trainable=last:1",
            )
            _expect(
                int(number) <= widest,
                trainable,
                f"no layer of the encoder can have an update of more than rank {widest}. Give at most lora:{widest}, "
                "or all",
            )
            learning = list(add_low_rank(model.encoder, int(number)))
    _freeze_all_but(model.encoder, learning)
    return model


def blocks_of(encoder: nn.Module) -> list[list[nn.Module]]:
    """Return the blocks of an encoder from input to output, each as a list of modules.

    Sequences are flattened. A normalisation layer outside of a block belongs to the previous block. Parameters of the
    encoder itself (class tokens, positions) belong to no block.
    """
    modules = list(_parts_of(encoder))
    blocks: list[list[nn.Module]] = []
    for module in modules:
        if blocks and _is_norm(module):
            blocks[-1].append(module)
        else:
            blocks.append([module])
    return blocks


def _parts_of(module: nn.Module) -> Iterator[nn.Module]:
    children = [child for child in module.children() if next(child.parameters(), None) is not None]
    if len(children) == 1 and not isinstance(module, CONTAINERS):
        yield from _inner(children[0])
        return
    for child in children:
        if isinstance(child, CONTAINERS):
            yield from _parts_of(child)
        else:
            yield from _blocks_of_stage(child) or [child]


def _blocks_of_stage(module: nn.Module) -> list[nn.Module]:
    """Return the blocks of a stage and the modules between them; an empty list for a module that is not a stage.

    In timm, torchvision and open_clip, the blocks of a stage are in a container with one of the names `BLOCKS`, or are
    children with the same name and a number. Each block has several layers. A module with only a list is also a stage.
    A module whose container has single layers is itself a block, and numbered branches are parallel parts of a block.
    """
    children = {name: child for name, child in module.named_children() if next(child.parameters(), None) is not None}
    stacks = {
        name
        for name, child in children.items()
        if name in BLOCKS and isinstance(child, CONTAINERS) and any(map(_has_layers, child.children()))
    }
    if len(children) == 1:
        stacks |= {name for name, child in children.items() if isinstance(child, nn.ModuleList)}
    if stacks:
        return [
            block for name, child in children.items() for block in (_parts_of(child) if name in stacks else [child])
        ]
    prefixes = {name.rstrip("0123456789") for name in children}
    numbered = len(prefixes) == 1 and prefixes.isdisjoint({*children, "branch"})
    return list(children.values()) if numbered and all(map(_has_layers, children.values())) else []


def _has_layers(module: nn.Module) -> bool:
    """Return whether a module has several layers. Normalisation layers do not count."""
    layers = [layer for layer in module.modules() if next(layer.parameters(recurse=False), None) is not None]
    return sum(not _normalises(layer) for layer in layers) > 1


def _normalises(layer: nn.Module) -> bool:
    """Return whether a module is a normalisation layer, also one of timm or of a user: EvoNorm2dB0, RmsNormAct."""
    if isinstance(layer, NORMS):
        return True
    own = [value.ndim for value in layer.parameters(recurse=False)]
    return "Norm" in type(layer).__name__ and len(own) == len(list(layer.parameters())) > 0 and max(own) == 1


def _is_norm(module: nn.Module) -> bool:
    """Return whether all parameters of a module belong to normalisation layers."""
    norms = {id(value) for layer in module.modules() if _normalises(layer) for value in layer.parameters()}
    return bool(norms) and all(id(value) in norms for value in module.parameters())


def _inner(child: nn.Module) -> Iterator[nn.Module]:
    """Yield a module's children, with containers replaced by their content; yield the module if it has no children."""
    parts = list(_parts_of(child))
    yield from parts or [child]


def _freeze_all_but(encoder: nn.Module, learning: Iterable[nn.Module]) -> None:
    """Freeze an encoder except for the modules `learning`, and remove frozen entries from its state."""
    kept: set[int] = set()
    inside: set[nn.Module] = set()
    for module in learning:
        own = module.added() if isinstance(module, LowRank) else module.parameters()
        kept |= {id(value.requires_grad_()) for value in own}
        if not isinstance(module, LowRank):
            kept |= {id(value) for value in module.buffers()}
        inside |= set(module.modules())
    for module in encoder.modules():
        if module not in inside and _may_depend_on_mode(module):
            # before the hooks of the module's own, such as that of torch.nn.utils.spectral_norm
            module.register_forward_pre_hook(stay_in_evaluation, prepend=True)
        if module not in inside and isinstance(module, nn.RNNBase):
            module.dropout = 0.0  # cuDNN has no gradient through a recurrent layer in evaluation mode
    entries = encoder.state_dict(keep_vars=True)
    hidden = frozenset(name for name, value in entries.items() if id(value) not in kept)
    encoder.register_state_dict_post_hook(Hidden(hidden))


def _may_depend_on_mode(module: nn.Module) -> bool:
    """Return whether a module itself, apart from its children, may compute something else in training mode.

    Modules of other libraries and of users may, and so may hooks: they draw dropout in functional form, or update
    buffers. Such a module must not pass its own mode on to a child that learns.
    """
    origin = type(module).__module__
    if origin.startswith("raylt."):
        return False
    return isinstance(module, MODES) or not origin.startswith("torch.nn.modules.") or bool(module._forward_pre_hooks)


def stay_in_evaluation(module: nn.Module, _: Any) -> None:
    """Set a module to evaluation mode before each call.

    A method may call `train` on any part of a model.
    """
    module.training = False


class Hidden:
    """Hook that removes frozen entries from a module's state dict.

    Attributes:
        names: Names of the frozen entries, relative to the module with the hook.
    """

    def __init__(self, names: frozenset[str]):
        self.names = names

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        for name in self.names:
            state.pop(prefix + name, None)


class Frozen(nn.Module):
    """A module that is never trained, stays in evaluation mode and is not part of a model's state.

    The body may have hundreds of layers that never change, while a client with a few images trains for milliseconds. So
    `modules`, `parameters` and `state_dict` of a model omit the body, and copies of a model share it.
    """

    def __init__(self, body: nn.Module):
        super().__init__()
        self.body = body.eval()
        self.training = False

    def train(self, mode: bool = True) -> Self:
        return self

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Generator[tuple[str, nn.Module], None, None]:
        memo = set() if memo is None else memo
        if self not in memo:
            memo.add(self)
            yield prefix, self

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        return OrderedDict() if destination is None else destination

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return copy.copy(self)


@recordable
class FrozenEncoder(Frozen):
    """An encoder that is never trained.

    It maps images [B, channels, H, W] to features [B, d], and returns precomputed features [B, d] unchanged.
    """

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim == 2:
            return x
        with torch.no_grad():
            return self.body(x)


def trains_on_features(trainable: str, kind: str) -> bool:
    """Return whether clients train on features: the encoder is frozen and gives one feature vector per image.

    Args:
        trainable: The setting `Config.trainable`.
        kind: Kind of the task, "classification" or "segmentation".
    """
    return trainable == "classifier" and kind == "classification"


def whole_model(model: SplitModel) -> SplitModel:
    """Return a plain model with the same logits in evaluation mode, with adapters merged and hooks removed.

    A model without frozen entries is returned unchanged.
    """
    if not any(_hides(module) for module in model.modules()):
        return model
    whole = copy.deepcopy(model)
    for path, module in list(whole.named_modules()):
        if isinstance(module, LowRank):
            whole.set_submodule(path, module.plain())
        elif isinstance(module, FrozenEncoder):
            whole.set_submodule(path, copy.deepcopy(module.body))
    for module in whole.modules():
        hooks: dict[int, Any] = module._forward_pre_hooks
        for key in [key for key, hook in hooks.items() if hook is stay_in_evaluation]:
            del hooks[key]
        states: dict[int, Any] = module._state_dict_hooks
        for key in [key for key, hook in states.items() if isinstance(hook, Hidden)]:
            del states[key]
    return whole


def _hides(module: nn.Module) -> bool:
    return isinstance(module, FrozenEncoder) or any(
        isinstance(hook, Hidden) for hook in module._state_dict_hooks.values()
    )


def frozen_entries(model: nn.Module) -> StateDict:
    """Return the frozen entries that a model hides, by name: parameters and buffers that never change."""
    entries: StateDict = {}
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        if isinstance(module, Frozen):
            body = module.body.state_dict()
            entries |= {f"{prefix}body.{name}": body[name] for name in sorted(body)}
        values = dict(module.named_parameters()) | dict(module.named_buffers())
        for hook in module._state_dict_hooks.values():
            if isinstance(hook, Hidden):
                entries |= {f"{prefix}{name}": values[name] for name in sorted(hook.names & values.keys())}
    return entries


def _expect(met: bool, trainable: str, sentence: str) -> None:
    if not met:
        raise ConfigError(
            f"trainable: {sentence} ({trainable}).", code="model.lacks-layer", key="trainable", value=trainable
        )
