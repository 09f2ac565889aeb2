"""`Aggregator`: combines the usable replies to one call, one reply at a time.

This module defines `Plain` and `Robust`; raylt/core/protection defines `Secure`, `SampleDP` and `ClientDP`.
`LayoutVote` keeps one aggregator for each layout of the replies.

The rules of `Robust` are in robust/means.py and robust/sums.py.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from raylt.core.client import Reply
from raylt.core.fleet.block_sums import BlockSums, ReplyLayout, SummedReply, block_numbers
from raylt.core.fleet.reductions import Reduction
from raylt.core.fleet.robust.means import robust_mean
from raylt.core.fleet.robust.sums import Rule, robust_sum
from raylt.core.fleet.schema import layout_fault
from raylt.core.fleet.value_store import ValueStore
from raylt.core.fleet.wire import Fault
from raylt.core.round_stats import Traffic
from raylt.tree import Tree


class Replies(Mapping[str, Any]):
    """The aggregated replies to one call, by the name of each part.

    An `each` part holds the values by client id, ascending.

    Attributes:
        weights: Weights of the usable replies by client id, ascending.
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
    """Base class of aggregators, which combine the usable replies to one call. All replies have the same layout.

    Attributes:
        weights: Weights of the accepted replies by client id; ascending in the result.
        overhead: Bytes that the aggregation transfers in addition to messages and replies.
        summable: Whether the aggregator needs only the sums over a block of replies, not each reply.
        compares: Whether replies that are far longer than the others are rejected (robust/outliers.py).
        statement: Description of the noise for the summary; None without noise.
        troubles: Problems from which the aggregation recovered, each as a text.
    """

    def __init__(self) -> None:
        self.weights: dict[int, float] = {}
        self.overhead = Traffic()
        self.summable = False
        self.compares = False
        self.statement: Tree | None = None
        self.troubles: list[str] = []

    @abstractmethod
    def accept(self, id: int, reply: Reply | SummedReply) -> None:
        """Add a client's reply. Replies must be added in ascending order of client ids.

        If the aggregator `compares`, replies that were set aside follow after the others, in the same order.

        Raises:
            Overflow: The reply has a value that does not fit into a secure sum.
        """

    @abstractmethod
    def result(self) -> Replies:
        """Return the aggregated parts, after all replies have been accepted."""

    @abstractmethod
    def empty(self) -> "Aggregator":
        """Return a new aggregator for replies to the same call that have another layout."""


class Plain(Aggregator):
    """The aggregator without protection: weighted means, sums, and the values of each client.

    Args:
        parts: The reductions by name.
        ids: Ids of the asked clients. Each BLOCK of neighbours is summed separately, see block_sums.py.
    """

    def __init__(self, parts: Mapping[str, Reduction], ids: Iterable[int]):
        super().__init__()
        self._parts = parts
        self._ids = list(ids)
        self._block_numbers = block_numbers(self._ids)
        self._each: dict[str, dict[int, Any]] = {name: {} for name, part in parts.items() if part.kind == "each"}
        self._store = ValueStore()
        self._sums = BlockSums(parts)
        self._block = BlockSums(parts)
        self._number = -1  # number of the block that is being summed
        self.summable = not self._each
        self.compares = True

    def accept(self, id: int, reply: Reply | SummedReply) -> None:
        self.weights[id] = reply.weight
        number = self._block_numbers[id]
        if number != self._number:
            self._sums.merge(self._block)
            self._block = reply.sums if isinstance(reply, SummedReply) else BlockSums(self._parts)
            self._number = number
        if isinstance(reply, SummedReply):
            assert reply.sums is self._block, f"client {id}: all replies of a block must share one object with its sums"
            return
        self._block.add(reply)
        kept = self._store.keep({name: reply.tree[name] for name in self._each})
        for name, values in self._each.items():
            values[id] = kept[name]

    def result(self) -> Replies:
        self._sums.merge(self._block)
        values = {name: dict(sorted(of_client.items())) for name, of_client in self._each.items()}
        return Replies({**self._sums.reduced(), **values}, dict(sorted(self.weights.items())))

    def empty(self) -> "Plain":
        return Plain(self._parts, self._ids)


class Robust(Aggregator):
    """The aggregator that computes robust means and sums after all replies are accepted.

    `each` parts are kept as in `Plain`.

    Args:
        parts: The reductions by name.
        ids: Ids of the asked clients.
        rule: The rule that replaces the mean.
        samples: Number of samples by client id.
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
            combined = robust_mean(self._rule, [{name: value} for value in values.values()], weights)
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
    """Aggregates replies separately by layout; only the most frequent layout is used in the end.

    Args:
        aggregator: An empty aggregator, which receives the replies with the layout of the first one.
    """

    def __init__(self, aggregator: Aggregator):
        self._first = aggregator
        self._aggregators: dict[ReplyLayout, Aggregator] = {}

    def accept(self, id: int, reply: Reply | SummedReply, layout: ReplyLayout) -> None:
        """Add a client's reply. Replies must be added in ascending order of client ids.

        Raises:
            Overflow: The reply has a value that does not fit into a secure sum.
        """
        if layout not in self._aggregators:
            self._aggregators[layout] = self._first.empty() if self._aggregators else self._first
        self._aggregators[layout].accept(id, reply)

    def winner(self) -> tuple[Aggregator | None, dict[int, Fault]]:
        """Return the aggregator of the most frequent layout, and the faults of all other replies by client id.

        If the two most frequent layouts are equally frequent, no reply counts.
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
