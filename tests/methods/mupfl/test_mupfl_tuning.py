from dataclasses import replace

import numpy as np
import pytest
import torch
from mupfl_runs import QUICK, ends_of, initial, open_client, replies_of, run
from tiny import fingerprint
from torch import nn
from torch.nn import functional as F

from raylt.core.training.features import features
from raylt.data.task import Shard
from raylt.methods.mupfl.method import MuPFL
from raylt.methods.mupfl.pkcf import tune
from raylt.ops.matching import class_gradients, match_features, mean_gradients
from raylt.seeds import seed_for


def test_features_are_matched_to_the_mean_gradients_of_those_who_own_a_class(tiny_task, tmp_path):  # Eq. 16-20
    experiment, (report,) = run(tiny_task, tmp_path, until=1)
    gradients = []
    for id, reply in replies_of(experiment).items():
        client = open_client(tiny_task, id)
        client.model.load_state_dict(ends_of(experiment, initial(tiny_task))[id])
        z, y = features(client)
        head, found = client.model.classifier, {}
        for c in y.unique().tolist():
            weight, bias = torch.autograd.grad(F.cross_entropy(head(z[y == c]), y[y == c]), [head.weight, head.bias])
            found[c] = torch.cat([weight, bias[:, None]], 1)
            assert torch.allclose(reply["gradients"][c], found[c], atol=1e-5)
        assert reply["gradients"].keys() == found.keys()
        gradients.append(reply["gradients"])
    generator = torch.Generator().manual_seed(seed_for(0, "server", "features", 0))
    start = torch.randn(4, 5, 64, generator=generator)
    classes, targets = mean_gradients(gradients)
    h, cosine = match_features(start, classes, targets, experiment.server.model.classifier, steps=3, lr=100.0)
    assert torch.allclose(experiment.server.state["features"], h, atol=1e-4)
    assert report.figures["cosine"] == pytest.approx(cosine.mean().item(), abs=1e-4)


def test_class_that_no_participant_owns_keeps_its_features_and_tunes_nothing(tiny_task, tmp_path):
    shards = tuple(Shard(shard.x[shard.y != 3], shard.y[shard.y != 3]) for shard in tiny_task.shards)
    task = replace(tiny_task, shards=shards, client_counts=np.stack([np.bincount(s.y, minlength=4) for s in shards]))
    experiment, _ = run(task, tmp_path, until=1)
    state = experiment.server.state
    start = torch.randn(4, 5, 64, generator=torch.Generator().manual_seed(seed_for(0, "server", "features", 0)))
    assert state["known"].tolist() == [True, True, True, False]
    assert torch.equal(state["features"][3], start[3])
    assert not torch.equal(state["features"][0], start[0])
    experiment.step()  # round 2 tunes on three classes
    client = open_client(task, 0)
    given = []

    class Given(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, z):
            given.append(z.detach())
            return self.inner(z)

    client.model.classifier = Given(client.model.classifier)
    tune(client, state["features"], state["known"], epochs=2)
    seen = {tuple(row.tolist()) for row in torch.cat(given)}
    assert seen == {tuple(row.tolist()) for row in state["features"][:3].flatten(0, 1)}


@pytest.mark.parametrize("decay", [0.0, 0.2])
@pytest.mark.parametrize("view", [None, [0, 3, 2, 3]], ids=["all", "as-the-client-sees-them"])
def test_classifier_is_tuned_by_sgd_on_all_pairs(tiny_task, view, decay):  # Eq. 21
    client = open_client(tiny_task, local={"weight_decay": decay})
    client.samples.view = None if view is None else torch.tensor(view)
    h = torch.randn(4, 5, 64, generator=torch.Generator().manual_seed(0))
    params = [p.detach().clone().requires_grad_() for p in client.model.classifier.parameters()]
    z, y, velocity = h.flatten(0, 1), torch.tensor(view or [0, 1, 2, 3]).repeat_interleave(5), [0.0, 0.0]
    order = torch.Generator().manual_seed(seed_for(0, "tune", 1, 0))
    for _ in range(3):
        for rows in torch.randperm(20, generator=order).split(8):
            grads = torch.autograd.grad(F.cross_entropy(F.linear(z[rows], *params), y[rows]), params)
            velocity = [0.9 * v + g + decay * p for v, g, p in zip(velocity, grads, params, strict=True)]
            params = [(p - 0.05 * v).detach().requires_grad_() for p, v in zip(params, velocity, strict=True)]
    before = fingerprint(client.model.encoder.state_dict())
    tune(client, h, torch.ones(4, dtype=torch.bool), epochs=3)
    assert torch.allclose(client.model.classifier.weight, params[0], atol=1e-6)
    assert torch.allclose(client.model.classifier.bias, params[1], atol=1e-6)
    assert fingerprint(client.model.encoder.state_dict()) == before


@pytest.mark.slow
@pytest.mark.parametrize("updates", ["received", "tuned"])
def test_update_starts_before_or_after_the_tuning(tiny_task, tmp_path, updates):
    experiment, _ = run(
        tiny_task, tmp_path, MuPFL(m=5, tau=200, matching_steps=3, updates=updates), local={"epochs": 1, "batch": 8}
    )
    reply = replies_of(experiment, round=2)[3]  # the client with one sample is changed by tuning alone
    still = all((value == 0).all() for value in reply["update"].values())
    assert still == (updates == "tuned")
    before = ends_of(experiment, initial(tiny_task))[3]["classifier.weight"]
    assert torch.equal(reply["start"]["classifier.weight"], before) == (updates == "received")


@pytest.mark.slow
def test_gradients_can_be_those_of_the_model_received(tiny_task, tmp_path):
    experiment, _ = run(tiny_task, tmp_path, MuPFL(**QUICK, gradients="global"), until=1)
    client = open_client(tiny_task, 0)
    client.model.load_state_dict(initial(tiny_task))
    expected = class_gradients(*features(client), client.model.classifier)
    found = replies_of(experiment)[0]["gradients"]
    assert all(torch.allclose(found[c], expected[c], atol=1e-6) for c in expected)
    assert found.keys() == expected.keys()
