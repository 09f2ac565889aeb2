"""Sums in blocks of a fixed size: what a `mean` or a `total` part comes to, whoever adds it up.

Clients that are asked stand in the order of their ids; BLOCK neighbours of them are a block. The replies of a block are
added in this order, in float64, and then the blocks in theirs. Who is asked follows from seed and round, and a reply
that cannot be used leaves its place empty: so neither actors nor nodes, nor who answers first, decide a bit, and a
process that runs a whole block may send its sums instead of its replies. (Blocks of neighbouring ids, asked or not,
would hold half a client where a hundred of ten thousand are asked.) Up to BLOCK clients there is one block, and the sum
is the plain one.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raylt import tree
from raylt.core.client import Reply
from raylt.core.reductions import Kind, Reduction
from raylt.tree import Fold, Tree

BLOCK = 64
Form = frozenset[tuple[tuple[str | int, ...], str]]     # path and kind of each leaf


class Sums:
    """Sums of replies of one form.

    Args:
        parts: those that are neither `mean` nor `total` are left out.
    """

    def __init__(self, parts: Mapping[str, Reduction]):
        self._averaged, self._added = _of_kind(parts, "mean"), _of_kind(parts, "total")
        self._mean, self._total = Fold(), Fold()

    def add(self, reply: Reply) -> None:
        """Takes in the next client's reply, in the order of the ids."""
        self._mean.add({name: reply.tree[name] for name in self._averaged}, reply.weight)
        self._total.add({name: reply.tree[name] for name in self._added})

    def merge(self, block: "Sums") -> None:
        """Takes in the sums of the next block, in the order of the ids; it stays as it is."""
        self._mean.merge(block._mean, maximum=True)
        self._total.merge(block._total, maximum=False)

    def reduced(self) -> Tree:
        """Each part by its name."""
        return {**self._mean.mean(), **self._total.sum()}


@dataclass(frozen=True)
class Summed:
    """What arrives in the place of a reply that is in the sums of its block.

    Attributes:
        nbytes: of the reply: what it would have taken to a server that is elsewhere.
        sums: of all replies of the block that have this form; one object.
    """

    weight: float
    nbytes: int
    form: Form
    sums: Sums


def blocks(ids: Iterable[int]) -> dict[int, int]:
    """The number of each client's block, by id, of the clients that are asked."""
    return {id: place // BLOCK for place, id in enumerate(sorted(ids))}


def whole(ids: Sequence[int]) -> list[list[int]]:
    """The clients that are asked, in ascending order, by block."""
    return [list(ids[start:start + BLOCK]) for start in range(0, len(ids), BLOCK)]


def summed(parts: Mapping[str, Reduction], formed: Sequence[tuple[Reply, Form]]) -> list[Summed]:
    """The usable replies of a whole block, by ascending ids, as their sums."""
    sums: dict[Form, Sums] = {}
    for reply, form in formed:
        if form not in sums:
            sums[form] = Sums(parts)
        sums[form].add(reply)
    return [Summed(reply.weight, tree.nbytes(reply.tree), form, sums[form]) for reply, form in formed]


def _of_kind(parts: Mapping[str, Any], kind: Kind) -> list[str]:
    return [name for name, part in parts.items() if part.kind == kind]
