"""Wrong replies, made from correct replies, that contradict what the server knows."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from raylt.core.client import Reply
from raylt.core.fleet.client_host import ClientHost
from raylt.core.fleet.fleet import Answer
from raylt.core.fleet.function_name import function_name
from raylt.core.fleet.local_fleet import LocalFleet
from raylt.core.fleet.schema import LARGEST_COUNT, Schema
from raylt.errors import ClientError
from raylt.tree import Tree, leaf_paths

LIAR = 0  # The client that lies, which has samples of every class.
FRAMEWORK_CALLS = "judge", "settle", "try_models"  # Client functions of the framework's own calls.


class Asked(LocalFleet):
    """Fleet that records each reply with the name of its call and the schema that checked it."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.asked: list[tuple[str, Schema, int, Reply]] = []

    def _take_in(self, answer: Answer, name: str, schema: Schema, vote: Any, outliers: Any) -> ClientError | None:
        if isinstance(answer.reply, Reply):
            self.asked.append((name, schema, answer.id, answer.reply))
        return super()._take_in(answer, name, schema, vote, outliers)


class Lies(ClientHost):
    """Client host whose first client sends wrong counts, and sums and means that are not finite."""

    def run(self, fn, message, round, id, shard, private):
        reply, after = super().run(fn, message, round, id, shard, private)
        if id != LIAR or not isinstance(reply, Reply) or function_name(fn) in FRAMEWORK_CALLS:
            return reply, after
        worst = {
            name: replaced(value, lambda leaf: LARGEST_COUNT if is_whole(leaf) else math.nan)
            for name, value in reply.tree.items()
        }
        return Reply(reply.weight, worst), after


def is_whole(leaf: Any) -> bool:
    """Return whether a value is an integer or a tensor of integers."""
    if isinstance(leaf, Tensor):
        return not leaf.is_floating_point() and leaf.dtype != torch.bool
    return type(leaf) is int


def counts_of_part(value: Any) -> dict[str, int]:
    """Return the sums of the integers in a part of a reply, grouped by the last name in each integer's path.

    The name "" stands for the part itself.
    """
    sums: dict[str, int] = {}
    for path, leaf in leaf_paths(value, ()):
        if is_whole(leaf):
            name = str(path[-1]) if path else ""
            sums[name] = sums.get(name, 0) + int(leaf.sum() if isinstance(leaf, Tensor) else leaf)
    return sums


def wrong_weights(weight: float) -> Iterator[tuple[str, Any]]:
    """Yield invalid weights of a reply, with their descriptions."""
    for wrong in (0, -1, LARGEST_COUNT, math.nan, math.inf, weight + 0.5):
        yield f"the weight {wrong}", wrong


def wrong_leaves(value: Any, counted: set[str]) -> Iterator[tuple[str, Any]]:
    """Yield copies of a part of a reply, each with one value that no sum over samples can have, and its description.

    Args:
        value: The correct part.
        counted: Names of the counts that add up to the client's samples.
    """
    for path, leaf in leaf_paths(value, ()):
        name = ".".join(map(str, path)) or "the part"
        for what, wrong in _wrong_numbers(leaf) if is_whole(leaf) else _wrong_floats(leaf):
            yield f"{name} {what}", _with(value, path, wrong)
    for name in counted:
        chosen = replaced(value, lambda leaf: leaf * 0, name)
        yield f"all counts {name} 0".replace("  ", " "), chosen
        first = next(path for path, leaf in leaf_paths(value, ()) if is_whole(leaf) and (path[-1:] or ("",))[0] == name)
        more = _at(value, first) + 1
        yield f"one more in {'.'.join(map(str, first)) or 'the part'}", _with(value, first, more)


def replaced(value: Any, change: Callable[[Any], Any], name: str | None = None) -> Any:
    """Return a copy of a part of a reply with numbers and tensors replaced by `change`.

    Args:
        value: The part.
        change: Function that returns the new value of a leaf.
        name: If given, only integers whose path ends in this name are replaced.
    """
    for path, leaf in list(leaf_paths(value, ())):
        if name is not None and (not is_whole(leaf) or (str(path[-1]) if path else "") != name):
            continue
        new = change(leaf)
        if isinstance(leaf, Tensor) and not isinstance(new, Tensor):
            new = torch.full_like(leaf, new) if leaf.dtype != torch.bool else leaf
        elif not isinstance(leaf, Tensor | int | float):
            new = leaf
        value = _with(value, path, new)
    return value


def _wrong_numbers(leaf: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(leaf, Tensor):
        for wrong in (-1, LARGEST_COUNT):
            yield f"= {wrong}", torch.full_like(leaf, wrong)
        yield "fractional", leaf + 0.5
        yield "nan", torch.full(leaf.shape, math.nan)
        yield "of another shape", torch.cat([leaf.flatten(), leaf.flatten()[:1]])
    else:
        for wrong in (-1, LARGEST_COUNT, 2 * LARGEST_COUNT, math.nan, leaf + 0.5, torch.tensor([leaf])):
            yield f"= {wrong}", wrong


def _wrong_floats(leaf: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.numel():
        for wrong in (math.nan, math.inf, 1e30):
            yield f"= {wrong}", torch.full_like(leaf, wrong)
        yield "of another shape", torch.cat([leaf.flatten(), leaf.flatten()[:1]])
    elif type(leaf) is float:
        for wrong in (math.nan, -math.inf, 1e300):
            yield f"= {wrong}", wrong


def _at(value: Any, path: tuple[Any, ...]) -> Any:
    for name in path:
        value = value[name]
    return value


def _with(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """Return a copy of a part of a reply with the value at `path` replaced."""
    if not path:
        return new
    copied: Tree = dict(value)
    copied[path[0]] = _with(value[path[0]], path[1:], new)
    return copied
