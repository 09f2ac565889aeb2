"""A run on Ray as its driver sees it: from the plan to the last step."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayTaskError
from ray.util import remove_placement_group

from actors.cluster import Cluster, dashboard
from actors.fleet import NOTES, START_TIMEOUT_S
from actors.guests import send_by_value
from actors.placement import Plan, nodes_of, place, plan
from actors.probe import probe
from actors.server import ServerActor
from actors.shards import Shards
from actors.slots import LOST
from raylt.core.checkpoint import Seal
from raylt.core.report import Report
from raylt.core.server import Watch
from raylt.core.setup import Setup
from raylt.data.task import Task
from raylt.errors import ConfigError, RayltError, ServerLost
from raylt.registry import guests
from raylt.runs import progress
from raylt.store import Folder

LOOK_S = 1.0            # between looks at the run's notes
_starts: Counter[str] = Counter()       # of servers by this process, by their runs' names

Says = Callable[..., None]      # a line for whoever watches; minor=True: only for someone at a terminal


class RemoteExperiment:
    """The experiment inside a server actor, with the face of `Experiment`."""

    def __init__(self, server: Any, places: Any, notes: Path, says: Says, watch: Watch | None = None):
        self._server, self._places, self._notes, self._says, self._watch = server, places, notes, says, watch
        self._read = notes.stat().st_size if notes.is_file() else 0
        try:
            self.done: bool = _get(server.done.remote())
        except BaseException:
            self.close()
            raise

    def describe(self) -> dict[str, str | None]:
        """What clients and server compute on."""
        return _get(self._server.describe.remote())

    def advance(self, seal: Seal | None = None) -> Report:
        """One step, with its checkpoint when due."""
        report, self.done = self._wait(self._server.advance.remote(seal))
        return report

    def conclude(self) -> dict[str, str]:
        """Writes the deployed model; says its hash."""
        return self._wait(self._server.conclude.remote())

    def close(self) -> None:
        """Gives up the places of the client actors. Ray keeps those that an actor has taken until the driver's session
        is over, however the actor ended, and they would be missing for the next run, or for this one's next server."""
        if self._places is not None:            # they are the driver's own
            remove_placement_group(self._places)

    def _wait(self, ref: Any) -> Any:
        """Says meanwhile what the server notes."""
        try:
            while not ray.wait([ref], timeout=LOOK_S)[0]:
                self._say_notes()
                if self._watch is not None and (now := progress.noted(self._notes.parent)) is not None:
                    self._watch(*now)
        finally:
            self._say_notes()
        return _get(ref)

    def _say_notes(self) -> None:
        with Folder.open(self._notes.parent) as folder:
            notes = folder.read(NOTES) if folder.has(NOTES) else b""
        for line in notes[self._read:].decode().splitlines():
            self._says(line)
        self._read = len(notes)


def host(setup: Setup, task: Task, folder: Path, cluster: Cluster, says: Says,
         watch: Watch | None = None) -> RemoteExperiment:
    """Plans for the cluster that this process is in, says what is planned, and starts the server actor.

    Raises:
        ConfigError: the cluster is too small.
    """
    for remark in cluster.remarks:
        says(remark)
    send_by_value(guests())
    config = setup.config
    clients = int((task.sizes > 0).sum())
    place(config, clients, ray.cluster_resources())         # what all nodes cannot do together, none can
    nodes = nodes_of(ray.nodes())
    chosen = plan(config, clients, nodes)
    if config.resources.gpu_share == "auto" and 0 < chosen.placement.gpus < 0.5:
        # several would share a GPU: so many as its memory holds
        chosen = plan(config, clients, nodes, probe(setup, task, 1))
    board, way_in = dashboard() or "off", " (it asks for the token that ray get-auth-token prints)"
    says(f"{cluster}, {chosen.reasons['nodes']}; dashboard {board}{way_in if cluster.token and board != 'off' else ''}",
         minor=cluster.started)
    return RemoteExperiment(*_start(setup, task, folder, chosen), folder / NOTES, says, watch)


def _start(setup: Setup, task: Task, folder: Path, chosen: Plan) -> tuple[Any, Any]:
    """The server actor, and the placement group of its client actors."""
    shards, test = Shards.put(task.shards), ray.put(task.test)
    # the actors of a server that has just died may still have their names
    name = f"{folder.name}~{_starts[folder.name]}" if _starts[folder.name] else folder.name
    _starts[folder.name] += 1
    options = ServerActor.options(name=f"{name}/server", num_cpus=0, num_gpus=chosen.server_gpus,
                                  label_selector=dict(chosen.server_labels))
    server: Any = options.remote(setup.method.name)
    try:
        _get(server.__ray_ready__.remote(), START_TIMEOUT_S)
    except GetTimeoutError:
        raise ConfigError(f"resources: no room for the server actor within {START_TIMEOUT_S} s ({chosen.server_gpus} "
                          "of a GPU); wait until the cluster is free") from None
    # references inside lists stay references: the server never sees the clients' data
    rest = ray.put(task.without_data())
    return server, _get(server.open.remote(setup, rest, shards, [test], chosen.placement, name, folder.resolve()))


def _get(ref: Any, timeout_s: float | None = None) -> Any:
    try:
        return ray.get(ref, timeout=timeout_s)
    except RayTaskError as error:
        if isinstance(error.cause, RayltError):
            raise error.cause from error
        raise
    except LOST as error:
        raise ServerLost(f"the server's process died ({type(error).__name__})") from error
