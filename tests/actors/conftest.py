"""A Ray session for each module that asks for it: four logical CPUs, no dashboard, on the loopback only."""

import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from tiny import make_setup

from actors.fleet import Placement, RayFleet
from raylt.config import Config
from raylt.core.method import Method

_names = itertools.count()


@pytest.fixture(scope="module")
def ray_session() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_ADDRESS", raising=False)
        patch.setenv("RAY_AUTH_MODE", "disabled")           # no token in the home folder for a unit test
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        # actors import the modules beside the tests by name
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, configure_logging=False,
                 namespace="test", object_store_memory=100 * 2**20)
        yield
        ray.shutdown()


@pytest.fixture(scope="module")
def make_fleet(ray_session, tiny_task) -> Iterator[Callable[..., RayFleet]]:
    """`make_fleet(config, actors, method=None)`, with actors of a quarter of a CPU."""
    made: list[RayFleet] = []

    def make(config: Config, actors: int, method: Method | None = None, **placed: Any) -> RayFleet:
        shards, test = [ray.put(shard) for shard in tiny_task.shards], ray.put(tiny_task.test)
        fleet = RayFleet(make_setup(config, method), tiny_task, shards, test,
                         Placement(**{"actors": actors, "cpus": 0.25, "gpus": 0.0} | placed), f"run{next(_names)}")
        made.append(fleet)
        return fleet

    yield make
    for fleet in made:
        fleet.close()
