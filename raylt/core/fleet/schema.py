"""`Schema`: the checks that a reply to one call must pass before it counts."""

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from raylt import tree
from raylt.core.client import Reply
from raylt.core.fleet.block_sums import BlockSums, ReplyLayout, SummedReply
from raylt.core.fleet.reductions import Reduction
from raylt.core.fleet.robust.outliers import LengthBound, exceeds, is_compared, length
from raylt.core.fleet.wire import Fault, Path, Unusable, dotted, short_text
from raylt.errors import count_of, user_fault

Arrived = Reply | SummedReply | Unusable

# Maximum magnitude of a value by kind of reduction, per sample in a total. Parameters, gradients and sums over samples
# are far smaller. A larger value would make products infinite in the next round, at clients that did nothing wrong.
MAX_VALUE = {"mean": 1e6, "total": 1e8, "each": 1e18}
LARGEST_NUMBER = torch.finfo(torch.float32).max
LARGEST_COUNT = 2**53  # sums are computed in float64, where larger integers are not exact
ONLY_COUNTS = "whole numbers of a total count samples; send others as floats"
MAX_BATCHES_PER_CALL = 2**32  # limit on the increase of a batch counter in a mean
VARIANCE = "running_var"  # suffix of names in a model whose values must not be negative: every output would be NaN
MODEL = "model"  # name of the part that is a client's model, in built-in methods and in most plugins
MAX_BYTES_WITHOUT_TEMPLATE = 256 * 2**20  # size limit of a part without a template


class Schema:
    """The names, types, shapes and values that the replies to one call may have.

    It follows from the arguments of `Fleet.ask`: one reduction for each part, with or without a template.

    Args:
        parts: The reductions by name of the part.
        sizes: Number of samples by client id: the weight that a client's reply must have unless `weights` are given.
        weights: The weight that each client's reply must have, by id, if the server declares it.
        labels: Number of labels of a sample: more than one for label maps.

    Attributes:
        parts: The reductions by name of the part.
        length_bounds: Bounds of the parts whose lengths are compared (robust/outliers.py), by name.
    """

    def __init__(
        self,
        parts: Mapping[str, Reduction],
        sizes: Mapping[int, int],
        weights: Mapping[int, float] | None = None,
        labels: int = 1,
    ):
        self.parts = parts
        self._sizes = sizes
        self._labels = labels
        self._weights = sizes if weights is None else weights
        self._weight_source = "its samples; fleet.ask takes others after the message" if weights is None else "declared"
        self._templates = {
            name: dict(_leaves(part.template, (name,))) for name, part in parts.items() if part.template is not None
        }
        self._largest_counts = {
            name: _largest_counts(template) for name, template in self._templates.items() if parts[name].kind == "mean"
        }
        self._variances = {
            path
            for path, leaf in self._templates.get(MODEL, {}).items()  # parts of other names may be differences
            if str(path[-1]).endswith(VARIANCE) and isinstance(leaf, Tensor) and not leaf.is_meta
        }
        self.length_bounds = {
            name: LengthBound(0.0 if part.kind == "total" else length(part.template), part.kind == "total")
            for name, part in parts.items()
            if is_compared(part, MAX_VALUE["mean"])
        }

    def fault(self, id: int, reply: Arrived) -> Fault | None:
        """Return the fault of a client's reply, or None. Other clients' replies are not compared."""
        if isinstance(reply, Unusable):
            return reply.fault
        if fault := self._weight_fault(id, reply.weight):
            return fault
        if isinstance(reply, SummedReply):  # the process that added up the reply made all other checks
            return None
        if missing := self.parts.keys() - reply.tree.keys():
            return Fault("reply.missing", f"{min(missing)} is missing")
        if additional := reply.tree.keys() - self.parts.keys():
            return Fault("reply.additional", f"{min(map(short_text, additional))} was not asked for")
        for name in self.parts:
            if fault := self._part_fault(id, name, reply.tree[name]):
                return fault
        return self._samples_fault(id, reply.tree)

    def restricted_to(self, ids: Iterable[int]) -> "Schema":
        """Return a schema for some clients only, small enough to send to their process.

        Its templates have names, types and shapes but no values.
        """
        light = copy.copy(self)
        light._sizes = {id: self._sizes[id] for id in ids}
        light._weights = {id: self._weights[id] for id in light._sizes}
        light.parts = {name: replace(part, template=None, mend=None) for name, part in self.parts.items()}
        light._templates = {
            name: {path: leaf.to("meta") if isinstance(leaf, Tensor) else leaf for path, leaf in template.items()}
            for name, template in self._templates.items()
        }
        return light

    @property
    def template_bytes(self) -> int:
        """Return the number of bytes of those tensors of a reply that have a template."""
        leaves = (leaf for template in self._templates.values() for leaf in template.values())
        return sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))

    def sum_block(
        self, ids: Sequence[int], replies: Iterable[Reply | Unusable]
    ) -> list[Reply | SummedReply | Unusable]:
        """Add up a block's usable replies, given in ascending order of client ids; return a placeholder for each reply.

        The placeholder of a faulty reply is `Unusable`. A reply of suspicious length is returned as it is, since only
        the server knows the lengths of all replies. No other reply is kept, so an iterator may load one at a time.
        """
        placeholders: list[Reply | SummedReply | Unusable] = []
        sums: dict[ReplyLayout, BlockSums] = {}
        for id, reply in zip(ids, replies, strict=True):
            fault = self.fault(id, reply)
            if fault is not None:
                reply = Unusable(fault, tree.nbytes(reply.tree) if isinstance(reply, Reply) else 0)
            if isinstance(reply, Reply):
                lengths = self.lengths_of(id, reply)
                if not exceeds(lengths, self.length_bounds):
                    layout = self.layout(reply)
                    block = sums.setdefault(layout, BlockSums(self.parts))
                    block.add(reply)
                    reply = SummedReply(reply.weight, tree.nbytes(reply.tree), layout, lengths, block)
            placeholders.append(reply)
        return placeholders

    def layout(self, reply: Reply | SummedReply) -> ReplyLayout:
        """Return a reply's layout: the names, types and shapes of the parts that have no template."""
        if isinstance(reply, SummedReply):
            return reply.layout
        return frozenset(
            (path, _leaf_kind(leaf))
            for name, value in reply.tree.items()
            if name not in self._templates
            for path, leaf in _leaves(value, (name,))
        )

    def lengths_of(self, id: int, reply: Reply) -> dict[str, float]:
        """Return the lengths of a client's compared parts by name; of a sum, its length per sample."""
        labels = max(1, self._sizes[id]) * self._labels
        return {
            name: length(reply.tree[name]) / (labels if self.parts[name].kind == "total" else 1)
            for name in self.length_bounds
        }

    def _weight_fault(self, id: int, weight: Any) -> Fault | None:
        expected = self._weights[id]
        if type(weight) in (int, float) and weight == expected:
            return None
        text = f"weight {short_text(weight)}, expected {expected:g} ({self._weight_source})"
        return Fault("reply.wrong-weight", text)

    def _part_fault(self, id: int, name: str, value: Any) -> Fault | None:
        part = self.parts[name]
        template = self._templates.get(name)
        leaves = dict(_leaves(value, (name,)))
        if template is not None and (fault := _template_fault(leaves, template, part)):
            return fault
        samples = self._sizes[id]
        largest = self._largest(part, samples)
        counts = self._largest_counts.get(name, {})
        size = 0
        for path, leaf in leaves.items():
            if fault := _value_fault(leaf, part, largest, counts.get(path, LARGEST_COUNT)):
                return replace(fault, text=f"{dotted(path)} {fault}")
            if path in self._variances and (leaf < 0).any():
                return Fault("reply.condition", f"{dotted(path)} holds a negative variance ({leaf.min():.3g})")
            size += leaf.nbytes if isinstance(leaf, Tensor) else 0
        if template is None and size > MAX_BYTES_WITHOUT_TEMPLATE:
            return Fault(
                "reply.too-large",
                f"{name} takes {size / 2**20:,.0f} MiB; the limit of a part without like(...) or within(...) is "
                f"{MAX_BYTES_WITHOUT_TEMPLATE / 2**20:,.0f} MiB",
            )
        if fault := self._count_fault(name, leaves, samples * self._labels):
            return fault
        text = _reason(part.condition, value)
        if text is None:
            text = _reason(part.own_condition, id, value)
        return None if text is None else Fault("reply.condition", f"{name} {text}")

    def _samples_fault(self, id: int, parts: Mapping[str, Any]) -> Fault | None:
        """Return the fault of the first part that contradicts the client's number of samples, or None.

        Each part already has the right form.
        """
        for name, part in self.parts.items():
            text = _reason(part.samples_condition, self._sizes[id], parts)
            if text is not None:
                return Fault("reply.wrong-sums", f"{name} {text}")
        return None

    def _largest(self, part: Reduction, samples: int) -> float:
        """Return the largest magnitude that the values of a part may have."""
        if part.largest is not None:
            return part.largest
        return MAX_VALUE[part.kind] * (max(1, samples) * self._labels if part.kind == "total" else 1)

    def _count_fault(self, name: str, leaves: dict[Path, Any], labels: int) -> Fault | None:
        """Return a fault if integers of a part cannot be counts of a client's samples or labels, otherwise None.

        Integers of the same name are added up over the entries of the part, for example over classes.
        """
        part = self.parts[name]
        if part.kind != "total" and not part.counted:
            return None
        counts = [(path, leaf) for path, leaf in leaves.items() if self._is_count(path, leaf)]
        sums: dict[str, int] = {}
        for path, leaf in counts:
            least, count = _least_and_sum(leaf)
            if least < 0:
                return Fault("reply.wrong-sums", f"{dotted(path)} counts {short_text(least)} samples ({ONLY_COUNTS})")
            label = str(path[-1]) if len(path) > 1 else ""
            sums[label] = sums.get(label, 0) + count
        for label, count in sums.items():
            counted = f"{name}.{label}".rstrip(".")
            if label in part.counted and self._labels == 1 and count != labels:
                text = f"{counted} counts {short_text(count)} samples, and the client has {labels}"
                return Fault("reply.wrong-sums", text)
            if (part.kind == "total" or label in part.counted) and count > max(labels, part.largest or 0):
                has = count_of(labels, "sample")
                text = f"{counted} counts {short_text(count)}, and the client has {has} ({ONLY_COUNTS})"
                return Fault("reply.wrong-sums", text)
        if missing := [label for label in part.counted if label not in sums]:
            return Fault("reply.wrong-sums", f"{name}.{missing[0]}".rstrip(".") + " counts no samples")
        return None

    def _is_count(self, path: Path, leaf: Any) -> bool:
        if isinstance(leaf, Tensor):
            return not leaf.is_floating_point()
        template = self._templates.get(str(path[0]))
        return type(leaf) is int and (template is None or type(template[path]) is int)


def layout_fault(layout: ReplyLayout, usual: ReplyLayout, usual_replies: str = "most replies") -> Fault:
    """Return the first difference between a layout and the layout of most replies.

    Args:
        layout: A reply's layout.
        usual: The layout of most replies.
        usual_replies: The replies that have the usual layout, as a text.
    """
    own_leaves = dict(layout)
    usual_leaves = dict(usual)
    for path in sorted(own_leaves.keys() | usual_leaves.keys(), key=lambda path: tuple(map(str, path))):
        if own_leaves.get(path) == usual_leaves.get(path):
            continue
        if path not in own_leaves:
            return Fault("reply.missing", f"{dotted(path)} is missing, {usual_replies} have it")
        if path not in usual_leaves:
            return Fault("reply.additional", f"{dotted(path)} is additional, {usual_replies} do not have it")
        text = f"{dotted(path)} is {own_leaves[path]}, {usual_replies} have {usual_leaves[path]}"
        return Fault("reply.wrong-shape", text)
    raise AssertionError("the layouts are equal")


def _template_fault(leaves: dict[Path, Any], template: dict[Path, Any], part: Reduction) -> Fault | None:
    entries = {path[:2] for path in leaves}  # an entry is left out as a whole
    for path, expected in template.items():
        if path not in leaves:
            if part.partial and path[:2] not in entries:
                continue
            return Fault("reply.missing", f"{dotted(path)} is missing")
        fault = None if part.shorter and _is_shorter(leaves[path], expected) else _leaf_fault(leaves[path], expected)
        if fault is not None:
            return Fault(fault.code, f"{dotted(path)} is {fault}")
    additional = [dotted(path) for path in leaves if path not in template]
    if not additional:
        return None
    first = min(additional)
    if first in map(dotted, template):
        return Fault("reply.wrong-shape", f"{first} has a name of the wrong type: 1 is not '1'")
    return Fault("reply.additional", f"{first} is additional")


def _leaf_fault(leaf: Any, expected: Any) -> Fault | None:
    if type(expected) is int and type(leaf) is int:
        if expected <= leaf <= LARGEST_COUNT:
            return None
        limit = f"at least {expected}" if leaf < expected else f"at most {LARGEST_COUNT}"
        return Fault("reply.wrong-integer", f"{short_text(leaf)}, expected a count of {limit}")
    if _leaf_kind(leaf) == _leaf_kind(expected) and (type(expected) is not int or isinstance(leaf, Tensor)):
        return None
    wanted = "count" if type(expected) is int else _leaf_kind(expected)
    return Fault("reply.wrong-shape", f"{_leaf_kind(leaf)}, expected {wanted}")


def _is_shorter(leaf: Any, expected: Any) -> bool:
    """Return whether a leaf is a tensor of the expected type and shape, possibly with fewer rows."""
    return (
        isinstance(leaf, Tensor)
        and isinstance(expected, Tensor)
        and leaf.dtype == expected.dtype
        and leaf.dim() == expected.dim() > 0
        and leaf.shape[1:] == expected.shape[1:]
        and len(leaf) < len(expected)
    )


def _reason(condition: Callable[..., str | None] | None, *arguments: Any) -> str | None:
    """Return the reason why a reply does not meet a condition, or None.

    A condition that raises counts as not met.
    """
    if condition is None:
        return None
    try:
        return condition(*arguments)
    except Exception as error:
        return f"cannot be checked: {user_fault(error)}"


def _least_and_sum(leaf: Tensor | int) -> tuple[int, int]:
    """Return the smallest integer of a leaf, and the sum of its integers, which may exceed 64 bits."""
    if not isinstance(leaf, Tensor):
        return leaf, leaf
    if not leaf.numel():
        return 0, 0
    least = int(leaf.min())
    rough = leaf.double().sum().item()
    return least, int(leaf.sum()) if abs(rough) < 2**62 else int(rough)


def _largest_counts(template: Mapping[Path, Any]) -> dict[Path, int]:
    """Return the largest whole number that a reply's counters in a mean may hold, by the path of the counter.

    The mean of counters is their maximum, from which clients continue to count. Without a limit relative to the values
    that were sent, one client could set the counters of all others to LARGEST_COUNT.

    Args:
        template: The leaves of the part that was sent.
    """
    return {
        path: min(LARGEST_COUNT, int(leaf.max()) + MAX_BATCHES_PER_CALL)
        for path, leaf in template.items()
        if isinstance(leaf, Tensor) and not leaf.is_floating_point() and not leaf.is_meta and leaf.numel()
    }


def _value_fault(leaf: Any, part: Reduction, largest: float, most: int) -> Fault | None:
    if isinstance(leaf, Tensor):
        return _tensor_fault(leaf, part, largest, most)
    if type(leaf) in (int, float):
        if isinstance(leaf, float) and not math.isfinite(leaf):
            return Fault("reply.not-finite", f"is {leaf}", leaf)
        if isinstance(leaf, int):
            return None if abs(leaf) <= LARGEST_COUNT else _integer_fault(leaf, -LARGEST_COUNT, LARGEST_COUNT)
        limit = largest if part.kind == "total" else LARGEST_NUMBER
        if abs(leaf) <= limit:
            return None
        return Fault("reply.out-of-range", f"is {short_text(leaf)}, beyond {limit:.0e}")
    if part.kind == "each":
        return None
    return Fault("reply.wrong-shape", f"is a {_leaf_kind(leaf)}, which has no {part.kind}")


def _tensor_fault(leaf: Tensor, part: Reduction, largest: float, most: int) -> Fault | None:
    if leaf.dtype == torch.bool or not leaf.numel():
        return None
    low, high = (bound.item() for bound in torch.aminmax(leaf))
    if not (math.isfinite(low) and math.isfinite(high)):
        return Fault("reply.not-finite", "is not finite", low if math.isfinite(high) else high)
    if leaf.is_floating_point():
        if -largest <= low and high <= largest:
            return None
        farthest = max(-low, high)
        return Fault("reply.out-of-range", f"holds {farthest:.3g}, beyond {largest:g}", farthest)
    # whole numbers in a mean count batches, and their mean is their maximum
    least = 0 if part.kind == "mean" else -LARGEST_COUNT
    if least <= low and high <= most:
        return None
    return _integer_fault(int(low if low < least else high), least, most)


def _integer_fault(value: int, least: int, most: int) -> Fault:
    """Return the fault of a whole number outside of its range. Diverged training sends no such number."""
    return Fault("reply.wrong-integer", f"holds the whole number {short_text(value)}, outside {least}..{most}")


def _leaves(value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    """Yield each leaf with its path as a tuple of names.

    Unlike a dotted path, a tuple keeps a name such as "a.b" apart from nested names, and 1 from "1".
    """
    if isinstance(value, dict) and (value or len(path) == 1):  # an empty inner dict is a leaf: it has a name
        for name, inner in value.items():
            yield from _leaves(inner, (*path, name))
    else:
        yield path, value


def _leaf_kind(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return f"{leaf.dtype} {list(leaf.shape)}".removeprefix("torch.")
    return "number" if type(leaf) in (int, float) else type(leaf).__name__
