"""Fleets in the Ray session that all tests share (tests/conftest.py starts the session)."""

import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster
from tiny import make_setup

from actors.fleet import Placement, RayFleet
from actors.shards import Shards
from raylt.config import Config
from raylt.core.method import Method

_names = itertools.count()


@pytest.fixture(scope="module")
def make_fleet(ray_session, tiny_task) -> Iterator[Callable[..., RayFleet]]:
    """Return `make_fleet(config, actors, method=None)`; each actor gets a quarter of a CPU."""
    made: list[RayFleet] = []

    def make(config: Config, actors: int, method: Method | None = None, **placed: Any) -> RayFleet:
        shards, test = Shards.put(tiny_task.shards), ray.put(tiny_task.test)
        fleet = RayFleet(
            make_setup(config, method),
            tiny_task,
            shards,
            test,
            Placement(**{"actors": actors, "cpus": 0.25, "gpus": 0.0} | placed),
            f"run{next(_names)}",
        )
        made.append(fleet)
        return fleet

    yield make
    for fleet in made:
        fleet.close()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Start a cluster of two nodes, each with two CPUs and 100 MiB of object store."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("RAY_")]:
            patch.delenv(name)
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[2]), prepend=os.pathsep)
        patch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
        made = Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": 2, "include_dashboard": False, "object_store_memory": 100 * 2**20},
        )
        made.add_node(num_cpus=2, object_store_memory=100 * 2**20)
        yield made
        made.shutdown()
