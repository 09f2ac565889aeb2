"""The cluster that a process joins: one that it was told of, or a new local one, never one that happens to be there."""

import logging
import os
import socket
from dataclasses import dataclass

import ray
from ray.exceptions import AuthenticationError

from raylt.errors import ConfigError

# fewer page faults: large buffers are kept by the process instead of being given back and cleared at every step
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "1073741824", "MALLOC_TRIM_THRESHOLD_": "2147483648", "MALLOC_TOP_PAD_": "67108864"}

# how HTTP/2, which Ray speaks, begins: the client's preface and an empty frame of type 4, SETTINGS; the answer is one
GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])


@dataclass(frozen=True)
class Joined:
    """A cluster that this process joined, and who told it to: an option, a variable, or a Ray job."""

    address: str
    asked_by: str

    def __str__(self) -> str:
        return f"joined the Ray cluster at {self.address} ({self.asked_by})"


def whereabouts(address: str | None) -> Joined | None:
    """What to join: the option; else RAYLT_ADDRESS, which cluster.yaml sets on the head; else a job's own cluster.

    RAY_ADDRESS alone says nothing: it may have been exported for something else.
    """
    if address is not None:
        return None if address == "local" else Joined(address, "--address")
    if set_here := os.environ.get("RAYLT_ADDRESS"):
        return None if set_here == "local" else Joined(set_here, "RAYLT_ADDRESS")
    if "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ and (jobs := os.environ.get("RAY_ADDRESS")):
        return Joined(jobs, "this is a Ray job")
    return None


def connect(address: str | None) -> Joined | None:
    """Joins a cluster where asked to, and says so; else starts a new local one.

    Raises:
        ConfigError: no cluster could be joined there.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    joined = whereabouts(address)
    if joined is None:
        os.environ.update({key: os.environ.get(key, value) for key, value in MALLOC.items()})
        ray.init(address="local", include_dashboard=True, dashboard_host="127.0.0.1", log_to_driver=False,
                 logging_level=logging.ERROR)
        return None
    said = f"--address {joined.address}" if joined.asked_by == "--address" else (
        f"{joined.asked_by}, address {joined.address}")
    _knock(joined.address, said)
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    try:
        ray.init(address=joined.address, log_to_driver=False, logging_level=logging.ERROR,
                 runtime_env={"env_vars": MALLOC})
    except (ConnectionError, RuntimeError, ValueError, AuthenticationError) as error:
        first = str(error).strip().splitlines()[0]
        raise ConfigError(f"{said}: no Ray cluster could be joined there ({first}); check the address, and the token "
                          "in RAY_AUTH_TOKEN_PATH") from None
    return joined


def dashboard() -> str | None:
    """The address of the dashboard of the cluster that this process is in."""
    url = ray.get_runtime_context().worker.node.webui_url
    return f"http://{url}" if url else None


def _knock(address: str, said: str) -> None:
    """Ray itself would wait for ever for an answer from a port where no Ray is."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"{said}: must be HOST:PORT or auto")
    try:
        with socket.create_connection((host, int(port)), timeout=5) as line:
            line.sendall(GREETING)
            heard = line.recv(9)
    except OSError as error:
        raise ConfigError(f"{said}: nothing answers there ({error.strerror or error}); start a cluster with ray start "
                          "--head, or leave --address out for a local one") from None
    if heard[3:4] != GREETING[-6:-5] and os.environ.get("RAY_USE_TLS", "0") == "0":
        raise ConfigError(f"{said}: what answers there is no Ray cluster; give the port that ray start --head printed "
                          "(6379 by default), not the dashboard's")
