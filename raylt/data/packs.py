"""`Pack`: the shards of neighbouring clients as one value, so that ten thousand small clients are a few objects."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from raylt.data.cache import Mapped, Stored
from raylt.data.task import Holdings, Shard

PACK_BYTES = 2**20          # what a pack holds at most, unless one client alone has more


@dataclass(frozen=True, eq=False)
class Pack:
    """Shards of clients with neighbouring ids.

    Args:
        first: the id of the first.
    """

    first: int
    shards: Holdings

    def shard(self, id: int) -> Shard:
        """One client's, without a copy of images that are in memory."""
        return self.shards[id - self.first]


def packs(shards: Sequence[Shard]) -> Iterator[Pack]:
    """All clients' shards, in the order of the ids."""
    first, size = 0, 0
    for id, shard in enumerate(shards):
        more = _nbytes(shard)
        if id > first and size + more > PACK_BYTES:
            yield _pack(first, shards[first:id])
            first, size = id, 0
        size += more
    yield _pack(first, shards[first:])


def _pack(first: int, shards: Sequence[Shard]) -> Pack:
    ids = [shard.ids for shard in shards if shard.ids is not None]
    whole = Shard(_together([shard.x for shard in shards]), _together([shard.y for shard in shards]),
                  np.concatenate(ids) if ids else None)
    views = [shard.view for shard in shards]
    return Pack(first, Holdings(whole, np.cumsum([len(shard) for shard in shards]),
                                None if all(view is None for view in views) else views))


def _together(parts: Sequence[Stored]) -> Stored:
    if len(parts) == 1:
        return parts[0]
    arrays = [part for part in parts if isinstance(part, np.ndarray)]
    if arrays:
        return np.concatenate(arrays)
    mapped = [part for part in parts if isinstance(part, Mapped)]
    assert len({part.path for part in mapped}) == 1, "a task's images are one file"
    return Mapped(mapped[0].path, np.concatenate([part.rows for part in mapped]))


def _nbytes(shard: Shard) -> int:
    return sum(part.rows.nbytes if isinstance(part, Mapped) else part.nbytes
               for part in (shard.x, shard.y, shard.ids) if part is not None)
