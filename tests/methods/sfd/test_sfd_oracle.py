"""Whole runs of SFD against code that follows the paper's equations from pooled data (methods.md, section 2)."""

import math
from functools import partial

import naive
import pytest
import torch
from tiny import configure, make_experiment
from torch import Tensor, nn
from torch.nn import functional as F

from raylt.data.augment import resized_crop_flip
from raylt.methods import make_method
from raylt.methods.sfd.method import SFD

ROUNDS = 2
# A bank and a kernel with which every term of the synthesis moves features by at least 0.01 (with the paper's values
# they hardly move), and re-training in several batches.
QUICK = {
    "rf_dim": 40,
    "m_min": 70,
    "m_max": 90,
    "synthesis_steps": 3,
    "synthesis_lr": 300.0,
    "retrain_epochs": 3,
    "retrain_batch": 100,
    "retrain_lr": 0.1,
    "retrain_weight_decay": 0.05,
    "beta1": 1.0,
    "gamma": 0.5,
    "gamma_rbf": 0.5,
}


# local training, Eq. 5-8 and 28


def projected(model) -> None:
    model.classifier.register_parameter("bias", None)
    model.add_module(
        "projector", nn.Sequential(nn.Linear(64, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 128))
    )


def plain(model) -> None:
    model.classifier.register_parameter("bias", None)


def adaptive_cross_entropy(method: SFD, logits: Tensor, y: Tensor, counts: list[int]) -> Tensor:
    """Compute Eq. 5 and 6 sample by sample."""
    total, least = 0.0, min(n for n in counts if n)
    pi = torch.tensor([n if n or method.abbl == "la" else method.beta_pi * least for n in counts], dtype=torch.float64)
    factor = torch.ones(4) if method.abbl == "ce" else pi**method.gamma
    for f, label in zip(logits.double(), y.tolist(), strict=True):
        mass = f.exp() * factor
        total = total - (mass[label] / mass.sum()).log()
    return total / len(y)


def contrastive(method: SFD, h: Tensor, y: Tensor, counts: list[int]) -> Tensor:
    """Compute Eq. 7 anchor by anchor."""
    total, anchors, n = 0.0, 0, torch.tensor(counts).double()[y]
    for i in range(len(y)):
        similar = (h @ h[i] / method.tau).double()
        others = torch.arange(len(y)) != i
        raised = n if method.delta == "all" else torch.where(y == y[i], 1.0, n) if method.delta == "negatives" else 1.0
        repulsion = (similar.exp() * raised)[others].sum().log()
        positives = (y == y[i]) & (others | method.scl_self)
        if positives.any():
            anchors += 1
            total = total + repulsion - similar[positives].mean()
    return total / max(anchors, 1)


def after_round(method: SFD, model, task, t: int) -> naive.Entries:
    """Return the global model after round t, from the one before."""
    beta = method.beta1 * 0.5 * (1 + math.cos(math.pi * (t - 1) / ROUNDS))
    start, ends, weights = naive.entries(model), [], []
    for id in naive.clients_of(task):
        x, y = naive.client_data(task, id)
        counts = [int((y == c).sum()) for c in range(4)]
        model.load_state_dict(start)

        def loss(rows, x=x, y=y, counts=counts):
            z = model.encoder(x[rows])
            value = adaptive_cross_entropy(method, z @ model.classifier.weight.T, y[rows], counts)
            if method.abbl != "full":
                return value
            h = model.projector(z)
            return value + beta * contrastive(method, h / h.norm(dim=1, keepdim=True), y[rows], counts)

        naive.train(model, naive.epochs_of(len(y), naive.generator("order", "train", t, id), 1), loss)
        ends.append(naive.entries(model))
        batches = sum(len(rows) > 1 for rows in torch.arange(len(y)).split(naive.BATCH))
        weights.append(len(y) if method.weighting == "samples" else max(1, batches))
    return naive.average(ends, weights)


# statistics, synthesis and re-training, Eq. 9-17


def frequencies(method: SFD) -> Tensor:
    """Draw the rows of Omega for the kernel exp(-gamma ||u - v||^2), [D/2, d]."""
    draw, scale = naive.generator("server", "fourier", ROUNDS + 1), math.sqrt(2 * method.gamma_rbf)
    if method.rf_type == "iid":
        return scale * torch.randn(method.rf_dim // 2, 64, generator=draw).double()
    q, r = torch.linalg.qr(torch.randn(64, 64, generator=draw, dtype=torch.float64))
    q = torch.stack([q[:, j] * math.copysign(1, r[j, j]) for j in range(64)], 1)
    lengths = torch.randn(64, 64, generator=draw, dtype=torch.float64).norm(dim=1)
    return scale * (lengths[:, None] * q)[: method.rf_dim // 2]


def phi(z: Tensor, omega: Tensor) -> Tensor:
    waves = z.double() @ omega.T
    return math.sqrt(2 / (2 * len(omega))) * torch.cat([waves.cos(), waves.sin()], 1)


def pooled_features(method: SFD, model, task) -> tuple[Tensor, Tensor]:
    found = []
    for id in naive.clients_of(task):
        x, y = torch.from_numpy(task.shards[id].x), torch.from_numpy(task.shards[id].y)
        if method.statistics_area < 1:
            crop = partial(resized_crop_flip, least=method.statistics_area)
            x = crop(x, y, naive.generator("noise", "statistics", ROUNDS + 1, id))[0]
        found.append((naive.features(model, naive.pixels(x)), y))
    return torch.cat([z for z, _ in found]), torch.cat([y for _, y in found])


def synthetic(method: SFD, own: Tensor, size: int, omega: Tensor, c: int) -> Tensor:
    """Run Algorithm 1 by autograd for one class, given its real features."""
    mean = own.double().mean(0)
    cov = (own.double() - mean).T @ (own.double() - mean) / len(own)
    factor, target = torch.linalg.cholesky(cov + 1e-5 * torch.eye(64)), phi(own, omega).mean(0)
    bank = naive.seed_for(naive.seed_for(0, "server", "bank", ROUNDS + 1), c)
    raw = torch.randn(size, 64, generator=torch.Generator().manual_seed(bank)).double()
    if method.bank_start != "noise":
        raw = raw * (cov.trace() / 64 + 1e-5).sqrt() + (mean if method.bank_start == "mean" else 0)
    raw.requires_grad_()

    def aligned() -> Tensor:
        if not method.aligner:
            return raw
        away = raw - raw.mean(0)
        own_factor = torch.linalg.cholesky(away.T @ away / (size - 1) + 1e-6 * torch.eye(64))
        return away @ (factor @ torch.linalg.inv(own_factor)).T + mean

    velocity = torch.zeros_like(raw)
    for t in range(method.synthesis_steps if method.mmd or method.arr else 0):
        z, loss = aligned(), torch.zeros(())
        if method.mmd:
            loss = loss + (target - phi(z, omega).mean(0)).abs().sum()
        if method.arr:
            loss = loss + F.relu(-z).sum(1).mean()
        velocity = method.synthesis_momentum * velocity + torch.autograd.grad(loss, raw)[0]
        of_each = size if method.synthesis_per == "sample" else 1
        rate = of_each * method.synthesis_lr * 0.5 * (1 + math.cos(math.pi * t / method.synthesis_steps))
        raw = (raw - rate * velocity).detach().requires_grad_()
    return aligned().detach().float()


def after_finish(method: SFD, model, task) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Return the banks by class, and the classifier's weights and biases."""
    z, y = pooled_features(method, model, task)
    omega, counts = frequencies(method), torch.bincount(y).tolist()
    ranks = sorted(set(counts))
    made, labels = {}, []
    for c in sorted(range(4), key=lambda c: (counts[c], c)):
        share = ranks.index(counts[c]) / (len(ranks) - 1)  # share 0: the smallest class gets the largest bank
        size = round(method.m_max + share * (method.m_min - method.m_max))
        made[str(c)] = synthetic(method, z[y == c], size, omega, c)
        labels += size * [c]
    z, y = torch.cat(list(made.values())), torch.tensor(labels)
    weight = model.classifier.weight.detach().clone().requires_grad_()
    bound = 1 / math.sqrt(64) if method.bias == "random" else 0.0
    bias = torch.empty(4).uniform_(-bound, bound, generator=naive.generator("server", "bias", ROUNDS + 1))
    bias.requires_grad_()
    order, velocity, step = naive.generator("server", "retrain", ROUNDS + 1), [0.0, 0.0], 0
    for epoch in range(method.retrain_epochs):
        for rows in torch.randperm(len(z), generator=order).split(method.retrain_batch):
            passed = epoch if method.retrain_schedule == "epoch" else step
            rate = method.retrain_lr * 0.5 * (1 + math.cos(math.pi * passed / method.retrain_epochs))
            gradients = torch.autograd.grad(F.cross_entropy(z[rows] @ weight.T + bias, y[rows]), [weight, bias])
            with torch.no_grad():
                for i, p in enumerate((weight, bias)):
                    velocity[i] = method.retrain_momentum * velocity[i] + gradients[i] + method.retrain_weight_decay * p
                    p -= rate * velocity[i]
            step += 1
    return made, weight.detach(), bias.detach()


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"abbl": "ce"},
        {"abbl": "la"},
        {"beta_pi": 0.0},
        {"beta_pi": 0.5, "gamma": 1.0},
        {"tau": 0.3},
        {"beta1": 0.1, "delta": "negatives"},
        {"delta": "none", "scl_self": False},
        {"weighting": "batches"},
    ],
    ids=str,
)
def test_rounds_are_those_of_equations_5_to_8_written_out(tiny_task, tmp_path, fields):
    method = make_method({"name": "sfd"} | QUICK | fields)
    experiment = make_experiment(configure(local={"epochs": 1}), tiny_task, tmp_path, method)
    model = naive.new_model(tiny_task, projected if method.abbl == "full" else plain)
    for t in range(1, ROUNDS + 1):
        expected = after_round(method, model, tiny_task, t)
        experiment.step()
        model.load_state_dict(experiment.server.model.state_dict())
        # the tolerance allows for BatchNorm over 8 images in float32
        assert naive.differences(naive.entries(model), expected, 5e-4) == {}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"aligner": False, "synthesis_lr": 3.0},
        {"aligner": False, "bank_start": "mean", "synthesis_steps": 1},
        {"aligner": False, "bank_start": "scaled", "synthesis_steps": 1},
        {"mmd": False},
        {"arr": False},
        {"rf_type": "iid", "gamma_rbf": 0.8},
        {"bias": "random"},
        {"retrain_schedule": "iteration"},
        {"retrain_momentum": 0.0, "retrain_weight_decay": 0.0},
        {"synthesis_momentum": 0.0},
        {"synthesis_per": "sample", "synthesis_lr": 3.0},
        {"preset": "official", "statistics_area": 0.5},
    ],
    ids=str,
)
def test_finish_is_that_of_algorithms_1_and_2_from_pooled_features(tiny_task, tmp_path, fields):
    method = make_method({"name": "sfd", "abbl": "ce"} | QUICK | fields)
    experiment = make_experiment(configure(local={"epochs": 1}), tiny_task, tmp_path, method)
    while not experiment.done:
        experiment.step()
    model = naive.new_model(tiny_task, plain)
    model.load_state_dict(experiment.server.model.state_dict())
    judged = experiment.method.global_model(experiment.server).state_dict()
    banks, weight, bias = after_finish(method, model, tiny_task)
    kept = experiment.server.state["synthetic"]
    assert naive.differences({str(c): kept["z"][kept["y"] == c] for c in range(4)}, banks) == {}
    theirs = {"classifier.weight": weight, "classifier.bias": bias}
    assert naive.differences({name: judged[name] for name in theirs}, theirs) == {}
    assert not torch.allclose(weight, model.classifier.weight, atol=0.02)
