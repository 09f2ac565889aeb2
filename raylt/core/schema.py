"""`Schema`: what the replies to one call must look like before they count."""

import copy
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from raylt import tree
from raylt.core.blocks import Form, Summed, summed
from raylt.core.client import Reply
from raylt.core.reductions import Reduction
from raylt.core.wire import Path, Unusable, dotted, shown

Arrived = Reply | Summed | Unusable

# No parameter, no gradient and no sum over samples comes near these; what does makes products of the next round
# infinite, at clients who did nothing wrong.
LARGEST = {"mean": 1e6, "total": 1e18, "each": 1e18}
LARGEST_NUMBER = torch.finfo(torch.float32).max
LARGEST_COUNT = 2**53                   # beyond it float64, in which sums are taken, has gaps
MOST_BYTES = 256 * 2**20                # of a part without a template


class Schema:
    """It follows from the line that asks: one reduction for each part, with or without a template.

    Args:
        sizes: samples of each client, by id: what its reply counts unless it is declared otherwise.
        weights: what each client's reply counts, by id, where that is declared.
    """

    def __init__(self, parts: Mapping[str, Reduction], sizes: Mapping[int, int],
                 weights: Mapping[int, float] | None = None):
        self._parts, self._weights = parts, sizes if weights is None else weights
        self._whence = "its samples; fleet.ask takes others after the message" if weights is None else "declared"
        self._templates = {name: dict(_leaves(part.template, (name,))) for name, part in parts.items()
                           if part.template is not None}

    def fault(self, id: int, reply: Arrived) -> str | None:
        """Why a client's reply cannot be used, whatever the others look like; or None."""
        if isinstance(reply, Unusable):
            return reply.fault
        if fault := self._weight_fault(id, reply.weight):
            return fault
        if isinstance(reply, Summed):           # the rest was looked at where it was added up
            return None
        if missing := self._parts.keys() - reply.tree.keys():
            return f"{min(missing)} is missing"
        if more := reply.tree.keys() - self._parts.keys():
            return f"{min(map(shown, more))} was not asked for"
        return next((fault for name in self._parts if (fault := self._part_fault(id, name, reply.tree[name]))),
                    None)

    def of(self, ids: Iterable[int]) -> "Schema":
        """The same for some clients alone, without what a template holds beside names, types and shapes: it travels to
        where they run."""
        light = copy.copy(self)
        light._weights = {id: self._weights[id] for id in ids}
        light._parts = {name: replace(part, template=None, mend=None) for name, part in self._parts.items()}
        light._templates = {name: {path: leaf.to("meta") if isinstance(leaf, Tensor) else leaf
                                   for path, leaf in template.items()} for name, template in self._templates.items()}
        return light

    def summed(self, ids: Sequence[int], replies: Sequence[Reply | Unusable]) -> list[Summed | Unusable]:
        """The replies of a whole block, by ascending ids, as their sums; of one that cannot be used, why."""
        faults = [self.fault(id, reply) for id, reply in zip(ids, replies, strict=True)]
        usable = [reply for reply, fault in zip(replies, faults, strict=True) if fault is None]
        sums = iter(summed(self._parts, [(reply, self.form(reply)) for reply in usable if isinstance(reply, Reply)]))
        return [next(sums) if fault is None else
                Unusable(fault, tree.nbytes(reply.tree) if isinstance(reply, Reply) else 0)
                for reply, fault in zip(replies, faults, strict=True)]

    def form(self, reply: Reply | Summed) -> Form:
        """What the parts without a template look like; the form that most replies have is the one that counts."""
        if isinstance(reply, Summed):
            return reply.form
        return frozenset((path, _kind(leaf)) for name, value in reply.tree.items() if name not in self._templates
                         for path, leaf in _leaves(value, (name,)))

    def _weight_fault(self, id: int, weight: Any) -> str | None:
        expected = self._weights[id]
        if type(weight) in (int, float) and weight == expected:
            return None
        return f"weight {shown(weight)}, expected {expected:g} ({self._whence})"

    def _part_fault(self, id: int, name: str, value: Any) -> str | None:
        part, template, size = self._parts[name], self._templates.get(name), 0
        leaves = dict(_leaves(value, (name,)))
        if template is not None and (fault := _misfit(leaves, template, part.partial)):
            return fault
        for path, leaf in leaves.items():
            if fault := _value_fault(leaf, part):
                return f"{dotted(path)} {fault}"
            size += leaf.nbytes if isinstance(leaf, Tensor) else 0
        if template is None and size > MOST_BYTES:
            return (f"{name} takes {size / 2**20:,.0f} MiB, {MOST_BYTES / 2**20:,.0f} are the limit of a part that is "
                    "asked for without like(...) or within(...)")
        fault = None if part.condition is None else part.condition(value)
        if fault is None and part.own_condition is not None:
            fault = part.own_condition(id, value)
        return None if fault is None else f"{name} {fault}"


def difference(form: Form, usual: Form) -> str:
    """What makes one form another than the usual one, in a few words."""
    own, others = dict(form), dict(usual)
    for path in sorted(own.keys() | others.keys(), key=lambda path: tuple(map(str, path))):
        if own.get(path) != others.get(path):
            if path not in own:
                return f"{dotted(path)} is missing, most replies have it"
            if path not in others:
                return f"{dotted(path)} is additional, most replies do not have it"
            return f"{dotted(path)} is {own[path]}, most replies have {others[path]}"
    raise AssertionError("the forms are equal")


def _misfit(leaves: dict[Path, Any], template: dict[Path, Any], partial: bool) -> str | None:
    entries = {path[:2] for path in leaves}         # what is left out is left out whole
    for path, expected in template.items():
        if path not in leaves:
            if partial and path[:2] not in entries:
                continue
            return f"{dotted(path)} is missing"
        if fault := _mismatch(leaves[path], expected):
            return f"{dotted(path)} is {fault}"
    more = [dotted(path) for path in leaves if path not in template]
    if more and min(more) in map(dotted, template):
        return f"{min(more)} has the right name of the wrong type: 1 is not '1'"
    return f"{min(more)} is additional" if more else None


def _mismatch(leaf: Any, expected: Any) -> str | None:
    if type(expected) is int and type(leaf) is int:
        return None if expected <= leaf <= LARGEST_COUNT else f"{shown(leaf)}, a count from {expected} on is expected"
    if _kind(leaf) == _kind(expected) and (type(expected) is not int or isinstance(leaf, Tensor)):
        return None
    return f"{_kind(leaf)}, expected {'count' if type(expected) is int else _kind(expected)}"


def _value_fault(leaf: Any, part: Reduction) -> str | None:
    if isinstance(leaf, Tensor):
        return _tensor_fault(leaf, part)
    if type(leaf) in (int, float):
        if isinstance(leaf, float) and not math.isfinite(leaf):
            return f"is {leaf}"
        return None if abs(leaf) <= LARGEST_NUMBER else f"is {shown(leaf)}, beyond {LARGEST_NUMBER:.0e}"
    return None if part.kind == "each" else f"is a {_kind(leaf)}, of which there is no {part.kind}"


def _tensor_fault(leaf: Tensor, part: Reduction) -> str | None:
    if leaf.dtype == torch.bool or not leaf.numel():
        return None
    low, high = (bound.item() for bound in torch.aminmax(leaf))
    if not (math.isfinite(low) and math.isfinite(high)):
        return "is not finite"
    if leaf.is_floating_point():
        largest = LARGEST[part.kind] if part.largest is None else part.largest
        return None if -largest <= low and high <= largest else (
            f"holds {max(-low, high):.3g}, beyond {largest:g} (up_to(...) declares another bound)")
    # the mean of whole numbers is their maximum: counters, of batches
    least = 0 if part.kind == "mean" else -LARGEST_COUNT
    return None if least <= low and high <= LARGEST_COUNT else (
        f"holds {low if low < least else high}, outside {least}..{LARGEST_COUNT}")


def _leaves(value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    """With the names themselves for a path: a dot in a name is not a dict in a dict, and 1 is not "1"."""
    if isinstance(value, dict) and (value or len(path) == 1):      # an empty dict below a part is a leaf: it has a name
        for name, inner in value.items():
            yield from _leaves(inner, (*path, name))
    else:
        yield path, value


def _kind(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return f"{leaf.dtype} {list(leaf.shape)}".removeprefix("torch.")
    return "number" if type(leaf) in (int, float) else type(leaf).__name__
