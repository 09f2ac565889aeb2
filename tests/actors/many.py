"""A task of many tiny clients, and fleets that run it."""

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import ray
from tiny import make_setup

from actors.capacity import Placement
from actors.fleet import RayFleet
from actors.shards import Shards
from raylt.config import Config
from raylt.data.splits.split import Split
from raylt.data.task import Shard, Task

LARGE, NOBODY = 7, 11  # ids of a client that is large enough for a call of its own, and of a client without samples
_names = itertools.count()


def make_many(clients: int) -> Task:
    """Return a task whose clients hold two to four random images of 4x4 pixels."""
    rng = np.random.default_rng(0)
    sizes = [40 if k == LARGE else 0 if k == NOBODY else 2 + k % 3 for k in range(clients)]
    ends = np.cumsum(sizes)
    rows = tuple(np.arange(end - n, end) for n, end in zip(sizes, ends, strict=True))
    shards = tuple(
        Shard(rng.integers(0, 256, (n, 4, 4, 1), dtype=np.uint8), rng.integers(0, 4, n), held)
        for n, held in zip(sizes, rows, strict=True)
    )
    test = Shard(rng.integers(0, 256, (20, 4, 4, 1), dtype=np.uint8), rng.integers(0, 4, 20))
    counts = np.stack([np.bincount(shard.labels(), minlength=4) for shard in shards])
    split = Split(rows, "", "random", 1.0, "iid", 1.0, 0)
    return Task("random", tuple("abcd"), (4, 4, 1), (0.5,), (0.25,), counts, ("many",) * 4, shards, test, split)


def configure(clients: int, **federation) -> Config:
    return Config.model_validate(
        {
            "method": "fedavg",
            "data": {"clients": clients},
            "local": {"batch": 8},
            "federation": {"rounds": 2} | federation,
        }
    )


def make_fleet(config: Config, task: Task, actors: int, method, folder=None) -> RayFleet:
    """Return a fleet whose actors get a quarter of a CPU each."""
    return RayFleet(
        make_setup(config, method),
        task,
        Shards.put(task.shards),
        ray.put(task.test),
        Placement(actors, 0.25, 0.0),
        f"many{next(_names)}",
        folder,
    )


class FakePool(list):
    """A list of slots with the attributes of an `ActorPool` that jobs use."""

    home_nodes: Any = None


def fake_fleet(sizes: dict[int, int], slots: list[Any], home_nodes: list[int] | None = None) -> SimpleNamespace:
    """Return the attributes of a fleet that decide which clients share a call; by default all are of one node."""
    pool = FakePool(slots)
    pool.home_nodes = np.array([0] * len(sizes) if home_nodes is None else home_nodes)
    return SimpleNamespace(config=configure(len(sizes)), all_sizes=sizes, slots=pool)
