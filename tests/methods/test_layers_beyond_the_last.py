"""A phase after the last round that re-trains the classifier changes no other layer, at the server and at no client."""

from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import QUICK
from torch import Tensor

from raylt.contract.case import Case
from raylt.core.experiment import Experiment
from raylt.methods import METHODS

QUICKLY = ("bpfed", "fednpc", "fedrep")  # the other methods run with the slow tests
# methods whose last phase trains whole models
WHOLE = {
    "fedbabu": "fine-tunes whole models unless `tune` names a part",
    "fedetf": "trains once more as in a round, before the frame",
}
PHASED = [name for name, kind in METHODS.items() if kind(**QUICK.get(name, {})).finishes and name not in WHOLE]


def entries(experiment: Experiment) -> dict[str, Tensor]:
    """Return all entries of the global model and of the clients' private states, by place and name."""
    server, method = experiment.server, experiment.method
    found: dict[str, Any] = {f"server/{name}": value for name, value in server.model.state_dict().items()}
    found |= {f"global/{name}": value for name, value in method.global_model(server).state_dict().items()}
    for id, private in experiment.fleet.private_states(experiment.fleet.ids):
        found |= flat(private, f"client {id}/")
    return {place: value.clone() for place, value in found.items()}


def flat(tree: dict[str, Any], start: str) -> dict[str, Any]:
    """Return the leaves of a nested mapping by their path."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        leaves |= (
            flat(value, f"{start}{key}/") if isinstance(value, dict) else {f"{start}{key}": torch.as_tensor(value)}
        )
    return leaves


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICKLY else pytest.mark.slow) for name in PHASED]
)
def test_the_last_phase_changes_the_classifier_alone(name, tmp_path: Path):
    method = METHODS[name](**QUICK.get(name, {}))
    case = Case(method, method.problems[0], tmp_path)
    experiment = case.experiment(case.config())
    for _ in range(case.config().federation.rounds):
        experiment.step()
    before = entries(experiment)
    experiment.step()
    after = entries(experiment)
    changed = {place for place in after if place not in before or not torch.equal(before[place], after[place])}
    # `personal` of FedAFA are the layers above its cut, by default the classifier alone
    classifiers = {place for place in changed if "classifier." in place or "/personal/1." in place}
    assert classifiers
    assert changed == classifiers
