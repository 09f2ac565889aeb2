"""The second half of raylt/core: features aside, what re-trains classifiers; and half precision in the first."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from raylt.config import Config, DataConfig
from raylt.core.fitting import fit_classifier
from raylt.core.host import Host
from raylt.core.training import sgd
from raylt.data.task import build_task
from raylt.registry import resolve

Z = torch.randn(50, 6, generator=torch.Generator().manual_seed(0))
Y = (Z[:, 0] > 0).long() + 2 * (Z[:, 1] > 0).long()
HOW = {"epochs": 4, "batch": 16, "lr": 0.1, "momentum": 0.9, "weight_decay": 1e-3, "seed": 3}


def new_classifier():
    torch.manual_seed(0)
    return nn.Linear(6, 4)


@pytest.mark.parametrize("schedule", ["epoch", "iteration", "constant"])
def test_fit_is_that_of_torchs_optimiser_and_schedule(schedule):
    ours, theirs = new_classifier(), new_classifier()
    fit_classifier(ours, Z, Y, schedule=schedule, **HOW)
    optimiser = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, T_max=4)
    generator = torch.Generator().manual_seed(3)
    for _ in range(4):
        for rows in torch.randperm(50, generator=generator).split(16):
            optimiser.zero_grad()
            F.cross_entropy(theirs(Z[rows]), Y[rows]).backward()
            optimiser.step()
            if schedule == "iteration":
                cosine.step()
        if schedule == "epoch":
            cosine.step()
    assert torch.allclose(ours.weight, theirs.weight, atol=1e-6)
    assert torch.allclose(ours.bias, theirs.bias, atol=1e-6)


def test_fit_lowers_the_loss_and_takes_soft_labels():
    hard, soft = new_classifier(), new_classifier()
    last = fit_classifier(hard, Z, Y, **HOW)
    assert last < F.cross_entropy(new_classifier()(Z), Y).item()
    fit_classifier(soft, Z, F.one_hot(Y, 4).float(), **HOW)
    assert torch.allclose(hard.weight, soft.weight, atol=1e-6)


def test_fit_depends_on_its_seed_alone():
    made = []
    for seed in (3, 3, 4):
        torch.manual_seed(len(made))
        classifier = copy.deepcopy(new_classifier())
        fit_classifier(classifier, Z, Y, **HOW | {"seed": seed})
        made.append(classifier.weight)
    assert torch.equal(made[0], made[1])
    assert not torch.equal(made[0], made[2])


def test_half_precision_trains_float32_weights_close_to_those_of_full_precision():
    weights = {}
    for precision in ("float32", "bfloat16"):
        config = Config(data={"clients": 2}, method={"name": "fedavg"}, local={"epochs": 1, "precision": precision})
        task = build_task(config.data)
        setup = resolve(config)
        host = Host(setup, task.facts, task.test, torch.device("cpu"))
        found = []

        def train(client, message, method=setup.method, found=found):
            found.append(sgd(client, method.objective(client, message)))
            return client.reply(model=method.shared(client.model))

        reply, _ = host.run(train, {}, 1, 0, task.shards[0], None)
        weights[precision] = reply.tree["model"]["classifier.weight"].clone()
        assert math.isfinite(found[0])
    assert weights["bfloat16"].dtype == torch.float32
    assert not torch.equal(*weights.values())
    assert torch.allclose(*weights.values(), atol=0.05)


def test_without_normalisation_pixels_stay_between_0_and_1():
    task = build_task(DataConfig(normalise=False))
    assert (task.mean, task.std) == ((0.0,), (1.0,))
    assert build_task(DataConfig()).mean != task.mean
