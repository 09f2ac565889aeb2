"""A run on Ray as its driver sees it: from the plan to the last step."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayTaskError

from actors.cluster import Cluster, dashboard
from actors.fleet import NOTES, START_TIMEOUT_S
from actors.guests import send_by_value
from actors.placement import Plan, nodes_of, place, plan
from actors.probe import probe
from actors.server import ServerActor
from actors.slots import LOST
from raylt.core.checkpoint import Seal
from raylt.core.report import Report
from raylt.core.setup import Setup
from raylt.data.task import Task
from raylt.errors import ConfigError, RayltError, ServerLost
from raylt.registry import guests
from raylt.store import Folder

LOOK_S = 1.0            # between looks at the run's notes

Says = Callable[..., None]      # a line for whoever watches; minor=True: only for someone at a terminal


class RemoteExperiment:
    """The experiment inside a server actor, with the face of `Experiment`."""

    def __init__(self, server: Any, notes: Path, says: Says):
        self._server, self._notes, self._says = server, notes, says
        self._read = notes.stat().st_size if notes.is_file() else 0
        self.done: bool = _get(server.done.remote())

    def advance(self, seal: Seal | None = None) -> Report:
        """One step, with its checkpoint when due."""
        report, self.done = self._wait(self._server.advance.remote(seal))
        return report

    def conclude(self) -> dict[str, str]:
        """Writes the deployed model; says its hash."""
        return self._wait(self._server.conclude.remote())

    def _wait(self, ref: Any) -> Any:
        """Says meanwhile what the server notes."""
        try:
            while not ray.wait([ref], timeout=LOOK_S)[0]:
                self._say_notes()
        finally:
            self._say_notes()
        return _get(ref)

    def _say_notes(self) -> None:
        with Folder.open(self._notes.parent) as folder:
            notes = folder.read(NOTES) if folder.has(NOTES) else b""
        for line in notes[self._read:].decode().splitlines():
            self._says(line)
        self._read = len(notes)


def host(setup: Setup, task: Task, folder: Path, cluster: Cluster, says: Says) -> RemoteExperiment:
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
    if config.resources.gpus_per_client == "auto" and 0 < chosen.placement.gpus < 0.5:
        # several would share a GPU: so many as its memory holds
        chosen = plan(config, clients, nodes, probe(setup, task, 1))
    says(f"{cluster}, {chosen.reasons['nodes']}; dashboard {dashboard() or 'off'}", minor=cluster.started)
    return RemoteExperiment(_start(setup, task, folder, chosen), folder / NOTES, says)


def _start(setup: Setup, task: Task, folder: Path, chosen: Plan) -> Any:
    shards, test = [ray.put(shard) for shard in task.shards], ray.put(task.test)
    options = ServerActor.options(name=f"{folder.name}/server", num_cpus=0, num_gpus=chosen.server_gpus,
                                  label_selector=dict(chosen.server_labels))
    server: Any = options.remote(setup.method.name)
    try:
        ray.get(server.__ray_ready__.remote(), timeout=START_TIMEOUT_S)
    except GetTimeoutError:
        raise ConfigError(f"resources: no room for the server actor within {START_TIMEOUT_S} s ({chosen.server_gpus} "
                          "of a GPU); wait until the cluster is free") from None
    # references inside lists stay references: the server never sees the clients' data
    rest = ray.put(task.without_data())
    _get(server.open.remote(setup, rest, shards, [test], chosen.placement, folder.resolve()))
    return server


def _get(ref: Any) -> Any:
    try:
        return ray.get(ref)
    except RayTaskError as error:
        if isinstance(error.cause, RayltError):
            raise error.cause from error
        raise
    except LOST as error:
        raise ServerLost(f"the server's process died ({type(error).__name__})") from error
