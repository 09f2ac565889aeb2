"""Restores an experiment from a checkpoint in this process."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

from raylt.config import Config
from raylt.core.checkpoint.checkpoint import Checkpoint
from raylt.core.device import open_device
from raylt.core.encoding import encode
from raylt.core.experiment import Experiment
from raylt.core.fleet.client_host import ClientHost
from raylt.core.fleet.fleet import Fleet
from raylt.core.fleet.local_fleet import LocalFleet
from raylt.core.processes.process_fleet import ProcessFleet
from raylt.core.setup import Setup
from raylt.data.task import Task
from raylt.errors import ConfigError
from raylt.machine import cores

MAX_THREADS_PER_CORE = 16  # maximum number of threads of one process, per CPU core


def open_in_process(
    setup: Setup,
    task: Task,
    folder: Path,
    saved: Checkpoint | None,
    fleet: Callable[[Config, Task, ClientHost], Fleet] = LocalFleet,
    clients: bool = True,
) -> Experiment:
    """Restore the experiment of a run folder, with all clients in this process.

    Args:
        setup: Values that the configuration names.
        task: The data and their split.
        folder: The run folder.
        saved: Checkpoint to continue from; None to start from the beginning.
        fleet: Function that creates the fleet, with the arguments of `LocalFleet`.
        clients: Whether to restore the clients' private states, see `Experiment.load`.

    Raises:
        ConfigError: The configured device cannot be used.
    """
    setup, task = encode(setup, task)
    device = open_device(setup.config)
    host = ClientHost(setup, task.spec, task.test, device)
    experiment = Experiment(setup, task, fleet(setup.config, task, host), device, folder)
    if saved is not None:
        experiment.load(saved, clients)
    return experiment


def forked_fleet(config: Config, task: Task, host: ClientHost) -> ProcessFleet:
    """Return a fleet of forked processes.

    Raises:
        ConfigError: Forked processes cannot be used on this platform, with a GPU, or with several threads per client.
    """
    problem = None
    if sys.platform != "linux":
        problem = "fleet", "processes can only be forked safely on Linux", "processes"
    elif host.device.type != "cpu":
        problem = "resources.device", "forked processes cannot share a GPU", host.device.type
    elif config.resources.cpus_per_client >= 2:
        threads = config.resources.cpus_per_client
        problem = "resources.cpus_per_client", "a forked process computes on one thread", threads
    if problem is not None:
        key, why, value = problem
        raise ConfigError(
            f"{key}: {why} ({value}). Use --fleet ray or --fleet local.", code="config.conflict", key=key, value=value
        )
    return ProcessFleet(config, task, host)


def with_device(setup: Setup, device: Literal["auto", "cpu", "cuda"]) -> Setup:
    """Return the setup with `resources.device` replaced."""
    resources = setup.config.resources.model_copy(update={"device": device})
    return replace(setup, config=setup.config.model_copy(update={"resources": resources}))


def on_any_device(setup: Setup) -> Setup:
    """Return a setup with which any machine can read a run, even without the run's GPU."""
    return with_device(setup, "auto") if setup.config.resources.device == "cuda" else setup


def check_threads(config: Config) -> None:
    """Raise ConfigError if a client would use threads that slow each other down.

    On 2 cores a run on the digits took 7 s with 1 to 8 threads, 15 s with 32, and 79 s with 256.
    """
    have = len(cores())
    most = MAX_THREADS_PER_CORE * have
    threads = config.resources.cpus_per_client
    if threads <= most:
        return
    raise ConfigError(
        f"resources.cpus_per_client: with {have} CPU cores, more than {most} threads slow each other down "
        f"({threads:g}). Set at most {most}.",
        code="config.out-of-range",
        key="resources.cpus_per_client",
        value=threads,
        cores=have,
        most=most,
    )
