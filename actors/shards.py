"""References to the clients' data in Ray's object store.

The shards of clients with neighbouring ids form one object, a `Pack`, so that thousands of small clients need only a
few objects.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray

from raylt.data.images.cache import Mapped, Stored
from raylt.data.task import Holdings, Shard

MAX_PACK_BYTES = 2**20  # A larger client has a pack of its own.


@dataclass(frozen=True, eq=False)
class Pack:
    """Data of several clients with neighbouring ids, stored as one object.

    Args:
        first: Id of the first client.
        shards: Data of the clients, by ascending id.
    """

    first: int
    shards: Holdings

    def shard(self, id: int) -> Shard:
        """Return the data of one client, without copying images that are in memory."""
        return self.shards[id - self.first]


@dataclass(frozen=True)
class Shards:
    """References to the packs that hold all clients' data.

    Attributes:
        packs: References to `Pack` objects.
        pack_numbers: Number of the pack with a client's data, by client id.
    """

    packs: list[Any]
    pack_numbers: list[int]

    @classmethod
    def put(cls, shards: Sequence[Shard]) -> "Shards":
        """Put all clients' data into the object store of this node."""
        refs: list[Any] = []
        pack_numbers: list[int] = []
        for number, pack in enumerate(packs(shards)):
            refs.append(ray.put(pack))
            pack_numbers += [number] * len(pack.shards)
        return cls(refs, pack_numbers)


def packs(shards: Sequence[Shard]) -> Iterator[Pack]:
    """Yield the data of all clients in packs, by ascending client id."""
    first = 0
    size = 0
    for id, shard in enumerate(shards):
        added = _nbytes(shard)
        if id > first and size + added > MAX_PACK_BYTES:
            yield _pack(first, shards[first:id])
            first = id
            size = 0
        size += added
    yield _pack(first, shards[first:])


def _pack(first: int, shards: Sequence[Shard]) -> Pack:
    ids = [shard.ids for shard in shards if shard.ids is not None]
    whole = Shard(
        _together([shard.x for shard in shards]),
        _together([shard.y for shard in shards]),
        np.concatenate(ids) if ids else None,
    )
    views = [shard.view for shard in shards]
    return Pack(
        first,
        Holdings(
            whole, np.cumsum([len(shard) for shard in shards]), None if all(view is None for view in views) else views
        ),
    )


def _together(parts: Sequence[Stored]) -> Stored:
    if len(parts) == 1:
        return parts[0]
    arrays = [part for part in parts if isinstance(part, np.ndarray)]
    mapped = [part for part in parts if isinstance(part, Mapped)]
    assert not (arrays and mapped), "a task's images are all in memory or all in a file"
    if arrays:
        return np.concatenate(arrays)
    assert len({part.path for part in mapped}) == 1, "a task's images are one file"
    return Mapped(mapped[0].path, np.concatenate([part.rows for part in mapped]))


def _nbytes(shard: Shard) -> int:
    return sum(
        part.rows.nbytes if isinstance(part, Mapped) else part.nbytes
        for part in (shard.x, shard.y, shard.ids)
        if part is not None
    )
