"""Every method runs with a part of the encoder frozen, and changes no frozen weight, neither at the server nor in the
models of clients.

A method that lists a model's parameters itself may forget that some are frozen.
"""

from pathlib import Path

import pytest
import torch
from small_runs import QUICK
from torch import nn

from raylt.contract.case import Case
from raylt.methods import METHODS
from raylt.models.trainable import frozen_entries

# methods that list parameters themselves; the other methods run with the slow tests
QUICKLY = ("apfl", "fedala", "feddyn", "fedetf", "mupfl", "pfedme", "qfedavg", "scaffold")
# FedALA mixes the classifier alone by default
FIELDS = {"fedala": {"scope": "all"}}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in QUICKLY else pytest.mark.slow)
        for name, kind in METHODS.items()
        if not kind.learns_prompts  # whose encoder is always frozen
    ],
)
def test_frozen_weights_stay_as_they_are(name, tmp_path: Path, monkeypatch):
    kind = METHODS[name]
    method = kind(**QUICK.get(name, {}) | FIELDS.get(name, {}))
    case = Case(method, kind.problems[0], tmp_path, "norm")
    experiment = case.experiment(case.config(0.5, federation={"rounds": 3}, evaluation={"personal": 1}))
    frozen = {entry: value.clone() for entry, value in frozen_entries(experiment.server.model).items()}
    assert frozen
    models: list[nn.Module] = []
    client_model = kind.client_model

    def watched(self, client):
        models.append(client_model(self, client))
        return models[-1]

    monkeypatch.setattr(kind, "client_model", watched)
    while not experiment.done:
        report = experiment.step()
        assert report.lost == []
        assert report.rejected == {}
    assert bool(models) == method.personal
    for model in (experiment.server.model, method.global_model(experiment.server), *models):
        entries = frozen_entries(model)
        assert all(torch.equal(entries[entry], value) for entry, value in frozen.items())
