"""The cluster of this process: one that it was told of, or a new local one, never one that happens to be there.

Importing this module does not import Ray: what decides how Ray starts must be set before.
"""

import importlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actors import reaper
from actors.access import Joined, entry, whereabouts
from raylt.errors import ConfigError
from raylt.signals import interrupt_on_sigterm

# fewer page faults: large buffers are kept by the process instead of being given back and cleared at every step
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "1073741824", "MALLOC_TRIM_THRESHOLD_": "2147483648", "MALLOC_TOP_PAD_": "67108864"}
DEFAULTS = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
SOCKETS = 40        # longest path of a session folder: below it lie sockets, whose paths end at 107 characters


@dataclass(frozen=True)
class Cluster:
    """Where this process is.

    Args:
        origin: how it came there, as a clause.
        token: whether the cluster asks for one.
        started: whether it is a local one that this process started.
        remarks: what was mended or should be, a line each.
    """

    origin: str
    token: bool
    started: bool
    remarks: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.origin


@contextmanager
def session(address: str | None) -> Iterator[Cluster]:
    """Joins a cluster where asked to, else starts a new local one; leaves or ends it after the block.

    A process that is in a Ray session already, as in a notebook, works in that one and stays in it.

    Raises:
        ConfigError: no cluster could be joined there, or the process is in another one.
    """
    joined = whereabouts(address)
    if "ray" in sys.modules and importlib.import_module("ray").is_initialized():
        yield _here(address, joined)
        return
    way = entry(joined)
    settings = {key: os.environ.get(key, value) for key, value in DEFAULTS.items()} | dict(way.variables)
    if joined is not None:
        with environment(settings), _connected(joined, address=way.address, runtime_env={"env_vars": MALLOC}):
            yield Cluster(str(joined), way.token, False, way.remarks)
        return
    settings |= {key: os.environ.get(key, value) for key, value in MALLOC.items()}
    with _folder() as folder, environment(settings | {reaper.MARK: str(folder)}), _connected(
            None, address="local", include_dashboard=True, dashboard_host="127.0.0.1", _temp_dir=str(folder / "ray")):
        yield Cluster("a new local Ray cluster", way.token, True, way.remarks)


def dashboard() -> str | None:
    """The address of the dashboard of the cluster that this process is in."""
    import ray
    url = ray.get_runtime_context().worker.node.webui_url
    return f"http://{url}" if url else None


@contextmanager
def _connected(joined: Joined | None, **options: Any) -> Iterator[None]:
    read_again = "ray" in sys.modules
    import ray
    from ray.exceptions import AuthenticationError
    if read_again:
        _refresh()
    try:
        try:
            ray.init(log_to_driver=False, logging_level=logging.ERROR, **options)
        except SystemExit:              # Ray's own handler of SIGTERM while it starts
            raise KeyboardInterrupt from None
        except (ConnectionError, RuntimeError, ValueError, AuthenticationError) as error:
            why = " ".join(str(error).split())[:300]
            raise ConfigError(
                f"a new local Ray cluster does not start ({why}); look for a full disk or memory" if joined is None else
                f"{joined.told}: no Ray cluster could be joined there ({why}); it must run the same Ray and Python as "
                "this machine") from error
        interrupt_on_sigterm()
        yield
    finally:
        ray.shutdown()


def _here(address: str | None, joined: Joined | None) -> Cluster:
    """The session that this process is in."""
    import ray

    core: Any = importlib.import_module("ray._raylet")
    current = ray.get_runtime_context().gcs_address
    if address == "local" or (joined is not None and joined.address not in ("auto", current)):
        asked = joined.told if joined else f"--address {address}"
        raise ConfigError(f"{asked}: this process is in the Ray cluster at {current} already; end that session with "
                          "ray.shutdown(), or leave the address out to work in it")
    return Cluster(f"the Ray session of this process, at {current}",
                   core.get_authentication_mode() is core.AuthenticationMode.TOKEN, False)


def _refresh() -> None:
    """Ray read the variables when it was imported; where they have changed since, as between two sessions of one
    process, it must read them again. Ray does the same for the clusters that `ray.init` starts."""
    core: Any = importlib.import_module("ray._raylet")
    core.Config.initialize("")
    core.AuthenticationTokenLoader.instance().reset_cache()


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set until the block ends: what one cluster needs says nothing of the next."""
    before = {key: os.environ.get(key) for key in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value


@contextmanager
def _folder() -> Iterator[Path]:
    """A folder for the session that nobody else can enter, and a process that clears up if this one is killed.

    Ray opens its own folder to everybody, so that one lies inside. Logs stay where the block ends in an error that
    nobody foresaw.
    """
    base = tempfile.gettempdir()
    folder = Path(tempfile.mkdtemp(prefix="raylt-", dir=base if len(base) < SOCKETS - 15 else "/tmp"))
    watch = subprocess.Popen([sys.executable, "-I", reaper.__file__, str(folder)], stdin=subprocess.PIPE,
                             stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd="/", start_new_session=True)
    keep = False
    try:
        yield folder
    except Exception as error:
        keep = not isinstance(error, ConfigError)
        raise
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
        assert watch.stdin is not None
        with suppress(OSError):
            watch.stdin.write(b".")
            watch.stdin.close()
        watch.wait()
