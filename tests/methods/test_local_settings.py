"""Settings of local training act in every method, in loops of its own as well: the precision, the number of steps and
the optimiser.

A loop that leaves one out would give other results than the setting says, without failing any other check. Learning
rates and weight decay have modules of their own.
"""

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from small_runs import QUICK
from torch import nn

from raylt.contract.case import Case
from raylt.contract.trace import fingerprint, private_states
from raylt.core.fleet.client_host import ClientHost
from raylt.methods import METHODS

# methods with loops of their own; the other methods train by `sgd` alone and run with the slow tests
QUICKLY = ("fedavg", "apfl", "fedafa", "fedala", "fedetf", "pfedme")
# FedAFA trains a layer with a convolution only above this cut
FIELDS: dict[str, dict[str, Any]] = {"fedafa": {"cut": "stage1"}}
# the private value that is a model after one step from the global one, and fields with which it is
OWN: dict[str, tuple[str, dict[str, Any]]] = {
    "apfl": ("own", {"alpha": 1.0, "adaptive": False}),
    "ditto": ("personal", {}),
    "fedala": ("personal", {}),
    "pfedme": ("personal", {"steps": 1}),
}


def marked(*names: str) -> list[Any]:
    return [pytest.param(name, marks=() if name in QUICKLY else pytest.mark.slow) for name in names]


def case_of(name: str, folder: Path, **fields: Any) -> Case:
    method = METHODS[name](**QUICK.get(name, {}) | FIELDS.get(name, {}) | fields)
    return Case(method, method.problems[0], folder)


def client_function(frame: FrameType | None) -> str | None:
    """Return the name of the function that a client host is running, or None outside of a client's call."""
    names = []
    while frame is not None:
        names.append(frame.f_code.co_name)
        if "self" in frame.f_locals and isinstance(frame.f_locals["self"], ClientHost):
            return names[-2] if len(names) > 1 else None
        frame = frame.f_back
    return None


@pytest.mark.parametrize("name", marked(*(name for name, kind in METHODS.items() if not kind.learns_prompts)))
def test_clients_train_in_the_precision_of_the_setting(name, tmp_path: Path, monkeypatch):
    case = case_of(name, tmp_path)
    forward = nn.Conv2d.forward
    trained: set[tuple[str, bool]] = set()

    def watched(self, x):
        function = client_function(sys._getframe())
        if self.training and function is not None:
            trained.add((function, torch.is_autocast_enabled("cpu")))
        return forward(self, x)

    monkeypatch.setattr(nn.Conv2d, "forward", watched)
    case.run(case.config(local={"batch": 8, "precision": "bfloat16"}))
    assert trained
    assert {function for function, in_bfloat16 in trained if not in_bfloat16} == set()


@pytest.mark.parametrize("name", marked(*METHODS))
def test_a_round_of_some_steps_is_one_of_as_many_epochs(name, tmp_path: Path, monkeypatch):
    """Client 0 has 24 samples, 3 batches, so 6 steps are 2 epochs. Other settings of epochs have no effect then."""
    monkeypatch.setattr(METHODS[name], "sample", lambda self, server, fleet: [0])
    case, ends = case_of(name, tmp_path), []
    for local in ({"epochs": 2}, {"epochs": 1, "steps": 6}, {"epochs": 1}):
        experiment = case.experiment(case.config(local={"batch": 8, **local}))
        experiment.step()
        server = experiment.server
        state = {"model": server.model.state_dict(), "clients": private_states(experiment)}
        ends.append(fingerprint(state | {"server": server.state}))
    epochs, steps, fewer = ends
    assert steps == epochs
    assert steps != fewer


@pytest.mark.parametrize("name", OWN)
def test_a_client_s_own_model_is_trained_by_the_optimiser_of_the_setting(name, tmp_path: Path):
    """Adam's first step changes every weight that has a gradient by the learning rate."""
    key, fields = OWN[name]
    case = case_of(name, tmp_path, **fields)
    experiment = case.experiment(case.config(local={"batch": 1000, "epochs": 1, "lr": 0.01, "optimiser": "adam"}))
    before = {name: p.detach().clone() for name, p in experiment.server.model.named_parameters()}
    experiment.step()
    own = private_states(experiment)[0]["state"][key]
    for name, value in before.items():
        assert (own[name] - value).abs().max().item() == pytest.approx(0.01, rel=1e-3), name
