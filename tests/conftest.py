"""Fixtures for all tests, built with tiny.py, which tests can also import."""

import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import teachers
import tiny
import torch

from raylt import registry
from raylt.config import Config
from raylt.core.experiment import Experiment
from raylt.core.training import stacked_sgd
from raylt.data.task import Task
from raylt.models.image_text import open_tower
from raylt.own_code.module_sources import PLUGIN


@pytest.hookimpl(tryfirst=True)  # before `-m "not slow"` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as slow what `sampled` leaves out, and skip the tests marked `soak` unless RAYLT_SOAK is set."""
    cases = defaultdict[str, list[pytest.Item]](list)
    for item in items:
        if "sampled" in item.keywords:
            cases[item.nodeid.partition("[")[0]].append(item)
        if "soak" in item.keywords and not os.environ.get("RAYLT_SOAK"):
            item.add_marker(pytest.mark.skip(reason="a soak test; set RAYLT_SOAK=1, or run make soak"))
    for of_a_test in cases.values():
        (share,) = of_a_test[0].get_closest_marker("sampled").args
        for place, item in enumerate(of_a_test):
            if place % share:
                item.add_marker(pytest.mark.slow)


@contextmanager
def plugins_forgotten() -> Iterator[None]:
    """Undo registrations made inside the block, and unload the modules of its plugin files."""
    tables = {kind: dict(table) for kind, table in registry.TABLES.items()}
    plugins = dict(registry._plugins)
    modules = set(sys.modules)
    yield
    for name in set(sys.modules) - modules:
        if name.startswith(PLUGIN):
            del sys.modules[name]
    for kind, table in registry.TABLES.items():
        table.clear()
        table.update(tables[kind])
    registry._plugins.clear()
    registry._plugins.update(plugins)


@pytest.fixture(scope="module", autouse=True)
def own_plugins() -> Iterator[None]:
    """Undo after each test file what the file registered."""
    with plugins_forgotten():
        yield


@pytest.fixture
def no_guests() -> Iterator[None]:
    """Undo after each test what the test registered."""
    with plugins_forgotten():
        yield


@pytest.fixture
def stacks_on_any_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let small clients train in stacks also without AVX-512, where the bits of some models' stacks differ."""
    monkeypatch.setattr(stacked_sgd, "has_avx512", lambda: True)


@pytest.fixture(scope="session", autouse=True)
def no_waits_for_the_disk() -> Iterator[None]:
    """Check the handle that `os.fsync` gets, without waiting for the disk: no test survives a loss of power."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", os.fstat)
        yield


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def tiny_task() -> Task:
    return tiny.make_task()


@pytest.fixture(scope="session")
def tiny_scenes() -> Task:
    return tiny.make_scenes()


@pytest.fixture(scope="session")
def tiny_config() -> Config:
    return tiny.configure()


@pytest.fixture(scope="session")
def make_experiment() -> Callable[..., Experiment]:
    return tiny.make_experiment


@pytest.fixture(scope="session")
def clip_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a tiny open_clip model with random weights, as local-dir:FOLDER reads it; return the folder."""
    folder = tmp_path_factory.mktemp("clip")
    teachers.save_clip(folder)
    return folder


@pytest.fixture
def clip_name(clip_folder: Path) -> str:
    """Return the name of the tiny open_clip model as a model of raylt."""
    return f"clip:local-dir:{clip_folder}"


@pytest.fixture
def clip_network(clip_name: str) -> Any:
    """Return the tiny open_clip model as open_clip loads it."""
    return open_tower(clip_name).load()


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """Start the test process's one Ray session, with four logical CPUs, no dashboard, and on the loopback interface
    only."""
    import ray  # imported only by tests that use it

    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_ADDRESS", raising=False)
        patch.setenv("RAY_AUTH_MODE", "disabled")  # unit tests need no token in the home folder
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        # actors import the modules next to the tests by name
        patch.setenv("PYTHONPATH", str(Path(__file__).parent / "actors"), prepend=os.pathsep)
        ray.init(
            address="local",
            num_cpus=4,
            include_dashboard=False,
            log_to_driver=False,
            configure_logging=False,
            namespace="test",
            object_store_memory=100 * 2**20,
        )
    yield
    ray.shutdown()
