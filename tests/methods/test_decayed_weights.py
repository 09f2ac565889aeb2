"""The weight decay of local training acts in every method's first round as SGD says, whatever the loss.

It also acts on the models that clients train for themselves alone.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import QUICK
from torch import Tensor

from raylt.contract.case import Case
from raylt.contract.trace import private_states
from raylt.methods import METHODS

QUICKLY = ("sfd", "fedsm", "apfl", "moon")  # the other methods run with the slow tests
RATE, DECAY = 0.2, 0.1
# methods whose first round is not one plain step of the global model at each client
OTHERWISE = {
    "fedadam": "the server's step has its own length",
    "fedyogi": "the server's step has its own length",
    "fedic": "the server distils the classifier",
    "feddyn": "the server corrects the mean",
    "fednova": "clients are weighted by their numbers of steps",
    "fedproto": "no model is averaged",
    "fedrep": "the classifier learns before the encoder, whose gradient it changes",
    "flea": "clients train on the features of others, in several batches",
    "local": "no model is averaged",
    "mupfl": "dropout follows the activations, and a cluster tunes its classifier",
    "pfedme": "a client takes several steps on a batch",
    "qfedavg": "clients are weighted by their losses",
}

# the private value that is a model after one plain step from the global one, and fields with which it is
OWN: dict[str, tuple[str, dict[str, Any]]] = {
    "apfl": ("own", {"alpha": 1.0, "adaptive": False}),
    "ditto": ("personal", {}),
    "fedala": ("personal", {}),
    "pfedme": ("personal", {"steps": 1}),
}


def after_one_round(case: Case, decay: float) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the global model's parameters before and after a round in which each client takes one step."""
    local = {"batch": 1000, "lr": RATE, "epochs": 1, "momentum": 0.0, "weight_decay": decay}
    experiment = case.experiment(case.config(local=local))
    parameters = dict(experiment.server.model.named_parameters())
    before = {name: value.detach().clone() for name, value in parameters.items()}
    experiment.step()
    return before, {name: value.detach() for name, value in experiment.server.model.named_parameters()}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in QUICKLY else pytest.mark.slow)
        for name in METHODS
        if name not in OTHERWISE
    ],
)
def test_the_first_step_takes_a_share_of_every_weight_that_is_averaged(name, tmp_path: Path):
    method = METHODS[name](**QUICK.get(name, {}))
    case = Case(method, method.problems[0], tmp_path)
    before, plain = after_one_round(case, 0.0)
    _, decayed = after_one_round(case, DECAY)
    sizes = [len(shard) for shard in case.task.shards]
    trained = sum(size for size in sizes if size > 1) / sum(sizes)  # a client with one sample takes no step
    averaged = [key for key in before if not torch.equal(plain[key], before[key]) and before[key].any()]
    assert averaged
    for key in averaged:
        torch.testing.assert_close(
            decayed[key] - plain[key], -RATE * DECAY * trained * before[key], atol=2e-6, rtol=1e-3
        )


@pytest.mark.parametrize("name", OWN)
def test_the_first_step_takes_a_share_of_every_weight_of_a_client_s_own_model(name, tmp_path: Path):
    key, fields = OWN[name]
    ends = []
    for decay in (0.0, DECAY):
        case = Case(METHODS[name](**fields), "classification", tmp_path)
        local = {"batch": 1000, "lr": RATE, "epochs": 1, "momentum": 0.0, "weight_decay": decay}
        experiment = case.experiment(case.config(local=local))
        start = {name: p.detach().clone() for name, p in experiment.server.model.named_parameters()}
        experiment.step()
        ends.append(private_states(experiment)[0]["state"][key])
    plain, decayed = ends
    for name, before in start.items():
        torch.testing.assert_close(decayed[name] - plain[name], -RATE * DECAY * before, atol=2e-6, rtol=1e-3)
