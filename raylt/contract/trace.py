"""The result of a finished run as hashes that can be compared."""

from dataclasses import dataclass

from torch import Tensor

from raylt import tree
from raylt.core.checkpoint.checkpoint import hash_tensors
from raylt.core.experiment import Experiment
from raylt.core.report import RoundReport
from raylt.tree import Tree


@dataclass(frozen=True)
class Trace:
    """The result of a finished run: its experiment, reports and hashes.

    Attributes:
        experiment: The experiment after its last step.
        reports: Reports of all steps.
        bits: Hashes of each client's private state, the server's state and the model, by name.
    """

    experiment: Experiment
    reports: list[RoundReport]
    bits: dict[str, str]


def fingerprint(parts: Tree) -> str:
    """Return a text that is equal for two trees if and only if their names and their bits are equal."""
    leaves = list(tree.leaves(parts))
    tensors = {path: leaf for path, leaf in leaves if isinstance(leaf, Tensor)}
    return hash_tensors(tensors) + repr(sorted((path, leaf) for path, leaf in leaves if path not in tensors))


def private_states(experiment: Experiment) -> dict[int, Tree]:
    """Return the private state of every client that was called at least once, by client id."""
    fleet = experiment.fleet
    return dict(fleet.private_states(sorted(fleet._private)))


def finish(experiment: Experiment, reports: list[RoundReport] | None = None) -> Trace:
    """Run the remaining steps of an experiment and return the result.

    Args:
        experiment: The experiment.
        reports: Reports of the steps so far.
    """
    reports = reports or []
    while not experiment.done:
        reports.append(experiment.step())
    states = {f"client {id}": fingerprint(state) for id, state in private_states(experiment).items()}
    return Trace(
        experiment, reports, states | experiment.export_model() | {"server": fingerprint(experiment.server.state)}
    )
