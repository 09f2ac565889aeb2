"""Where a run's actors go, and the run as its driver sees it."""

import logging
import math
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from actors.fleet import Placement
from actors.server import ServerActor
from raylt.config import Config
from raylt.data.task import Task
from raylt.errors import ConfigError, RayltError
from raylt.experiment import Report

SERVER_GPUS = 0.05      # its share of a GPU: Ray does not bound memory, so this only places it

# fewer page faults: large buffers are kept by the process instead of being given back and cleared at every step
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "1073741824", "MALLOC_TRIM_THRESHOLD_": "2147483648", "MALLOC_TOP_PAD_": "67108864"}


class RemoteExperiment:
    """The experiment inside a server actor, with the face of `Experiment`."""

    def __init__(self, server: Any):
        self._server = server
        self.done: bool = _get(server.done.remote())

    def advance(self) -> Report:
        """One step, with its checkpoint when due."""
        report, self.done = _get(self._server.advance.remote())
        return report

    def conclude(self) -> dict[str, str]:
        """Writes the deployed model; says its hash."""
        return _get(self._server.conclude.remote())


@contextmanager
def open_experiment(config: Config, task: Task, folder: Path, address: str | None) -> Iterator[RemoteExperiment]:
    """Starts the server and client actors of a run, on a new local cluster or the one at `address`.

    Raises:
        ConfigError: the address does not answer, or the cluster is too small.
    """
    connect(address)
    try:
        placement = place(config, len(task.shards), ray.cluster_resources())
        shards, test = [ray.put(shard) for shard in task.shards], ray.put(task.test)
        options = ServerActor.options(name=f"{folder.name}/server", num_cpus=0,
                                      num_gpus=SERVER_GPUS if placement.gpus else 0)
        server: Any = options.remote(config.method["name"])
        # references inside lists stay references: the server never sees the clients' data
        rest = ray.put(replace(task, shards=()))
        _get(server.open.remote(config, rest, shards, [test], placement, folder.resolve()))
        yield RemoteExperiment(server)
    finally:
        ray.shutdown()


def connect(address: str | None) -> None:
    """Joins the cluster at `address`, or starts a new local one; never one that happens to be there."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    if address is None:
        os.environ.update({key: os.environ.get(key, value) for key, value in MALLOC.items()})
        ray.init(address="local", include_dashboard=True, dashboard_host="127.0.0.1", log_to_driver=False,
                 logging_level=logging.ERROR)
        return
    _knock(address)
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, runtime_env={"env_vars": MALLOC})
    except (ConnectionError, RuntimeError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise ConfigError(f"--address {address}: no Ray cluster could be joined there ({first}); check the address, "
                          "and the token in RAY_AUTH_TOKEN_PATH") from None


def _knock(address: str) -> None:
    """Ray itself waits for a long time before it says that nobody is there."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdigit():
        if address == "auto":
            return
        raise ConfigError(f"--address {address}: must be HOST:PORT or auto")
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except OSError as error:
        raise ConfigError(f"--address {address}: nothing answers there ({error.strerror or error}); start a cluster "
                          "with ray start --head, or leave --address out for a local one") from None


def place(config: Config, clients: int, have: Mapping[str, float]) -> Placement:
    """How many client actors to start and what each takes.

    One actor per client where the cluster has the slots; else as many as can be at work at once.

    Args:
        clients: K.
        have: the cluster's resources, as `ray.cluster_resources()`.

    Raises:
        ConfigError: the settings ask for more than there is.
    """
    wanted, cpus, gpus = config.resources, have.get("CPU", 0.0), have.get("GPU", 0.0)
    active = min(clients, math.ceil(config.federation.participation * clients - 1e-9))
    slots = math.floor(cpus / wanted.cpus_per_client + 1e-9)
    if wanted.gpus_per_client != "auto" and (share := wanted.gpus_per_client) > 0:
        slots = min(slots, math.floor((gpus / share if share >= 1 else gpus * math.floor(1 / share + 1e-9)) + 1e-9))
    if wanted.actors != "auto":
        actors = wanted.actors
    elif wanted.clients_per_actor != "auto":
        actors = math.ceil(clients / wanted.clients_per_actor)
    else:
        actors = clients if clients <= slots else min(slots, active)
    actors = min(actors, clients)
    if actors < 1 or actors > slots:
        raise ConfigError(
            f"resources: {max(actors, 1)} client actors of {wanted.cpus_per_client:g} CPUs and "
            f"{wanted.gpus_per_client} GPUs, the cluster has {cpus:g} CPUs and {gpus:g} GPUs, enough for {slots}; "
            "lower resources.actors, resources.cpus_per_client or resources.gpus_per_client")
    if wanted.gpus_per_client != "auto":
        share = wanted.gpus_per_client
    else:                           # all of a GPU, or the share that lets all actors (and the server) fit
        share = 0.0 if gpus == 0 else math.floor((1 - SERVER_GPUS) / math.ceil(actors / gpus) * 1e4) / 1e4
    return Placement(actors, wanted.cpus_per_client, share)


def _get(ref: Any) -> Any:
    try:
        return ray.get(ref)
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, RayltError):
            raise cause from None
        raise
    except RayActorError as error:
        raise RayltError(f"the server's process died ({type(error).__name__}); continue with raylt resume") from error
