"""Fleets of the Ray session that tests share (tests/conftest.py starts it)."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray
from tiny import make_setup

from actors.fleet import Placement, RayFleet
from actors.shards import Shards
from raylt.config import Config
from raylt.core.method import Method

_names = itertools.count()


@pytest.fixture(scope="module")
def make_fleet(ray_session, tiny_task) -> Iterator[Callable[..., RayFleet]]:
    """`make_fleet(config, actors, method=None)`, with actors of a quarter of a CPU."""
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
