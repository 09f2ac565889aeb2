"""Whole runs of BPFed against code that follows the paper's equations from pooled data (methods.md, section 5)."""

import math

import naive
import numpy as np
import pytest
import torch
from tiny import configure, make_experiment, private_states
from torch import Tensor, nn

from raylt.methods.bpfed.method import BPFed
from raylt.ops.moments import unpack
from raylt.seeds import seed_for, seeded

ROUNDS = 2
# re-training that moves a classifier, with a smaller last batch
QUICK = {"retrain_epochs": 3, "retrain_batch": 7, "retrain_lr": 0.1, "retrain_weight_decay": 0.02}
STAGE_2 = [
    {},
    {"fa": False},
    {"cov_weight": "n-1"},
    {"loss": "ls_all"},
    {"loss": "ce"},
    {"delta": 0.3, "gamma": 1.5},
    {"softmax": "owned"},
    {"loss": "ce", "softmax": "owned"},
    {"crt": False},
    {"lws": False},
    {"restart": True},
    {"fa": False, "retrain_momentum": 0.0, "retrain_weight_decay": 0.0},
]


# stage 1, Eq. 7-11 and Algorithm 1


def mixed(method: BPFed, x: Tensor, y: Tensor, t: int, id: int):
    """Yield the batches of a client's round: images and soft labels."""
    n, one_hot = len(y), torch.eye(4)[y]
    rng = np.random.default_rng(seed_for(0, "mixup", t, id))
    i, j = (torch.from_numpy(places) for places in rng.integers(n, size=(2, n)))
    lam = torch.from_numpy(rng.beta(method.alpha, method.alpha, n)).float() if method.alpha else None
    for rows in naive.epochs_of(n, naive.generator("order", "train", t, id)):
        if method.alpha == 0:
            yield x[rows], one_hot[rows]
            continue
        if method.mixup == "round":
            first, second, part = i[rows], j[rows], lam[rows]
        else:
            first, second = rows, rows[torch.from_numpy(rng.permutation(len(rows)))]
            part = torch.full((len(rows),), rng.beta(method.alpha, method.alpha)).float()
        yield (
            torch.stack([p * x[a] + (1 - p) * x[b] for p, a, b in zip(part, first, second, strict=True)]),
            torch.stack([p * one_hot[a] + (1 - p) * one_hot[b] for p, a, b in zip(part, first, second, strict=True)]),
        )


def own_classifiers(method: BPFed, task) -> dict[int, naive.Entries]:
    common = naive.entries(naive.new_model(task).classifier)
    drawn = {}
    for id in naive.clients_of(task):
        with seeded(0, "join", 0, id):
            drawn[id] = naive.entries(nn.Linear(64, 4)) if method.initial == "own" else common
    return drawn


def after_stage_1(method: BPFed, task) -> tuple[naive.Entries, dict[int, naive.Entries]]:
    """Return the encoder and the clients' classifiers."""
    model, own = naive.new_model(task), own_classifiers(method, task)
    encoder = naive.entries(model.encoder)
    for t in range(1, ROUNDS + 1):
        ends, sizes = [], []
        for id in naive.clients_of(task):
            x, y = naive.client_data(task, id)
            model.encoder.load_state_dict(encoder)
            model.classifier.load_state_dict(own[id])
            naive.train(
                model,
                mixed(method, x, y, t, id),
                lambda batch: -(batch[1] * model(batch[0]).log_softmax(1)).sum(1).mean(),
            )
            ends.append(naive.entries(model.encoder))
            own[id] = naive.entries(model.classifier)
            sizes.append(len(y))
        encoder = naive.average(ends, sizes)
    return encoder, own


@pytest.mark.parametrize(
    "fields", [{}, {"alpha": 0}, {"alpha": 0.3, "initial": "common"}, {"mixup": "batch", "alpha": 0.3}], ids=str
)
def test_stage_1_is_that_of_equations_7_to_11_written_out(tiny_task, tmp_path, fields):
    method = BPFed(**fields)
    experiment = make_experiment(configure(), tiny_task, tmp_path, method)
    for _ in range(ROUNDS):
        experiment.step()
    encoder, own = after_stage_1(method, tiny_task)
    assert naive.differences(experiment.server.model.encoder.state_dict(), encoder, 5e-4) == {}
    for id, state in private_states(experiment).items():
        found = {name.removeprefix("classifier."): value for name, value in state["model"].items()}
        assert naive.differences(found, own[id], 5e-4) == {}, id


# stage 2, Eq. 12-20 and Algorithm 2


def covariance(method: BPFed, z: dict[int, Tensor], y: dict[int, Tensor]) -> Tensor:
    """Compute M_glo of Eq. 16 from each client's M_k of Eq. 12-15."""
    top, bottom = torch.zeros(64, 64, dtype=torch.float64), 0
    for id in z:
        for c in range(4):
            own = z[id][y[id] == c].double()
            weight = len(own) if method.cov_weight == "n" else max(len(own) - 1, 0)
            top += weight * torch.cov(own.T) if len(own) > 1 else 0
            bottom += weight
    return top / bottom


def balanced(z: Tensor, y: Tensor, m_glo: Tensor, order: torch.Generator) -> tuple[Tensor, Tensor]:
    """Perturb copies as in Eq. 17, cycling through the samples of each class, until every class has the largest
    size."""
    values, vectors = np.linalg.eigh(m_glo.double().numpy())
    root = torch.from_numpy(vectors * np.sqrt(np.maximum(values, 0)))
    counts = torch.bincount(y, minlength=4).tolist()
    base = [
        torch.nonzero(y == c).flatten()[i % n].item() for c, n in enumerate(counts) if n for i in range(max(counts) - n)
    ]
    if not base:
        return z, y
    noise = torch.randn(len(base), 64, generator=order, dtype=torch.float64) @ root.T
    return torch.cat([z, (z[base] + noise).float()]), torch.cat([y, y[base]])


def smoothed_loss(method: BPFed, logits: Tensor, y: Tensor, counts: list[int]) -> Tensor:
    """Compute Eq. 18-20 sample by sample."""
    owned = [c for c in range(4) if counts[c]]
    over = owned if method.softmax == "owned" and method.loss != "ls_all" else list(range(4))
    total = 0.0
    for row, c in zip(logits, y.tolist(), strict=True):
        log_p = row - row[over].logsumexp(0)
        others = [j for j in (range(4) if method.loss == "ls_all" else owned) if j != c]
        g = method.delta * (counts[c] / max(counts)) ** method.gamma if others and method.loss != "ce" else 0.0
        total = total - (1 - g) * log_p[c] - sum(g / len(others) * log_p[j] for j in others)
    return total / len(y)


def retrained(
    method: BPFed, start: naive.Entries, z: Tensor, y: Tensor, m_glo: Tensor | None, id: int
) -> naive.Entries:
    counts, round = torch.bincount(y, minlength=4).tolist(), ROUNDS + 1
    with seeded(0, "retrain", round, id):
        fresh = naive.entries(nn.Linear(64, 4))
    weight, bias = (entry.requires_grad_() for entry in naive.copies(fresh if method.restart else start))
    scale = torch.ones(4, requires_grad=True)
    if m_glo is not None:
        z, y = balanced(z, y, m_glo, naive.generator("order", "retrain", round, id))
    params = [weight, bias] * method.crt + [scale] * method.lws
    rows = [
        rows
        for generator in [naive.generator("retrain", round, id)]
        for _ in range(method.retrain_epochs)
        for rows in torch.randperm(len(z), generator=generator).split(method.retrain_batch)
    ]
    if sum(n > 0 for n in counts) > 1 or method.softmax == "all" or method.loss == "ls_all":
        naive.descend(
            params,
            ((lambda r=r: smoothed_loss(method, scale * (z[r] @ weight.T + bias), y[r], counts)) for r in rows),
            method.retrain_lr,
            method.retrain_momentum,
            method.retrain_weight_decay,
        )
    return {"weight": (scale[:, None] * weight).detach(), "bias": (scale * bias).detach()}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("fields", STAGE_2, ids=str)
def test_stage_2_is_that_of_equations_12_to_20_from_pooled_features(tiny_task, tmp_path, fields):
    method = BPFed(**QUICK | {"alpha": 0} | fields)
    sent = []
    experiment = make_experiment(configure(local={"epochs": 1}), tiny_task, tmp_path, method)
    for _ in range(ROUNDS):
        experiment.step()
    before, model = private_states(experiment), experiment.server.model
    ask = experiment.fleet.ask
    experiment.fleet.ask = lambda fn, cohort, message, **parts: (
        sent.append(message) or ask(fn, cohort, message, **parts)
    )
    report = experiment.step()
    data = {id: naive.client_data(tiny_task, id) for id in naive.clients_of(tiny_task)}
    z, y = {id: naive.features(model, x) for id, (x, _) in data.items()}, {id: y for id, (_, y) in data.items()}
    m_glo = None
    if method.fa:
        expected = covariance(method, z, y)
        m_glo = unpack(next(message["covariance"] for message in sent if "covariance" in message), 64)
        assert torch.allclose(m_glo.double(), expected, atol=1e-6 * expected.abs().max().item())
        # the eigenvectors of M_glo may change with its last bit, so noise is drawn from the matrix that was sent
    moved = 0.0
    for id, state in private_states(experiment).items():
        start, found = (
            {name.removeprefix("classifier."): value for name, value in s["model"].items()} for s in (before[id], state)
        )
        assert naive.differences(found, retrained(method, start, z[id], y[id], m_glo, id)) == {}, id
        moved = max(moved, (found["weight"] - start["weight"]).abs().max().item())
    assert moved > 0.01
    assert math.isfinite(report.figures["retrain_loss"])
