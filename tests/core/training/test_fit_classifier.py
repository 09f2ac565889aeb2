"""Re-training of classifiers on features, and half precision in local training."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from raylt.config import Config, DataConfig
from raylt.core.fleet.client_host import ClientHost
from raylt.core.training.fit_classifier import SoftmaxGradients, cross_entropy, fit_classifier
from raylt.core.training.optimisers import SGD
from raylt.core.training.sgd import sgd
from raylt.data.task import build_task
from raylt.registry import resolve

Z = torch.randn(50, 6, generator=torch.Generator().manual_seed(0))
Y = (Z[:, 0] > 0).long() + 2 * (Z[:, 1] > 0).long()
HOW = {"epochs": 4, "batch": 16, "lr": 0.1, "momentum": 0.9, "weight_decay": 1e-3, "seed": 3}


def new_classifier():
    torch.manual_seed(0)
    return nn.Linear(6, 4)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_closed_gradient_has_the_classifiers_type(dtype):
    ours, reference = new_classifier().to(dtype), new_classifier().to(dtype)
    loss = fit_classifier(ours, Z.to(dtype), Y, **HOW)
    expected = fit_classifier(reference, Z.to(dtype), Y, loss=lambda logits, y: F.cross_entropy(logits, y), **HOW)
    assert torch.equal(ours.weight, reference.weight)
    assert loss == pytest.approx(expected)


def test_labels_that_cross_entropy_ignores_have_no_gradient():
    ours, reference = new_classifier(), new_classifier()
    y = torch.where(torch.arange(50) % 5 == 0, -100, Y)
    fit_classifier(ours, Z, y, **HOW)
    fit_classifier(reference, Z, y, loss=lambda logits, y: F.cross_entropy(logits, y), **HOW)
    assert torch.equal(ours.weight, reference.weight)


def test_a_schedule_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match=r"unknown schedule \(cosine\)\. Give one of epoch, iteration, constant"):
        fit_classifier(new_classifier(), Z, Y, schedule="cosine", **HOW)


@pytest.mark.parametrize("schedule", ["epoch", "iteration", "constant"])
def test_fit_is_that_of_torchs_optimiser_and_schedule(schedule):
    ours, reference = new_classifier(), new_classifier()
    fit_classifier(ours, Z, Y, schedule=schedule, **HOW)
    optimiser = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, T_max=4)
    generator = torch.Generator().manual_seed(3)
    for _ in range(4):
        for rows in torch.randperm(50, generator=generator).split(16):
            optimiser.zero_grad()
            F.cross_entropy(reference(Z[rows]), Y[rows]).backward()
            optimiser.step()
            if schedule == "iteration":
                cosine.step()
        if schedule == "epoch":
            cosine.step()
    assert torch.allclose(ours.weight, reference.weight, atol=1e-6)
    assert torch.allclose(ours.bias, reference.bias, atol=1e-6)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("dim", "classes", "batch"), [(6, 4, 16), (64, 10, 32), (512, 100, 64), (33, 7, 1)])
def test_the_closed_gradient_has_the_bits_of_autograd(dim, classes, batch, bias):
    generator = torch.Generator().manual_seed(1)
    z = torch.randn(150, dim, generator=generator).relu()
    y = torch.randint(classes, (150,), generator=generator)
    fitted = []
    # raylt has closed-form gradients for the first loss only
    for loss in (cross_entropy, lambda logits, y: F.cross_entropy(logits, y)):
        torch.manual_seed(0)
        classifier = nn.Linear(dim, classes, bias=bias)
        last = fit_classifier(classifier, z, y, **HOW | {"batch": batch}, loss=loss)
        fitted.append((last, *(p.tolist() for p in classifier.parameters())))
    assert fitted[0] == fitted[1]


class Doubled(nn.Linear):
    def forward(self, input):
        return 2 * super().forward(input)


@pytest.mark.parametrize("kind", ["another layer", "a hook", "a frozen bias", "soft labels"])
def test_autograd_serves_what_is_no_plain_softmax_regression(kind, monkeypatch):
    monkeypatch.setattr(SoftmaxGradients, "__call__", None)  # a call would fail
    classifier = Doubled(6, 4) if kind == "another layer" else new_classifier()
    before = classifier.bias.clone()
    if kind == "a hook":
        classifier.register_forward_hook(lambda layer, given, made: 2 * made)
    classifier.bias.requires_grad_(kind != "a frozen bias")
    fit_classifier(classifier, Z, F.one_hot(Y, 4).float() if kind == "soft labels" else Y, **HOW)
    assert torch.equal(classifier.bias, before) == (kind == "a frozen bias")


def test_a_plain_softmax_regression_needs_no_autograd(monkeypatch):
    monkeypatch.setattr(SGD, "step", None)
    fit_classifier(new_classifier(), Z, Y, **HOW)


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
        host = ClientHost(setup, task.spec, task.test, torch.device("cpu"))
        result = []

        def train(client, message, method=setup.method, result=result):
            result.append(sgd(client, method.objective(client, message)))
            return client.reply(model=method.shared(client.model))

        reply, _ = host.run(train, {}, 1, 0, task.shards[0], None)
        weights[precision] = reply.tree["model"]["classifier.weight"].clone()
        assert math.isfinite(result[0])
    assert weights["bfloat16"].dtype == torch.float32
    assert not torch.equal(*weights.values())
    assert torch.allclose(*weights.values(), atol=0.05)


def test_without_normalisation_pixels_stay_between_0_and_1():
    task = build_task(DataConfig(normalise=False))
    assert (task.mean, task.std) == ((0.0,), (1.0,))
    assert build_task(DataConfig()).mean != task.mean
