"""An experiment in this process, where a checkpoint left it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from raylt.config import Config
from raylt.core.checkpoint import Checkpoint
from raylt.core.experiment import Experiment
from raylt.core.fleet import Fleet
from raylt.core.host import Host
from raylt.core.in_process import LocalFleet
from raylt.core.setup import Setup
from raylt.data.task import Task


def open_here(setup: Setup, task: Task, folder: Path, saved: Checkpoint | None,
              fleet: Callable[[Config, Task, Host], Fleet] = LocalFleet) -> Experiment:
    """The experiment of a run folder with all clients in this process, on its GPU where it has one.

    Args:
        saved: where to take it up; None for the beginning.
        fleet: called as `LocalFleet` is.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    clients = fleet(setup.config, task, Host(setup, task.facts, task.test, device))
    experiment = Experiment(setup, task, clients, device, folder)
    if saved is not None:
        experiment.load(saved)
    return experiment


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch on one thread inside the block: weights must not depend on the machine's cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
