"""`IndexLists`: an index list for each of many clients, as two arrays."""

from collections.abc import Iterable, Sequence
from typing import overload

import numpy as np


class IndexLists(Sequence[np.ndarray]):
    """Of each client, int64 [n]: views of one array. An array object for each of a hundred thousand clients would take
    several times what its indices do, and as long again to travel.

    Args:
        flat: the lists, one after the other, int64 [N].
        ends: of each client, where its list ends, int64 [K].
    """

    def __init__(self, flat: np.ndarray, ends: np.ndarray):
        self.flat, self.ends = flat, ends

    @classmethod
    def of(cls, lists: Iterable[np.ndarray]) -> "IndexLists":
        """The same lists, copied together."""
        parts = list(lists)
        return cls(np.concatenate([np.empty(0, np.int64), *parts]), np.cumsum([len(part) for part in parts], dtype=int))

    @property
    def sizes(self) -> np.ndarray:
        """Indices of each client, int64 [K]."""
        return np.diff(self.ends, prepend=0)

    def __len__(self) -> int:
        return len(self.ends)

    @overload
    def __getitem__(self, client: int) -> np.ndarray: ...

    @overload
    def __getitem__(self, client: slice) -> "tuple[np.ndarray, ...]": ...

    def __getitem__(self, client: int | slice) -> "np.ndarray | tuple[np.ndarray, ...]":
        if isinstance(client, slice):
            return tuple(self[k] for k in range(len(self))[client])
        start, end = bounds(self.ends, client)
        return self.flat[start:end]


def bounds(ends: np.ndarray, client: int) -> tuple[int, int]:
    """Where the part of a client begins and ends in what lies one after the other.

    Raises:
        IndexError: there is no such client.
    """
    k = range(len(ends))[client]
    return int(ends[k - 1]) if k else 0, int(ends[k])


def grouped(ids: np.ndarray, known: np.ndarray) -> IndexLists:
    """The places in `ids` that hold each of the known ids, ascending; in one pass, however many ids there are.

    Args:
        ids: [N].
        known: different ids, sorted, [K].
    """
    order = np.argsort(ids, kind="stable")
    starts, ends = (np.searchsorted(ids[order], known, side=side) for side in ("left", "right"))
    return IndexLists.of(order[start:end] for start, end in zip(starts, ends, strict=True))
