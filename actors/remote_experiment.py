"""The driver's interface to an experiment that runs on Ray.

This is a separate module because it imports Ray: `actors.launch` imports it only inside a session.
"""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayTaskError
from ray.util import remove_placement_group

from actors.actor_pool import LOST
from actors.by_value import pack
from actors.capacity import PlacementPlan, nodes_of, plan
from actors.cluster.session import Cluster, dashboard
from actors.fleet import START_TIMEOUT_S
from actors.probe import probe
from actors.server import ServerActor
from actors.shards import Shards
from raylt.core.checkpoint.checkpoint import Seal
from raylt.core.fleet.item_progress import ItemsHook, ItemsProgress
from raylt.core.report import RoundReport
from raylt.core.round_stats import ProgressHook
from raylt.core.setup import Setup
from raylt.data.task import Task
from raylt.errors import ConfigError, RayltError, ServerLost
from raylt.runs.callbacks import progress
from raylt.runs.folder.notes import NOTES, SERVER_DIED
from raylt.store import Folder

NOTES_INTERVAL_S = 1.0  # Interval at which the run's notes are read.
_servers_started: Counter[str] = Counter()  # servers that this process has started, by name of the run

OnMessage = Callable[..., None]  # Called with a line for the user; minor=True if it is of interest only at a terminal.


class RemoteExperiment:
    """An experiment inside a server actor, with the interface of `Experiment`.

    Args:
        server: Handle of the `ServerActor`.
        opened: Reference to the result of its call `open`.
        notes: File with the run's notes.
        on_message: Function that is called with each new line of the notes.
        on_progress: Function that is called with the progress inside a round.
        on_items: Function that is called with the progress inside items of the server's own work.
    """

    def __init__(
        self,
        server: Any,
        opened: Any,
        notes: Path,
        on_message: OnMessage,
        on_progress: ProgressHook | None = None,
        on_items: ItemsHook | None = None,
    ):
        self._server = server
        self._group: Any = None  # Ray's placement group of the client actors
        self._notes = notes
        self._on_message = on_message
        self._on_progress = on_progress
        self._on_items = on_items
        self._bytes_read = notes.stat().st_size if notes.is_file() else 0
        try:
            self._group = self._wait(opened, show_progress=False)  # a killed run may have left its progress
            self.done: bool = _get(server.done.remote())
        except BaseException:
            self.close()
            raise

    def describe(self) -> dict[str, str | None]:
        """Describe the devices of clients and server; see `Experiment.describe`."""
        return _get(self._server.describe.remote())

    def advance(self, seal: Seal | None = None) -> RoundReport:
        """Run one step and write its checkpoint if one is due; see `Experiment.advance`."""
        report, self.done = self._wait(self._server.advance.remote(seal))
        return report

    def export_model(self) -> dict[str, str]:
        """Write the deployed model and return its hash; see `Experiment.export_model`."""
        return self._wait(self._server.export_model.remote())

    def close(self) -> None:
        """Release the resources of the client actors.

        Ray keeps a placement group that an actor has created until the driver's session ends, even if the actor has
        ended before. The next run, or the next server of this run, would not get these resources.
        """
        if self._group is not None:
            remove_placement_group(self._group)

    def _wait(self, ref: Any, show_progress: bool = True) -> Any:
        """Wait for a server call, and meanwhile show the server's notes and progress."""
        try:
            while not ray.wait([ref], timeout=NOTES_INTERVAL_S)[0]:
                self._show_notes()
                if show_progress:
                    self._show_progress()
        finally:
            self._show_notes()
        return _get(ref)

    def _show_progress(self) -> None:
        moment = progress.read_progress(self._notes.parent)
        if isinstance(moment, ItemsProgress):
            if self._on_items is not None:
                self._on_items(moment)
        elif moment is not None and self._on_progress is not None:
            self._on_progress(*moment)

    def _show_notes(self) -> None:
        with Folder.open(self._notes.parent) as folder:
            notes = folder.read(NOTES) if folder.has(NOTES) else b""
        for line in notes[self._bytes_read :].decode().splitlines():
            self._on_message(line)
        self._bytes_read = len(notes)


def start_experiment(
    setup: Setup,
    task: Task,
    folder: Path,
    cluster: Cluster,
    on_message: OnMessage,
    on_progress: ProgressHook | None = None,
    on_items: ItemsHook | None = None,
) -> RemoteExperiment:
    """Plan the run for this process's cluster, show the plan, and start the server actor.

    Raises:
        ConfigError: The cluster is too small.
    """
    for remark in cluster.remarks:
        on_message(remark)
    config = setup.config
    clients = int((task.sizes > 0).sum())
    nodes = nodes_of(ray.nodes())
    chosen = plan(config, clients, nodes)
    if config.resources.gpu_share == "auto" and 0 < chosen.placement.gpus < 0.5:
        # several actors would share a GPU, so probe how many its memory holds
        chosen = plan(config, clients, nodes, probe(setup, task, 1, on_message))
    board = dashboard()
    hint = " (log in with the token that ray get-auth-token prints)" if board and cluster.token else ""
    on_message(f"{cluster}, {chosen.reasons['nodes']}; dashboard {board or 'off'}{hint}", minor=cluster.started)
    server, opened = _start_server(setup, task, folder, chosen)
    return RemoteExperiment(server, opened, folder / NOTES, on_message, on_progress, on_items)


def _start_server(setup: Setup, task: Task, folder: Path, chosen: PlacementPlan) -> tuple[Any, Any]:
    """Start the server actor, and call its `open`; return the actor and a reference to the call's result."""
    shipped = pack(setup)  # before anything starts, because it may raise
    shards = Shards.put(task.shards)
    test = ray.put(task.test)
    folder = folder.resolve()
    # the actors of a server that has just died may still have their names
    name = f"{folder.name}~{_servers_started[folder.name]}" if _servers_started[folder.name] else folder.name
    _servers_started[folder.name] += 1
    options = ServerActor.options(
        name=f"{name}/server", num_cpus=0, num_gpus=chosen.server_gpus, label_selector=dict(chosen.server_labels)
    )
    server: Any = options.remote(setup.method.name)
    try:
        _get(server.__ray_ready__.remote(), START_TIMEOUT_S)
    except GetTimeoutError:
        labels = "".join(f", on a node with label {key}={value}" for key, value in chosen.server_labels.items())
        raise ConfigError(
            f"resources: the server actor did not start within {START_TIMEOUT_S} s (it needs {chosen.server_gpus} of "
            f"a GPU{labels}). Wait until the cluster is free, or add a node that has them.",
            code="cluster.busy",
            gpus=chosen.server_gpus,
            labels=dict(chosen.server_labels),
            timeout_s=START_TIMEOUT_S,
        ) from None
    # Ray does not resolve references inside lists, so the server does not receive the clients' data
    outline = ray.put(task.without_data())
    return server, server.open.remote(shipped, outline, shards, [test], chosen.placement, name, folder)


def _get(ref: Any, timeout_s: float | None = None) -> Any:
    """Return the result of a server call.

    Raises:
        RayltError: The server raised this error.
        ServerLost: The server's process died.
    """
    try:
        return ray.get(ref, timeout=timeout_s)
    except RayTaskError as error:
        if isinstance(error.cause, RayltError):
            raise error.cause from error
        raise
    except LOST as error:
        raise ServerLost(f"{SERVER_DIED} ({type(error).__name__})") from error
