"""What crosses from a client's process to the server's: `plain` at the client, `packed`, and `unpacked` at the server.

A reply is a dict, named by texts or whole numbers, of tensors, numbers, texts and None; a private state likewise, named
by texts. What is anything else arrives as `Unusable`, with the reason, from either side: the client's process says it
of an honest mistake, the server's of whatever it was sent, and nothing that is sent can raise there.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raylt.core.client import Reply
from raylt.errors import one_line
from raylt.tree import Tree, map_tensors, to, to_arrays, view

DEEPEST = 16                # dicts in dicts; a model's entries are one dict, named by dotted texts
MOST_LEAVES = 200_000       # ImageNet-21k has 21,841 classes, and a class four statistics
LONGEST_TEXT = 10_000
LONGEST_NAME = 500
DTYPES = (torch.float16, torch.float32, torch.float64, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8,
          torch.bool)       # numpy, which carries them, has these
LEAST_ROOM = 256 * 2**20    # bytes that any reply or state may take, whatever the model
Path = tuple[str | int, ...]


@dataclass(frozen=True)
class Unusable:
    """What arrives in the place of a reply that is none, and why.

    Attributes:
        nbytes: of the reply, where it was looked at by its client's process.
    """

    fault: str
    nbytes: int = 0


class _Foreign(Exception):
    """A leaf or a name that may not travel; the text says which."""


def room_for(model_bytes: int) -> int:
    """Bytes that a reply, or a state, may take: a few models, and what small ones hold of their samples."""
    return LEAST_ROOM + 16 * model_bytes


def plain(reply: Any, private: Tree, room: int) -> tuple[Reply | Unusable, Tree]:
    """What a client function returned and what its client remembers, on the CPU and with nothing of theirs in it that
    another process could not read; the reply says which of the two could not.

    Args:
        room: bytes that each may take.
    """
    if not isinstance(reply, Reply):
        return Unusable(f"the reply is {_named(reply)}; a client function returns client.reply(...)"), {}
    try:
        walk = _Walk(lambda value: _outgoing(_number(value)), room)
        weight, parts = _number(reply.weight), walk.over(reply.tree)
    except _Foreign as fault:
        return Unusable(str(fault)), {}
    try:
        state = _Walk(lambda value: _outgoing(_number(value)), room, texts_only=True).over(private)
    except _Foreign as fault:
        return Unusable(f"the client's state: {fault}"), {}
    here = map_tensors(_own, to({"reply": parts, "state": state}, torch.device("cpu")))
    return Reply(weight, here["reply"]), here["state"]


def packed(reply: Reply | Unusable, private: Tree) -> tuple[Reply | Unusable, Tree]:
    """The same with arrays for tensors, which every transport carries."""
    return reply if isinstance(reply, Unusable) else Reply(reply.weight, to_arrays(reply.tree)), to_arrays(private)


def unpacked(sent: Any) -> Reply | Unusable:
    """The reply that was packed, or why it cannot be used. Whatever was sent, it does not raise."""
    if type(sent) is Unusable:
        return Unusable(shown(sent.fault, 400), sent.nbytes if type(sent.nbytes) is int else 0)
    if type(sent) is not Reply:
        return Unusable(f"the reply is {_named(sent)}")
    try:
        return Reply(sent.weight, _Walk(_incoming, None).over(sent.tree))
    except _Foreign as fault:
        return Unusable(str(fault))
    except Exception as error:
        return Unusable(one_line(error))


def shown(value: Any, length: int = 60) -> str:
    """A name or a value as a message may show it: of one line, and short."""
    if type(value) is int and abs(value) >= 10**20:
        return f"a number of {value.bit_length()} bits"
    if type(value) not in (str, int, float, bool, type(None)):
        return _named(value)
    text = str(value) if type(value) is not str else "".join(c if c.isprintable() else "?" for c in value[:length + 1])
    return text if len(text) <= length else text[:length - 4] + " ..."


def dotted(path: Path) -> str:
    """`model.encoder.weight`, short enough for a message."""
    return shown(".".join(map(str, path)), 120)


class _Walk:
    """A copy of a tree with each leaf replaced, within limits.

    Args:
        leaf: the replacement of a leaf; raises `_Foreign`, saying what it is, for one that may not be there.
        room: bytes that the tensors may take; None for what has arrived already.
        texts_only: whether names must be texts, each dotted path once, as in checkpoints.
    """

    def __init__(self, leaf: Callable[[Any], Any], room: int | None, texts_only: bool = False):
        self._leaf, self._room, self._texts_only = leaf, room, texts_only
        self._leaves, self._bytes, self._paths = 0, 0, set[str]()

    def over(self, tree: Any, path: Path = ()) -> Tree:
        # a state_dict is an OrderedDict; what arrives has been copied into plain ones
        if not isinstance(tree, dict) or (self._room is None and type(tree) is not dict):
            raise _Foreign(f"{dotted(path)} is {_named(tree)}" if path else f"the parts are {_named(tree)}")
        if len(path) > DEEPEST:
            raise _Foreign(f"{dotted(path)} lies more than {DEEPEST} dicts deep")
        copied = {}
        for key, value in tree.items():
            here = (*path, self._name(key, path))
            copied[key] = self.over(value, here) if isinstance(value, dict) else self._visit(value, here)
        return copied

    def _name(self, key: Any, path: Path) -> str | int:
        where = f" in {dotted(path)}" if path else ""
        if type(key) is not str and (type(key) is not int or self._texts_only):
            raise _Foreign(f"a name{where} is {_named(key)}")
        if key == "" or (len(key) > LONGEST_NAME if isinstance(key, str) else abs(key) >= 2**63):
            raise _Foreign(f"a name{where} is empty or too long")
        return key

    def _visit(self, value: Any, path: Path) -> Any:
        self._leaves += 1
        if self._texts_only:
            if (name := ".".join(map(str, path))) in self._paths:
                raise _Foreign(f"{dotted(path)} occurs twice")
            self._paths.add(name)
        if self._leaves > MOST_LEAVES:
            raise _Foreign(f"there are more than {MOST_LEAVES:,} names")
        if isinstance(value, Tensor) and self._room is not None:
            self._bytes += value.numel() * value.element_size()
            if self._bytes > self._room:
                raise _Foreign(f"{dotted(path)} makes more than {self._room / 2**20:,.0f} MiB, which is the limit")
        try:
            return self._leaf(value)
        except _Foreign as fault:
            raise _Foreign(f"{dotted(path)} is {fault}") from None


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def _outgoing(value: Any) -> Any:
    """A leaf as it may travel, still where it was computed."""
    if not isinstance(value, Tensor):
        return _simple(value)
    value = value.detach()
    if type(value) is not Tensor:
        raise _Foreign(f"a tensor of the class {type(value).__name__}")
    if value.layout != torch.strided or value.is_quantized or value.is_meta:
        kind = "meta" if value.is_meta else "quantised" if value.is_quantized else "sparse"
        raise _Foreign(f"a {kind} tensor; send a plain one")
    if value.dtype not in DTYPES:
        raise _Foreign(f"a tensor of the type {str(value.dtype).removeprefix('torch.')}; send float32, say")
    return value


def _own(value: Tensor) -> Tensor:
    """A tensor of the CPU contiguous, and with memory of its own alone where it lies in a larger one."""
    value = value.resolve_neg().contiguous()
    return value if value.untyped_storage().nbytes() <= value.nbytes else value.clone()


def _incoming(value: Any) -> Any:
    if type(value) is np.ndarray and value.dtype.kind in "biuf":
        value = view(value)
    elif not isinstance(value, Tensor):
        return _simple(value)
    if type(value) is not Tensor or value.layout != torch.strided or value.dtype not in DTYPES:
        raise _Foreign("not a plain tensor")
    return value


def _simple(value: Any) -> Any:
    if type(value) not in (str, int, float, bool, type(None)):
        raise _Foreign(f"{_named(value)}; send tensors, numbers and texts")
    if type(value) is str:
        if len(value) > LONGEST_TEXT:
            raise _Foreign(f"a text of {len(value)} letters, {LONGEST_TEXT} are the limit")
        if not value.isprintable() and any("\ud800" <= letter <= "\udfff" for letter in value):
            raise _Foreign("a text that is not Unicode")
    return value


def _named(value: Any) -> str:
    """`a list`, `an int`: the class of a value, of which nothing is asked."""
    name = "".join(letter for letter in type(value).__name__[:60] if letter.isprintable())
    return "None" if value is None else f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"
