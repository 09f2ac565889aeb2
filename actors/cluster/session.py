"""The Ray cluster of this process: a cluster that the user names, or a new local cluster.

A cluster that the user does not name is not joined, even if it runs on this machine. Importing this module does not
import Ray, because the environment variables that Ray reads on import must be set before.
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

from actors.cluster import reaper
from actors.cluster.access import Joined, cluster_to_join, entry
from raylt.errors import ConfigError, RayltError, spoken
from raylt.own_code.top_level_names import check_session, worker_environment
from raylt.signals import starting_ray

# Keep large buffers in the process. By default they are returned to the system and cleared at every step, which causes
# page faults.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "1073741824", "MALLOC_TRIM_THRESHOLD_": "2147483648", "MALLOC_TOP_PAD_": "67108864"}
DEFAULTS = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
MAX_FOLDER_LENGTH = 40  # For the path of a session folder; the paths of sockets in it may have at most 107 characters.
NO_DASHBOARD = "Ray's dashboard did not start; the run continues without it"


@dataclass(frozen=True)
class Cluster:
    """The Ray cluster to which this process is connected.

    Args:
        origin: A clause that says how the process joined it.
        token: Whether the cluster requires a token.
        started: Whether this process started the cluster.
        remarks: Lines about problems that were corrected or that the user should correct.
    """

    origin: str
    token: bool
    started: bool
    remarks: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.origin


@contextmanager
def session(address: str | None) -> Iterator[Cluster]:
    """Join the cluster that the user names, or start a local one.

    After the block, the process leaves the cluster, or stops it if it started it. If the process has a Ray session
    already, as in a notebook, the block uses that session and does not end it.

    Args:
        address: See `actors.cluster.access.cluster_to_join`.

    Raises:
        ConfigError: The cluster cannot be joined or started, or the process is in another one.
    """
    joined = cluster_to_join(address)
    if "ray" in sys.modules and importlib.import_module("ray").is_initialized():
        check_session()
        yield _current(address, joined)
        return
    access = entry(joined)
    settings = {key: os.environ.get(key, value) for key, value in DEFAULTS.items()} | dict(access.variables)
    if joined is not None:
        with (
            environment(settings),
            _connected(joined, address=access.address, runtime_env=_merged({"env_vars": MALLOC}, worker_environment())),
        ):
            yield Cluster(str(joined), access.token, False, access.remarks)
        return
    settings |= {key: os.environ.get(key, value) for key, value in MALLOC.items()}
    with (
        _folder() as folder,
        environment(settings | _temporary(folder) | {reaper.MARK: str(folder)}),
        _connected(
            None,
            address="local",
            include_dashboard=None,  # with True, the run would fail if the dashboard cannot start
            dashboard_host="127.0.0.1",
            _temp_dir=str(folder / "ray"),
            runtime_env=worker_environment() or None,
        ),
    ):
        remarks = access.remarks if dashboard() else (*access.remarks, NO_DASHBOARD)
        yield Cluster("a new local Ray cluster", access.token, True, remarks)


def dashboard() -> str | None:
    """Return the dashboard address of this process's cluster; None without a dashboard."""
    import ray

    url = ray.get_runtime_context().worker.node.webui_url
    return f"http://{url}" if url else None


@contextmanager
def _connected(joined: Joined | None, **options: Any) -> Iterator[None]:
    imported_before = "ray" in sys.modules
    import ray
    from ray.exceptions import AuthenticationError

    if imported_before:
        _refresh()
    try:
        try:
            with starting_ray():
                ray.init(log_to_driver=False, logging_level=logging.ERROR, **options)
        except SystemExit:  # raised by Ray's handler of SIGTERM during its start
            raise KeyboardInterrupt from None
        except (ConnectionError, RuntimeError, ValueError, AuthenticationError) as error:
            raise _not_connected(joined, " ".join(str(error).split())[:300]) from error
        with _without_reports(ray):
            yield
    finally:
        ray.shutdown()


@contextmanager
def _without_reports(ray: Any) -> Iterator[None]:
    """Suppress Ray's reports of lost processes on standard output, which contain the last log lines of a node.

    The run notes each lost process in one line, and Ray's logs have the details. Ray has no setting for this.
    """
    worker = ray._private.worker
    before = worker.print_to_stdstream
    worker.print_to_stdstream = lambda *_, **__: None
    try:
        yield
    finally:
        worker.print_to_stdstream = before


def _not_connected(joined: Joined | None, cause: str) -> ConfigError:
    if joined is None:
        return ConfigError(
            f"fleet: a new local Ray cluster does not start ({cause}). Free disk and memory, or set "
            f"{spoken('--fleet local', 'fleet=' + repr('local'))}.",
            code="cluster.not-started",
            cause=cause,
        )
    return ConfigError(
        f"{joined.source}: the Ray cluster cannot be joined ({cause}). Use the same versions of Ray and Python as the "
        "cluster.",
        code="cluster.not-joined",
        address=joined.address,
        cause=cause,
    )


def _current(address: str | None, joined: Joined | None) -> Cluster:
    """Return the cluster of this process's existing Ray session.

    Raises:
        ConfigError: The user names another cluster.
    """
    import ray

    core: Any = importlib.import_module("ray._raylet")
    current = ray.get_runtime_context().gcs_address
    if address == "local" or (joined is not None and joined.address not in ("auto", current)):
        source = joined.source if joined else f"{spoken('--address', 'address')} {address}"
        raise ConfigError(
            f"{source}: this process is in the Ray cluster at {current} already. End that session with ray.shutdown(), "
            "or omit the address to use it.",
            code="cluster.already-joined",
            address=address,
            current=current,
        )
    return Cluster(
        f"the Ray session of this process, at {current}",
        core.get_authentication_mode() is core.AuthenticationMode.TOKEN,
        False,
    )


def _refresh() -> None:
    """Make Ray read its environment variables again, which it otherwise reads only on import.

    The variables may change between two sessions of a process. Ray itself does this only for clusters that `ray.init`
    starts.
    """
    core: Any = importlib.import_module("ray._raylet")
    core.Config.initialize("")
    core.AuthenticationTokenLoader.instance().reset_cache()


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for the duration of the block."""
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


def _merged(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Merge two Ray runtime environments."""
    return one | other | {"env_vars": one.get("env_vars", {}) | other.get("env_vars", {})}


def _temporary(folder: Path) -> dict[str, str]:
    """Return TMPDIR = session folder for Ray's processes if they cannot use the path of the temporary folder.

    Otherwise return no variable.
    """
    return {} if _fits(tempfile.gettempdir()) else {"TMPDIR": str(folder)}


def _fits(base: str) -> bool:
    """Return whether Ray can use a temporary folder: its path is ASCII, and short enough for sockets."""
    return base.isascii() and len(base) < MAX_FOLDER_LENGTH - 15


@contextmanager
def _folder() -> Iterator[Path]:
    """Create a private session folder, and start a process that cleans up if this process is killed.

    Ray gives all users access to its folder, so that folder lies inside the private one. The folder is removed at the
    end, except after an error that refers to Ray's logs in it.
    """
    base = tempfile.gettempdir()
    folder = Path(tempfile.mkdtemp(prefix="raylt-", dir=base if _fits(base) else "/tmp"))
    watcher = subprocess.Popen(
        [sys.executable, "-I", reaper.__file__, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        start_new_session=True,
    )
    keep = False
    try:
        yield folder
    except RayltError as error:
        keep = error.code == "client.not-started"
        raise
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
        assert watcher.stdin is not None
        with suppress(OSError):
            watcher.stdin.write(b".")
            watcher.stdin.close()
        watcher.wait()
