"""Entry points of `actors`. The runner imports only this module, whose top level does not import Ray.

Environment variables that depend on the cluster must be set before Ray is imported. So every module that imports Ray,
such as `actors.remote_experiment`, is imported inside `session`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from actors.capacity import Node, PlacementPlan, nodes_of, parse_nodes, plan
from actors.cluster.access import cluster_to_join
from actors.cluster.session import session
from raylt.config import Config
from raylt.data.task import Task, build_task
from raylt.machine import cores

if TYPE_CHECKING:
    from actors.remote_experiment import RemoteExperiment
    from raylt.core.fleet.item_progress import ItemsHook
    from raylt.core.round_stats import ProgressHook
    from raylt.core.setup import Setup


@contextmanager
def open_experiment(
    setup: "Setup",
    task: Task,
    folder: Path,
    address: str | None,
    on_message: Callable[..., None] | None = None,
    on_progress: "ProgressHook | None" = None,
    on_items: "ItemsHook | None" = None,
) -> "Iterator[RemoteExperiment]":
    """Start the server actor and client actors of a run, on a new local cluster or the cluster to join.

    Args:
        setup: Configuration, method, model and augmentation.
        task: Data of the experiment.
        folder: The run folder.
        address: Address of the cluster; see `actors.cluster.access.cluster_to_join`.
        on_message: Function that is called with each line for the user, and with `minor=True` if the line is of
            interest only at a terminal.
        on_progress: Function that is called with the progress inside a round.
        on_items: Function that is called with the progress inside items of the server's own work.

    Yields:
        The experiment. Its calls raise `ServerLost` if the server's process has died.

    Raises:
        ConfigError: No cluster answers at the address, or the cluster is too small.
    """
    with session(address) as cluster:
        from actors.remote_experiment import start_experiment

        experiment = start_experiment(setup, task, folder, cluster, on_message or _ignore, on_progress, on_items)
        try:
            yield experiment
        finally:
            # an own cluster ends here, and may not answer: schedulers also send their SIGTERM to Ray's processes
            if not cluster.started:
                experiment.close()


def plan_placement(config: Config, address: str | None, description: str | None) -> PlacementPlan:
    """Return the plan of the actors that `open_experiment` would start, without starting them.

    Args:
        config: Configuration of the run.
        address: Address of the cluster; see `actors.cluster.access.cluster_to_join`.
        description: Description of nodes for `parse_nodes`. If None, the plan is for the cluster that a run would join,
            or for this machine.
    """
    clients = config.data.clients or build_task(config.data).clients
    if description is not None:
        return plan(config, clients, parse_nodes(description))
    if cluster_to_join(address) is None:
        from raylt.core.device import gpus

        return plan(config, clients, [Node(len(cores()), gpus())])
    with session(address):
        import ray

        return plan(config, clients, nodes_of(ray.nodes()))


def _ignore(text: str, minor: bool = False) -> None:
    """Ignore a message."""
