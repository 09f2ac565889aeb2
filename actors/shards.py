"""`Shards`: the clients' data in the object store, several small clients to an object."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray

from raylt.data.packs import packs
from raylt.data.task import Shard


@dataclass(frozen=True)
class Shards:
    """References to packs of shards.

    Attributes:
        packs: references, each to a `Pack`.
        places: of each client, by id, the pack that its data are in.
    """

    packs: list[Any]
    places: list[int]

    @classmethod
    def put(cls, shards: Sequence[Shard]) -> "Shards":
        """Puts all clients' data into the object store of this node."""
        refs: list[Any] = []
        places: list[int] = []
        for number, pack in enumerate(packs(shards)):
            refs.append(ray.put(pack))
            places += [number] * len(pack.shards)
        return cls(refs, places)
