"""An experiment in this process, where a checkpoint left it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch

from raylt.config import Config
from raylt.core.checkpoint import Checkpoint
from raylt.core.device import open_device
from raylt.core.experiment import Experiment
from raylt.core.fleet import Fleet
from raylt.core.host import Host
from raylt.core.in_process import LocalFleet
from raylt.core.setup import Setup
from raylt.data.task import Task


def open_here(setup: Setup, task: Task, folder: Path, saved: Checkpoint | None,
              fleet: Callable[[Config, Task, Host], Fleet] = LocalFleet) -> Experiment:
    """The experiment of a run folder with all clients in this process.

    Args:
        saved: where to take it up; None for the beginning.
        fleet: called as `LocalFleet` is.

    Raises:
        ConfigError: the device that is asked for cannot be used.
    """
    device = open_device(setup.config)
    clients = fleet(setup.config, task, Host(setup, task.facts, task.test, device))
    experiment = Experiment(setup, task, clients, device, folder)
    if saved is not None:
        experiment.load(saved)
    return experiment


def computed_on(setup: Setup, device: Literal["auto", "cpu", "cuda"]) -> Setup:
    """The setup with another `resources.device`."""
    resources = setup.config.resources.model_copy(update={"device": device})
    return replace(setup, config=setup.config.model_copy(update={"resources": resources}))


def anywhere(setup: Setup) -> Setup:
    """The same for reading: a run that was made on a GPU can be read where there is none."""
    return computed_on(setup, "auto") if setup.config.resources.device == "cuda" else setup


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch on one thread inside the block: weights must not depend on the machine's cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
