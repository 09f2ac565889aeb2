"""Where a run's actors go, and the run as its driver sees it."""

import logging
import math
import os
import signal
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import AuthenticationError, GetTimeoutError, RayTaskError

from actors.fleet import LOST, START_TIMEOUT_S, Placement
from actors.server import ServerActor
from raylt.config import Config
from raylt.data.task import Task
from raylt.errors import ConfigError, RayltError
from raylt.experiment import Report

SERVER_GPUS = 0.05      # its share of a GPU: Ray does not bound memory, so this only places it

# fewer page faults: large buffers are kept by the process instead of being given back and cleared at every step
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "1073741824", "MALLOC_TRIM_THRESHOLD_": "2147483648", "MALLOC_TOP_PAD_": "67108864"}

# how HTTP/2, which Ray speaks, begins: the client's preface and an empty frame of type 4, SETTINGS; the answer is one
GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])


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
    try:
        connect(address)
        interrupt_on_sigterm()
        placement = place(config, int((task.client_counts.sum(1) > 0).sum()), ray.cluster_resources())
        shards, test = [ray.put(shard) for shard in task.shards], ray.put(task.test)
        options = ServerActor.options(name=f"{folder.name}/server", num_cpus=0,
                                      num_gpus=SERVER_GPUS if placement.gpus else 0)
        server: Any = options.remote(config.method["name"])
        try:
            ray.get(server.__ray_ready__.remote(), timeout=START_TIMEOUT_S)
        except GetTimeoutError:
            raise ConfigError(f"resources: no room for the server actor within {START_TIMEOUT_S} s ({SERVER_GPUS} of "
                              "a GPU); wait until the cluster is free") from None
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
    except (ConnectionError, RuntimeError, ValueError, AuthenticationError) as error:
        first = str(error).strip().splitlines()[0]
        raise ConfigError(f"--address {address}: no Ray cluster could be joined there ({first}); check the address, "
                          "and the token in RAY_AUTH_TOKEN_PATH") from None


def _knock(address: str) -> None:
    """Ray itself would wait for ever for an answer from a port where no Ray is."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"--address {address}: must be HOST:PORT or auto")
    try:
        with socket.create_connection((host, int(port)), timeout=5) as line:
            line.sendall(GREETING)
            heard = line.recv(9)
    except OSError as error:
        raise ConfigError(f"--address {address}: nothing answers there ({error.strerror or error}); start a cluster "
                          "with ray start --head, or leave --address out for a local one") from None
    if heard[3:4] != GREETING[-6:-5] and os.environ.get("RAY_USE_TLS", "0") == "0":
        raise ConfigError(f"--address {address}: what answers there is no Ray cluster; give the port that ray start "
                          "--head printed (6379 by default), not the dashboard's")


def place(config: Config, clients: int, have: Mapping[str, float]) -> Placement:
    """How many client actors to start and what each takes.

    One actor per client where the cluster has the slots; else as many as can be at work at once.

    Args:
        clients: K.
        have: the cluster's resources, as `ray.cluster_resources()`.

    Raises:
        ConfigError: the settings ask for more than there is.
    """
    wanted, federation = config.resources, config.federation
    cpus, gpus = have.get("CPU", 0.0), have.get("GPU", 0.0)
    active = min(clients, math.ceil(federation.participation * (1 + federation.over_select) * clients - 1e-9))
    slots, share = math.floor(cpus / wanted.cpus_per_client + 1e-9), 0.0
    if wanted.gpus_per_client != "auto" and wanted.gpus_per_client > 0:
        on_gpus, share = _share(wanted.gpus_per_client, gpus)
        slots = min(slots, on_gpus)
    if slots < 1:
        raise ConfigError(
            f"resources: a client actor takes {wanted.cpus_per_client:g} CPUs and {wanted.gpus_per_client} GPUs, the "
            f"cluster has {cpus:g} CPUs and {gpus:g} GPUs, not enough for one; lower resources.cpus_per_client or "
            "resources.gpus_per_client")
    if wanted.actors != "auto":
        actors, setting, remedy = wanted.actors, f"actors = {wanted.actors}", f"set resources.actors={slots}"
    elif wanted.clients_per_actor != "auto":
        actors = math.ceil(clients / wanted.clients_per_actor)
        setting = f"clients_per_actor = {wanted.clients_per_actor}"
        remedy = f"set resources.clients_per_actor={math.ceil(clients / slots)}"
    else:
        actors, setting, remedy = clients if clients <= slots else min(slots, active), "actors = auto", ""
    actors = min(actors, clients)
    if actors > slots:
        raise ConfigError(
            f"resources.{setting}: {actors} client actors of {wanted.cpus_per_client:g} CPUs and "
            f"{wanted.gpus_per_client} GPUs, the cluster has {cpus:g} CPUs and {gpus:g} GPUs, enough for {slots}; "
            f"{remedy}, or lower resources.cpus_per_client or resources.gpus_per_client")
    if wanted.gpus_per_client == "auto" and gpus:       # what lets all actors, and the server, fit
        share = _rounded(1 - SERVER_GPUS, math.ceil(actors / gpus))
    return Placement(actors, wanted.cpus_per_client, share)


def _share(wanted: float, gpus: float) -> tuple[int, float]:
    """How many actors of `wanted` GPUs fit, and what each takes so that the server finds its place beside them."""
    if wanted > 1:
        if wanted != int(wanted):
            raise ConfigError(f"resources.gpus_per_client = {wanted:g}: must be a whole number when above 1")
        return math.floor((gpus - SERVER_GPUS) / wanted), wanted
    each = math.floor(1 / wanted + 1e-9)
    return int(gpus) * each, min(wanted, _rounded(1 - SERVER_GPUS, each))


def _rounded(whole: float, parts: int) -> float:
    """`whole / parts`, down to the step that Ray counts in."""
    return math.floor(whole / parts * 1e4 + 1e-6) / 1e4


def interrupt_on_sigterm() -> None:
    """SIGTERM ends a run as Ctrl-C does: Ray's own handler would end the process without a word."""
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, interrupt)


def _get(ref: Any) -> Any:
    try:
        return ray.get(ref)
    except RayTaskError as error:
        if isinstance(error.cause, RayltError):
            raise error.cause from error
        raise
    except LOST as error:
        raise RayltError(f"the server's process died ({type(error).__name__}); continue with raylt resume") from error
