"""`Replies`: what the server sees of a call. `Gathering`: how it comes about, one reply at a time."""

from collections.abc import Iterator, Mapping
from typing import Any

from raylt.core.client import Reply
from raylt.core.reductions import Kind, Reduction
from raylt.tree import Fold, Tree


class Replies(Mapping[str, Any]):
    """The reduced parts of the replies by name; of an `each` part the values by client id, ascending.

    Attributes:
        weights: of the usable replies, by client id, ascending.
    """

    def __init__(self, parts: Tree, weights: dict[int, float]):
        self._parts, self.weights = parts, weights

    def __getitem__(self, part: str) -> Any:
        return self._parts[part]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)


class Gathering:
    """The replies of one form, reduced as they come.

    Attributes:
        private: of each client that replied, the handle of its new private state.
    """

    def __init__(self, parts: Mapping[str, Reduction]):
        self._names: dict[Kind, list[str]] = {"mean": [], "total": [], "each": []}
        for name, part in parts.items():
            self._names[part.kind].append(name)
        self._mean, self._total = Fold(), Fold()
        self._each: dict[str, dict[int, Any]] = {name: {} for name in self._names["each"]}
        self._weights: dict[int, float] = {}
        self.private: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self._weights)

    def add(self, id: int, reply: Reply, private: Any) -> None:
        """Takes in the next client's reply, in the order of the ids."""
        self._weights[id], self.private[id] = reply.weight, private
        self._mean.add({name: reply.tree[name] for name in self._names["mean"]}, reply.weight)
        self._total.add({name: reply.tree[name] for name in self._names["total"]})
        for name, values in self._each.items():
            values[id] = reply.tree[name]

    def replies(self) -> Replies:
        """What there is once all have been taken in."""
        return Replies({**self._mean.mean(), **self._total.sum(), **self._each}, self._weights)
