"""The door to Ray: the only module that the runner opens, and Ray is imported behind it.

The cluster decides what must be set before Ray is imported, so a module that imports it comes after `session`.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from actors.access import whereabouts
from actors.cluster import session
from actors.placement import Node, Plan, nodes_of, parse_nodes, plan
from raylt.config import Config
from raylt.data.task import Task, build_task

if TYPE_CHECKING:
    from actors.hosting import RemoteExperiment
    from raylt.core.server import Watch
    from raylt.core.setup import Setup


def _quiet(text: str, minor: bool = False) -> None:
    pass


@contextmanager
def open_experiment(setup: "Setup", task: Task, folder: Path, address: str | None,
                    says: Callable[..., None] = _quiet, watch: "Watch | None" = None) -> "Iterator[RemoteExperiment]":
    """Starts the server and client actors of a run, on a new local cluster or on the one to be joined.

    Raises:
        ConfigError: the address does not answer, or the cluster is too small.
        ServerLost: from the experiment's calls.
    """
    with session(address) as cluster:
        from actors.hosting import host
        experiment = host(setup, task, folder, cluster, says, watch)
        try:
            yield experiment
        finally:
            experiment.close()


def foresee(config: Config, address: str | None, description: str | None) -> Plan:
    """What `open_experiment` would start; starts nothing.

    Args:
        description: of nodes that one does not have, as `parse_nodes` reads it.
            Without one it is planned for the cluster that a run would join, else for this machine.
    """
    clients = config.data.clients or build_task(config.data).clients
    if description is not None:
        return plan(config, clients, parse_nodes(description))
    if whereabouts(address) is None:
        from raylt.core.device import gpus
        return plan(config, clients, [Node(len(os.sched_getaffinity(0)), gpus())])
    with session(address):
        import ray
        return plan(config, clients, nodes_of(ray.nodes()))
