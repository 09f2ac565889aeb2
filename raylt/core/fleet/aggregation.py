"""`Aggregator`: puts the usable replies to one call together, one reply at a time.

This module defines `Plain` and `Robust`; raylt/core/protection defines `Secure`, `SampleDP` and `ClientDP`.
`LayoutVote` keeps one aggregator for each layout of the replies.

Robust rules (`federation.robust`) are for rounds in which some clients may be hostile. Each rule takes a mean part by
itself, entry by entry of its tensors and numbers. It keeps what all K clients sent of the part, so it needs K times the
memory of the part, where a mean needs it once. Sums have rules of their own, see robust_sums.py.

- `median`: of each entry, unweighted (Yin et al., ICML 2018, Definition 1).
- `trimmed_mean`: of each entry the unweighted mean without the largest and the smallest fifth, one value at least
  (ibid., Definition 2; beta = 0.2).
- `norm_clipped_mean`: the weighted mean, where a value further from the median than half of the clients are is drawn in
  to that distance. Centred clipping (Karimireddy et al., ICML 2021, Eq. 3) with one step, from the median and not from
  the last momentum, so that a part needs no past.

A large client counts as much as a small one in the first two: weights would give a hostile client the influence of its
samples. Whole numbers (BatchNorm's counters) take their median under every rule.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from raylt.core.client import Reply
from raylt.core.fleet.block_sums import BlockSums, ReplyLayout, SummedReply, block_numbers
from raylt.core.fleet.cohort import Traffic
from raylt.core.fleet.reductions import Reduction
from raylt.core.fleet.robust_sums import Rule, robust_sum
from raylt.core.fleet.schema import layout_fault
from raylt.core.fleet.wire import Fault
from raylt.tree import Tree

TRIMMED = 0.2  # on either side: twice the share of hostile clients that is usually assumed
LeafPath = tuple[Any, ...]


class Replies(Mapping[str, Any]):
    """The reduced parts of the replies by name; an `each` part holds the values by client id, ascending.

    Attributes:
        weights: of the usable replies, by client id, ascending.
    """

    def __init__(self, parts: Tree, weights: dict[int, float]):
        self._parts = parts
        self.weights = weights

    def __getitem__(self, part: str) -> Any:
        return self._parts[part]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)


class Aggregator(ABC):
    """Puts together the usable replies to one call that have one layout.

    Attributes:
        weights: of the accepted replies, by client id, ascending.
        overhead: bytes that the aggregation takes beyond messages and replies.
        summable: whether the aggregator needs nothing of a reply but its part of the sums of its block.
        statement: the noise in a summary's words; None without noise.
        troubles: problems that the aggregation overcame, in words.
    """

    def __init__(self) -> None:
        self.weights: dict[int, float] = {}
        self.overhead = Traffic()
        self.summable = False
        self.statement: Tree | None = None
        self.troubles: list[str] = []

    @abstractmethod
    def accept(self, id: int, reply: Reply | SummedReply) -> None:
        """Take in the next client's reply, in the order of the ids.

        Raises:
            Overflow: the reply has a value that does not fit into a secure sum.
        """

    @abstractmethod
    def result(self) -> Replies:
        """Return the reduced parts, once all replies have been accepted."""

    @abstractmethod
    def empty(self) -> "Aggregator":
        """Return an aggregator for replies of another layout to the same call."""


class Plain(Aggregator):
    """Weighted means, sums and values by client, without any protection.

    Args:
        parts: the reductions by name.
        ids: of the clients that are asked. BLOCK neighbours among them are added up apart, see block_sums.py.
    """

    def __init__(self, parts: Mapping[str, Reduction], ids: Iterable[int]):
        super().__init__()
        self._parts = parts
        self._ids = list(ids)
        self._block_numbers = block_numbers(self._ids)
        self._each: dict[str, dict[int, Any]] = {name: {} for name, part in parts.items() if part.kind == "each"}
        self._sums = BlockSums(parts)
        self._block = BlockSums(parts)
        self._number = -1  # of the block that is being added up
        self.summable = not self._each

    def accept(self, id: int, reply: Reply | SummedReply) -> None:
        self.weights[id] = reply.weight
        number = self._block_numbers[id]
        if number != self._number:
            self._sums.merge(self._block)
            self._block = reply.sums if isinstance(reply, SummedReply) else BlockSums(self._parts)
            self._number = number
        if isinstance(reply, SummedReply):
            assert reply.sums is self._block, f"client {id}: a block comes whole as its sums, or not at all"
            return
        self._block.add(reply)
        for name, values in self._each.items():
            values[id] = reply.tree[name]

    def result(self) -> Replies:
        self._sums.merge(self._block)
        return Replies({**self._sums.reduced(), **self._each}, self.weights)

    def empty(self) -> "Plain":
        return Plain(self._parts, self._ids)


class Robust(Aggregator):
    """Means and sums by a robust rule, once all replies have been accepted; values by client as in `Plain`.

    Args:
        parts: the reductions by name.
        ids: of the clients that are asked.
        rule: replaces the mean.
        samples: of the clients, by id.
    """

    def __init__(self, parts: Mapping[str, Reduction], ids: Iterable[int], rule: Rule, samples: Mapping[int, float]):
        super().__init__()
        self._parts = parts
        self._ids = list(ids)
        self._rule: Rule = rule
        self._means: dict[str, dict[int, Any]] = {name: {} for name, part in parts.items() if part.kind == "mean"}
        self._totals: dict[str, dict[int, Any]] = {name: {} for name, part in parts.items() if part.kind == "total"}
        self._samples = samples
        rest = {name: part for name, part in parts.items() if part.kind == "each"}
        self._plain = Plain(rest, self._ids)
        self.weights = self._plain.weights

    def accept(self, id: int, reply: Reply | SummedReply) -> None:
        assert isinstance(reply, Reply)
        self._plain.accept(id, reply)
        for name, values in (self._means | self._totals).items():
            values[id] = reply.tree[name]

    def result(self) -> Replies:
        weights = list(self.weights.values())
        means = {}
        for name, values in self._means.items():
            combined = combine(self._rule, [{name: value} for value in values.values()], weights)
            means[name] = combined.get(name, {})
        samples = [self._samples[id] for id in self.weights]
        sums = {
            name: robust_sum(self._rule, self._parts[name], list(values.values()), samples)
            for name, values in self._totals.items()
        }
        return Replies({**means, **sums, **self._plain.result()}, self.weights)

    def empty(self) -> "Robust":
        return Robust(self._parts, self._ids, self._rule, self._samples)


class LayoutVote:
    """Aggregators by layout of the replies to a call, where the layout of most replies counts.

    Args:
        aggregator: empty; for the layout of the first reply.
    """

    def __init__(self, aggregator: Aggregator):
        self._first = aggregator
        self._aggregators: dict[ReplyLayout, Aggregator] = {}

    def accept(self, id: int, reply: Reply | SummedReply, layout: ReplyLayout) -> None:
        """Take in the next client's reply, in the order of the ids.

        Raises:
            Overflow: the reply has a value that does not fit into a secure sum.
        """
        if layout not in self._aggregators:
            self._aggregators[layout] = self._first.empty() if self._aggregators else self._first
        self._aggregators[layout].accept(id, reply)

    def winner(self) -> tuple[Aggregator | None, dict[int, Fault]]:
        """Return the aggregator of the most frequent layout, and why each other reply does not count, by client id.

        Where two layouts are equally frequent, no reply counts.
        """
        ranked = sorted(self._aggregators, key=lambda layout: -len(self._aggregators[layout].weights))
        if not ranked:
            return None, {}
        usual = self._aggregators[ranked[0]]
        if len(ranked) > 1 and len(usual.weights) == len(self._aggregators[ranked[1]].weights):
            difference = layout_fault(ranked[1], ranked[0], "as many replies")
            tie = Fault("reply.no-majority", f"two layouts are equally frequent: {difference}")
            return None, {id: tie for layout in ranked for id in self._aggregators[layout].weights}
        faults = {}
        for layout in ranked[1:]:
            faults |= dict.fromkeys(self._aggregators[layout].weights, layout_fault(layout, ranked[0]))
        return usual, dict(sorted(faults.items()))


def combine(rule: Rule, values: Sequence[Tree], weights: Sequence[float]) -> Tree:
    """Combine one part of all replies by a robust rule.

    Args:
        values: the part by client, all of one layout; an entry that a client left out counts as zero.
        weights: of the replies.

    Returns:
        The tree, each tensor in the type it came in.
    """
    columns = _columns(values)
    if rule == "norm_clipped_mean":
        combined = _clipped(columns, torch.tensor(weights, dtype=torch.float64))
    else:
        combined = {path: _middle(column, 0.5 if rule == "median" else TRIMMED) for path, column in columns.items()}
    return _as_tree(combined, columns, values)


def _columns(values: Sequence[Tree]) -> dict[LeafPath, Tensor]:
    """Stack the clients' values of each leaf, [K, ...]: floats in float64, whole numbers in int64."""
    flat = [dict(_leaves(value)) for value in values]
    columns = {}
    for path, like in {path: leaf for leaves in reversed(flat) for path, leaf in leaves.items()}.items():
        whole = isinstance(like, Tensor) and not like.is_floating_point()
        dtype = torch.int64 if whole else torch.float64
        zero = torch.zeros_like(torch.as_tensor(like, dtype=dtype))
        columns[path] = torch.stack([torch.as_tensor(leaves.get(path, zero)).to(dtype) for leaves in flat])
    return columns


def _middle(column: Tensor, trimmed: float) -> Tensor:
    """Return the mean of each entry [K, ...] without the smallest and the largest share `trimmed` of the values.

    At least one value of three is cut on either side, and one or two values in the middle stay. Of whole numbers the
    lower middle one is returned.
    """
    ordered = column.sort(0).values
    k = len(column)
    if not column.is_floating_point():
        return ordered[(k - 1) // 2]
    cut = min(max(1, math.floor(trimmed * k + 1e-9)), (k - 1) // 2)
    return ordered[cut : k - cut].mean(0)


def _clipped(columns: dict[LeafPath, Tensor], weights: Tensor) -> dict[LeafPath, Tensor]:
    """Return the median plus the weighted mean of the replies' differences from it, each cut to the median length.

    A length is that of all float leaves together.
    """
    middle = {path: _middle(column, 0.5) for path, column in columns.items()}
    floats = [path for path, column in columns.items() if column.is_floating_point()]
    squares = torch.zeros(len(weights), dtype=torch.float64)
    for path in floats:
        squares += (columns[path] - middle[path]).reshape(len(weights), -1).square().sum(1)
    lengths = squares.sqrt()  # [K]
    radius = _middle(lengths, 0.5)
    shares = weights / weights.sum() * (radius / lengths.clamp(min=1e-300)).clamp(max=1)
    for path in floats:
        middle[path] = middle[path] + torch.tensordot(shares, columns[path] - middle[path], 1)
    return middle


def _leaves(tree: Tree, path: LeafPath = ()) -> Iterator[tuple[LeafPath, Any]]:
    """Yield each leaf with its path, a tuple of names: a dot in a name is not a dict in a dict."""
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, (*path, name))
        else:
            yield (*path, name), value


def _as_tree(combined: dict[LeafPath, Tensor], columns: dict[LeafPath, Tensor], values: Sequence[Tree]) -> Tree:
    """Return the leaves as a tree, in the types that the clients sent; plain numbers are numbers."""
    like = {path: leaf for value in reversed(values) for path, leaf in _leaves(value)}
    tree: Tree = {}
    for path in columns:
        parent = tree
        for name in path[:-1]:
            parent = parent.setdefault(name, {})
        leaf = like[path]
        parent[path[-1]] = combined[path].to(leaf.dtype) if isinstance(leaf, Tensor) else combined[path].item()
    return tree
