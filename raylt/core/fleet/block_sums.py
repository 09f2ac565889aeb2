"""Sums of replies over fixed blocks of clients, so that results do not depend on which process adds them up.

The clients that are asked are sorted by id, and each BLOCK clients in this order form a block. The replies of a block
are added in order of ids, in float64; then the sums of the blocks are added in order. Seed and round decide which
clients are asked, and an unusable reply leaves its place in the block empty. So no bit depends on actors, on nodes, or
on the order of arrival. A process that has all replies of a block may send the block's sums instead of the replies.
With at most BLOCK clients there is one block, and the sum is an ordinary sum.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raylt.core.client import Reply
from raylt.core.fleet.reductions import Reduction, ReductionKind
from raylt.tree import RunningSum, Tree

BLOCK = 64
ReplyLayout = frozenset[tuple[tuple[str | int, ...], str]]  # path and kind of each leaf


class BlockSums:
    """Running sums over replies that have the same layout.

    Args:
        parts: The reductions by name; parts that are neither `mean` nor `total` are left out.
    """

    def __init__(self, parts: Mapping[str, Reduction]):
        self._mean_parts = _names_of(parts, "mean")
        self._total_parts = _names_of(parts, "total")
        self._mean = RunningSum()
        self._total = RunningSum()

    def add(self, reply: Reply) -> None:
        """Add a client's reply. Replies must be added in ascending order of client ids."""
        self._mean.add({name: reply.tree[name] for name in self._mean_parts}, reply.weight)
        self._total.add({name: reply.tree[name] for name in self._total_parts})

    def merge(self, block: "BlockSums") -> None:
        """Add the sums of another block. Blocks must be added in ascending order of client ids.

        The other block stays unchanged.
        """
        self._mean.merge(block._mean, maximum=True)
        self._total.merge(block._total, maximum=False)

    def reduced(self) -> Tree:
        """Return the mean or the sum of each part, by the name of the part."""
        return {**self._mean.mean(), **self._total.sum()}


@dataclass(frozen=True)
class SummedReply:
    """A placeholder for a reply whose values are already included in the sums of its block.

    Attributes:
        nbytes: Size of the reply, as if it had been sent to a server in another process.
        layout: Layout of the reply.
        lengths: Lengths of the compared parts of the reply by name (robust/outliers.py).
        sums: Sums of all replies of the block that have this layout; these replies share one object.
    """

    weight: float
    nbytes: int
    layout: ReplyLayout
    lengths: dict[str, float]
    sums: BlockSums


def block_numbers(ids: Iterable[int]) -> dict[int, int]:
    """Map the id of each asked client to the number of the client's block."""
    return {id: position // BLOCK for position, id in enumerate(sorted(ids))}


def split_into_blocks(ids: Sequence[int]) -> list[list[int]]:
    """Split the ids of the asked clients, which must be in ascending order, into blocks."""
    return [list(ids[start : start + BLOCK]) for start in range(0, len(ids), BLOCK)]


def _names_of(parts: Mapping[str, Any], kind: ReductionKind) -> list[str]:
    return [name for name, part in parts.items() if part.kind == kind]
