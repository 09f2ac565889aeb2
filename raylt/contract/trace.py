"""What a run leaves behind, as bits that can be compared."""

from dataclasses import dataclass

from torch import Tensor

from raylt import tree
from raylt.core.checkpoint import hash_tensors
from raylt.core.experiment import Experiment
from raylt.core.report import Report
from raylt.tree import Tree


@dataclass(frozen=True)
class Trace:
    """A finished run.

    Attributes:
        bits: of each client's private state, the server's state and the model, by name.
    """

    experiment: Experiment
    reports: list[Report]
    bits: dict[str, str]


def fingerprint(parts: Tree) -> str:
    """Equal for two trees if and only if they have the same names and the same bits."""
    leaves = list(tree.leaves(parts))
    tensors = {path: leaf for path, leaf in leaves if isinstance(leaf, Tensor)}
    return hash_tensors(tensors) + repr(sorted((path, leaf) for path, leaf in leaves if path not in tensors))


def private_states(experiment: Experiment) -> dict[int, Tree]:
    """Of every client that was ever called, by id."""
    fleet = experiment.fleet
    return dict(fleet.private_states(sorted(fleet._private)))


def finish(experiment: Experiment, reports: list[Report] | None = None) -> Trace:
    """Takes the steps that are left.

    Args:
        reports: of the steps before.
    """
    reports = reports or []
    while not experiment.done:
        reports.append(experiment.step())
    states = {f"client {id}": fingerprint(state) for id, state in private_states(experiment).items()}
    return Trace(experiment, reports, states | experiment.conclude() | {
        "server": fingerprint(experiment.server.state)})
