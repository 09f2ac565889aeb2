"""Fixtures of all tests; what they are made of is in tiny.py, a module that tests can import from."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import teachers
import tiny
import torch

from raylt.config import Config
from raylt.core.experiment import Experiment
from raylt.data.task import Task


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
    """A tiny open_clip model with random weights, as local-dir:FOLDER reads it."""
    folder = tmp_path_factory.mktemp("clip")
    teachers.save_clip(folder)
    return folder
