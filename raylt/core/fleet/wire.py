"""Checks and conversions of the values that clients' processes and the server's process exchange.

`sendable` checks a reply and a private state in the client's process, `packed` turns their tensors into arrays, and
`unpacked` checks the reply again in the server's process.

A reply is a dict of tensors, numbers, texts and None, whose keys are texts or whole numbers. A private state is the
same with texts as keys. Anything else arrives as `Unusable` with a `Fault`. Both processes check: the client's process
reports mistakes of a method, and the server's process reports malformed data from any sender. Nothing that a client
sends can raise an error at the server.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raylt.core.client import Reply
from raylt.core.device import is_full
from raylt.errors import CODES, RayltError, describe_error, one_line, shorten, type_name
from raylt.tree import Tree, map_tensors, to, to_arrays, view

MAX_DEPTH = 16  # nested dicts; a model's entries are one dict, with dotted names
MAX_NAMES = 200_000  # in all dicts; ImageNet-21k has 21,841 classes, and each class has a dict of four statistics
MAX_TEXT = 10_000  # characters
MAX_NAME = 500  # characters
DTYPES = (
    torch.float16,
    torch.float32,
    torch.float64,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.bool,
)  # numpy, which transports tensors, has these types
MIN_ROOM = 256 * 2**20  # minimum size limit of replies and states, in bytes
Path = tuple[str | int, ...]


@dataclass(frozen=True)
class Fault:
    """The reason why a call failed or its reply cannot be used.

    Attributes:
        code: Kind of the fault, a key of `raylt.errors.CODES`.
        text: One line for users.
        value: The wrong value, if there is one.
    """

    code: str
    text: str
    value: float | None = None

    @classmethod
    def of(cls, error: BaseException) -> "Fault":
        """Return the fault that describes an exception of a client function.

        The code is "device.full" if the device ran out of memory, the error's own code if raylt raised the error on
        purpose, and "client.failed" otherwise.
        """
        if is_full(error):
            return cls("device.full", one_line(error))
        own_code = error.code if isinstance(error, RayltError) else ""
        return cls(own_code or "client.failed", describe_error(error))

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Unusable:
    """A placeholder for a reply that cannot be used.

    Attributes:
        nbytes: Size of the reply, if its client's process measured it.
    """

    fault: Fault
    nbytes: int = 0


class _NotSendable(Exception):
    """The exception for a leaf or a name that cannot be sent; `fault` gives the reason."""

    def __init__(self, text: str, code: str = "reply.not-sendable"):
        super().__init__(text)
        self.fault = Fault(code, text)


def room_for(model_bytes: int) -> int:
    """Return the size limit of a reply or state in bytes: a few models plus a fixed amount for other values."""
    return MIN_ROOM + 16 * model_bytes


def sendable(reply: Any, private: Tree, room: int) -> tuple[Reply | Unusable, Tree]:
    """Return a reply and a private state on the CPU, in types that another process can read.

    Args:
        reply: The return value of the client function, of any type.
        private: The client's private state.
        room: Size limit of each in bytes.

    Returns:
        The reply and the state. If either cannot be sent, `Unusable` with the reason and an empty state.
    """
    if not isinstance(reply, Reply):
        text = f"the reply is {type_name(reply)}; a client function returns client.reply(...)"
        return Unusable(Fault("reply.not-sendable", text)), {}
    try:
        walk = _Walk(lambda value: _outgoing(_number(value)), room)
        weight = _number(reply.weight)
        parts = walk.over(reply.tree)
    except _NotSendable as error:
        return Unusable(error.fault), {}
    try:
        state = _Walk(lambda value: _outgoing(_number(value)), room, texts_only=True).over(private)
    except _NotSendable as error:
        return Unusable(Fault(error.fault.code, f"the client's state: {error.fault}")), {}
    on_cpu = map_tensors(_compact, to({"reply": parts, "state": state}, torch.device("cpu")))
    return Reply(weight, on_cpu["reply"]), on_cpu["state"]


def packed(reply: Reply | Unusable, private: Tree) -> tuple[Reply | Unusable, Tree]:
    """Convert the tensors of a reply and a private state to arrays, which every transport can send."""
    return reply if isinstance(reply, Unusable) else Reply(reply.weight, to_arrays(reply.tree)), to_arrays(private)


def unpacked(sent: Any) -> Reply | Unusable:
    """Convert a packed reply back; return `Unusable` with the reason if the reply cannot be used.

    This function does not raise, whatever was sent.
    """
    if type(sent) is Unusable:
        return Unusable(_checked_fault(sent.fault), sent.nbytes if type(sent.nbytes) is int else 0)
    if type(sent) is not Reply:
        return Unusable(Fault("reply.not-sendable", f"the reply is {type_name(sent)}"))
    try:
        return Reply(sent.weight, _Walk(_incoming, None).over(sent.tree))
    except _NotSendable as error:
        return Unusable(error.fault)
    except Exception as error:
        return Unusable(Fault("reply.not-sendable", one_line(error)))


def _checked_fault(fault: Any) -> Fault:
    """Return a fault from a client's process with a known error code and a shortened text."""
    if type(fault) is not Fault:
        return Fault("reply.not-sendable", short_text(fault, 400))
    known_code = type(fault.code) is str and fault.code in CODES
    return Fault(fault.code if known_code else "reply.not-sendable", short_text(fault.text, 400))


def short_text(value: Any, length: int = 60) -> str:
    """Return a name or value as text, shortened to one line for a message."""
    if type(value) is int and abs(value) >= 10**20:
        return f"a number of {value.bit_length()} bits"
    if type(value) not in (str, int, float, bool, type(None)):
        return type_name(value)
    text = str(value) if type(value) is not str else "".join(c if c.isprintable() else "?" for c in value[: length + 1])
    return shorten(text, length, " ...")


def dotted(path: Path) -> str:
    """Return a path joined by dots, such as `model.encoder.weight`, shortened for a message."""
    return short_text(".".join(map(str, path)), 120)


class _Walk:
    """Copies a tree and replaces each leaf, within limits of depth and size.

    Args:
        leaf: Returns the replacement of a leaf; raises `_NotSendable` for a leaf that cannot be sent.
        room: Size limit of all tensors in bytes; None for a tree that has already arrived.
        texts_only: Whether names must be texts and each dotted path unique, as in checkpoints.
    """

    def __init__(self, leaf: Callable[[Any], Any], room: int | None, texts_only: bool = False):
        self._leaf = leaf
        self._room = room
        self._texts_only = texts_only
        self._names = 0
        self._bytes = 0
        self._paths = set[str]()

    def over(self, tree: Any, path: Path = ()) -> Tree:
        """Return a copy of a tree in which each leaf is converted.

        Raises:
            _NotSendable: The tree contains a value that cannot be sent.
        """
        # a state_dict is an OrderedDict; the receiver gets plain dicts
        if not isinstance(tree, dict) or (self._room is None and type(tree) is not dict):
            name = type_name(tree)
            raise _NotSendable(f"{dotted(path)} is {name}" if path else f"the parts are {name}")
        if len(path) > MAX_DEPTH:
            raise _NotSendable(f"{dotted(path)} is nested more than {MAX_DEPTH} dicts deep", "reply.too-large")
        self._names += len(tree)
        if self._names > MAX_NAMES:
            raise _NotSendable(f"there are more than {MAX_NAMES:,} names", "reply.too-large")
        copied = {}
        for key, value in tree.items():
            inner = (*path, self._name(key, path))
            copied[key] = self.over(value, inner) if isinstance(value, dict) else self._visit(value, inner)
        return copied

    def _name(self, key: Any, path: Path) -> str | int:
        if type(key) is not str and (type(key) is not int or self._texts_only):
            raise _NotSendable(f"a name{_inside(path)} is {type_name(key)}")
        if key == "" or (len(key) > MAX_NAME if isinstance(key, str) else abs(key) >= 2**63):
            raise _NotSendable(f"a name{_inside(path)} is empty or too long")
        return key

    def _visit(self, value: Any, path: Path) -> Any:
        if self._texts_only:
            name = ".".join(map(str, path))
            if name in self._paths:
                raise _NotSendable(f"{dotted(path)} occurs twice")
            self._paths.add(name)
        if isinstance(value, Tensor) and self._room is not None:
            self._bytes += value.numel() * value.element_size()
            if self._bytes > self._room:
                text = f"{dotted(path)} exceeds the size limit of {self._room / 2**20:,.0f} MiB"
                raise _NotSendable(text, "reply.too-large")
        try:
            return self._leaf(value)
        except _NotSendable as error:
            raise _NotSendable(f"{dotted(path)} is {error.fault}", error.fault.code) from None


def _inside(path: Path) -> str:
    return f" in {dotted(path)}" if path else ""


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def _outgoing(value: Any) -> Any:
    """Return a leaf in a type that can be sent, still on the device where it was computed."""
    if not isinstance(value, Tensor):
        return _simple(value)
    value = value.detach()
    if type(value) is not Tensor:
        raise _NotSendable(f"a tensor of the class {type(value).__name__}")
    if value.layout != torch.strided or value.is_quantized or value.is_meta:
        kind = "meta" if value.is_meta else "quantised" if value.is_quantized else "sparse"
        raise _NotSendable(f"a {kind} tensor; send a plain one")
    if value.dtype not in DTYPES:
        raise _NotSendable(f"a tensor of the type {str(value.dtype).removeprefix('torch.')}; send float32, say")
    return value


def _compact(value: Tensor) -> Tensor:
    """Return a CPU tensor that is contiguous and shares no memory with a larger tensor."""
    value = value.resolve_neg().contiguous()
    return value if value.untyped_storage().nbytes() <= value.nbytes else value.clone()


def _incoming(value: Any) -> Any:
    if type(value) is np.ndarray and value.dtype.kind in "biuf":
        value = view(value)
    elif not isinstance(value, Tensor):
        return _simple(value)
    if type(value) is not Tensor or value.layout != torch.strided or value.dtype not in DTYPES:
        raise _NotSendable("not a plain tensor")
    return value


def _simple(value: Any) -> Any:
    if type(value) not in (str, int, float, bool, type(None)):
        raise _NotSendable(f"{type_name(value)}; send tensors, numbers and texts")
    if type(value) is str:
        if len(value) > MAX_TEXT:
            raise _NotSendable(f"a text of {len(value)} characters; the limit is {MAX_TEXT}", "reply.too-large")
        if not value.isprintable() and any("\ud800" <= letter <= "\udfff" for letter in value):
            raise _NotSendable("a text that is not Unicode")
    return value
