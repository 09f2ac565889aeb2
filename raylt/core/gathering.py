"""`Replies`: what the server sees of a call. `Gathering`: how it comes about, one reply at a time."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from raylt.core.blocks import Summed, Sums, blocks
from raylt.core.client import Reply
from raylt.core.cohort import Traffic
from raylt.core.reductions import Reduction
from raylt.core.robust import Rule, combine
from raylt.core.schema import Form, difference
from raylt.tree import Tree


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

    Args:
        ids: of the clients that are asked, of which BLOCK neighbours are added up apart, see raylt.core.blocks.
        robust: how the means are taken; None: as they come, and with a rule once all are there.

    Attributes:
        private: of each client that replied, the handle of its new private state.
        overhead: bytes that it takes beyond messages and replies.
    """

    def __init__(self, parts: Mapping[str, Reduction], ids: Iterable[int], robust: Rule | None = None):
        self._held: dict[str, dict[int, Any]] = {
            name: {} for name, part in parts.items() if part.kind == "mean" and robust is not None}
        self._each: dict[str, dict[int, Any]] = {name: {} for name, part in parts.items() if part.kind == "each"}
        self._parts = {name: part for name, part in parts.items() if name not in self._held}
        self._blocks = blocks(ids)
        self._robust: Rule | None = robust
        self._sums, self._block, self._number = Sums(self._parts), Sums(self._parts), -1
        self._weights: dict[int, float] = {}
        self.private: dict[int, Any] = {}
        self.overhead = Traffic()

    def __len__(self) -> int:
        return len(self._weights)

    def add(self, id: int, reply: Reply | Summed, private: Any) -> None:
        """Takes in the next client's reply, in the order of the ids; of a block that comes as its sums, with these."""
        self._weights[id], self.private[id] = reply.weight, private
        if (number := self._blocks[id]) != self._number:
            self._close()
            self._block, self._number = reply.sums if isinstance(reply, Summed) else Sums(self._parts), number
        if isinstance(reply, Summed):
            assert reply.sums is self._block, f"client {id}: a block comes whole as its sums, or not at all"
            return
        self._block.add(reply)
        for values in (self._held, self._each):
            for name, by_client in values.items():
                by_client[id] = reply.tree[name]

    def _close(self) -> None:
        self._sums.merge(self._block)
        self._block = Sums(self._parts)

    def replies(self) -> Replies:
        """What there is once all have been taken in."""
        self._close()
        return Replies({**self._combined(), **self._sums.reduced(), **self._each}, self._weights)

    def _combined(self) -> Tree:
        if self._robust is None:
            return {}
        return {name: combine(self._robust, [{name: value} for value in held.values()],
                              list(self._weights.values())).get(name, {}) for name, held in self._held.items()}


def usual_of(gathered: dict[Form, Gathering]) -> tuple[Gathering | None, dict[int, str]]:
    """The replies of the most frequent form, and why each of the others does not count, by client id."""
    ranked = sorted(gathered, key=lambda form: -len(gathered[form]))
    if not ranked:
        return None, {}
    if len(ranked) > 1 and len(gathered[ranked[0]]) == len(gathered[ranked[1]]):
        text = difference(ranked[1], ranked[0]).replace("most replies", "as many replies")
        return None, {id: f"two forms are equally frequent: {text}" for form in ranked for id in gathered[form].private}
    faults = {id: difference(form, ranked[0]) for form in ranked[1:] for id in gathered[form].private}
    return gathered[ranked[0]], dict(sorted(faults.items()))
