"""Whole rounds of FedSM against code that follows the papers' equations from pooled data (methods.md, section 3)."""

import naive
import numpy as np
import pytest
import teachers
import torch
from tiny import configure, make_experiment
from torch import Tensor, nn
from torch.nn import functional as F

from raylt.methods import make_method
from raylt.methods.fedsm.method import FedSM
from raylt.seeds import seeded

ROUNDS = 2
QUICK = {"name": "fedsm", "retrain_rounds": 1, "size": 12, "retrain_epochs": 3, "retrain_batch": 10, "retrain_lr": 0.1}


@pytest.fixture(scope="module")
def texts() -> dict[str, np.ndarray]:
    """Return text features of two wordings, neither of unit length nor orthogonal, so that all similarities differ."""
    rng = np.random.default_rng(3)
    common = rng.standard_normal(64)
    near = np.outer([1.0, 0.2, 0.8, -0.6], common) + np.outer([0.5, 0.5, -0.4, 0.3], rng.standard_normal(64))
    phrase = (near + 0.4 * rng.standard_normal((4, 64))) * np.array([[0.1], [0.3], [0.2], [0.05]])
    return {"text": phrase.astype(np.float32), "text_label": phrase[[2, 0, 3, 1]].astype(np.float32)}


@pytest.fixture(scope="module")
def teacher(tiny_task, texts, tmp_path_factory) -> str:
    return teachers.save_features(tmp_path_factory.mktemp("features") / "f.npz", tiny_task, **texts)


def unit(x: Tensor) -> Tensor:
    return x / x.norm(dim=1, keepdim=True)


# local training, Eq. 1


def trained(method: FedSM, model, x: Tensor, y: Tensor, e: Tensor, text: Tensor, order: torch.Generator) -> None:
    q = (method.scale * unit(e.double()) @ unit(text.double()).T / method.temperature).softmax(1)

    def loss(rows: Tensor) -> Tensor:
        logits = model(x[rows])
        p = (logits.double() / method.temperature).softmax(1)
        kl = (q[rows] * (q[rows] / p).log()).sum(1).mean()
        return F.cross_entropy(logits, y[rows]) + method.kd * method.temperature**2 * kl

    naive.train(model, naive.epochs_of(len(y), order), loss)


# prototypes, pseudo-features and re-training, Eq. 3-7


def prototypes(method: FedSM, z: dict[int, Tensor], y: dict[int, Tensor]) -> Tensor:
    """Compute the prototypes; every class of the tiny task has a client that owns it."""
    found = []
    for c in range(4):
        means = [(int((y[id] == c).sum()), z[id][y[id] == c].double().mean(0)) for id in z if (y[id] == c).any()]
        if method.norm == "l2":
            means = [(n, mean / mean.norm()) for n, mean in means]
        found.append(sum(n * mean for n, mean in means) / sum(n for n, _ in means))
    return torch.stack(found).float()


def relevance(method: FedSM, text: Tensor) -> Tensor:
    """Compute alpha of Eq. 5 pair by pair."""
    alpha = torch.zeros(4, 4)
    if method.texts == "unit":
        text = text / text.norm(dim=1, keepdim=True)
    for i in range(4):
        for j in range(4):
            a, b = text[i], text[j]
            alpha[i, j] = {
                "cosine": a @ b / (a.norm() * b.norm()),
                "dot": a @ b,
                "l1": 1 / (1 + (a - b).abs().sum()),
                "l2": 1 / (1 + (a - b).norm()),
            }[method.similarity]
    for i, mean in enumerate(alpha.mean(1).tolist()):
        alpha[i, i] = mean
    if method.partner == "inverted":
        alpha = torch.stack([row.max() - (row - row.min()) for row in alpha])
    return alpha.clamp(min=0) if method.softmax is None else (alpha / method.softmax).softmax(1)


def pseudo(method: FedSM, z: Tensor, y: Tensor, means: Tensor, alpha: Tensor, order: torch.Generator) -> Tensor:
    """Compute R of Eq. 6: S features of each class in turn."""
    owned = y.unique().tolist()
    weights = torch.stack([torch.stack([alpha[c, v] for v in owned]) for c in range(4)]).double()
    weights[weights.sum(1) == 0] = 1  # a class that is related to no owned class gets uniform weights
    if method.partner == "ranked":  # ranks count from 1; similarities are equal only where they were clipped
        weights = torch.stack(
            [torch.tensor([(w > row).sum() + ((w == row).sum() + 1) / 2 for w in row]) for row in weights]
        )
        weights = weights.double()
    if method.partner == "random":
        weights = torch.ones_like(weights)
    if method.partner == "deterministic":
        for c in range(4):
            others = [i for i, v in enumerate(owned) if v != c] or list(range(len(owned)))
            weights[c] = F.one_hot(torch.tensor(max(others, key=lambda i, c=c: weights[c, i])), len(owned))
    rows = torch.zeros(4, method.size, dtype=torch.int64)
    if method.unit == "sample":
        for c in range(4):
            by_sample = torch.stack([weights[c, owned.index(v)] for v in y.tolist()])
            enough = int((by_sample > 0).sum()) >= method.size
            rows[c] = torch.multinomial(by_sample, method.size, replacement=not enough, generator=order)
    else:
        drawn = torch.multinomial(weights, method.size, replacement=True, generator=order)
        place = torch.rand(drawn.shape, generator=order, dtype=torch.float64)
        for c in range(4):
            for s in range(method.size):
                own = torch.nonzero(y == owned[drawn[c, s]]).flatten()
                rows[c, s] = own[int(place[c, s] * len(own))]
    lam = method.lam_low + (method.lam_high - method.lam_low) * torch.rand(rows.shape, generator=order)
    z = unit(z) if method.norm == "l2" else z
    return torch.stack(
        [(1 - lam[c, s]) * z[rows[c, s]] + lam[c, s] * means[c] for c in range(4) for s in range(method.size)]
    )


def refitted(method: FedSM, start: naive.Entries, r: Tensor, t: int, id: int) -> naive.Entries:
    """Re-train the classifier by plain SGD, Eq. 7."""
    weight, bias = (entry.requires_grad_() for entry in naive.copies(start))
    y, order = torch.arange(4).repeat_interleave(method.size), naive.generator("retrain", t, id)
    batches = [
        rows
        for _ in range(method.retrain_epochs)
        for rows in torch.randperm(len(y), generator=order).split(method.retrain_batch)
    ]
    naive.descend(
        [weight, bias],
        ((lambda rows=rows: F.cross_entropy(r[rows] @ weight.T + bias, y[rows])) for rows in batches),
        method.retrain_lr,
    )
    return {"weight": weight.detach(), "bias": bias.detach()}


def after_round(method: FedSM, model, task, features: Tensor, texts, t: int) -> tuple[naive.Entries, naive.Entries]:
    """Return the global model and the classifier that is judged."""
    start, last = naive.entries(model), t > ROUNDS - method.retrain_rounds
    data = {id: naive.client_data(task, id) for id in naive.clients_of(task)}
    x, y = ({id: pair[i] for id, pair in data.items()} for i in (0, 1))
    sizes, ends, classifiers = [len(y[id]) for id in data], [], []
    text, words = torch.from_numpy(texts["text"]), texts["text_label" if method.wording == "label" else "text"]
    alpha = torch.ones(4, 4) if method.teacher == "none" else relevance(method, torch.from_numpy(words))
    before = last and method.retrain == "before"
    if before and method.encoders == "trained":
        return after_trained(method, model, data, features, task, text, alpha, t)
    if before:
        means = prototypes(method, {id: naive.features(model, x[id]) for id in data}, y)
    for id in data:
        model.load_state_dict(start)
        order = naive.generator("order", "train_and_retrain" if before else "train", t, id)
        trained(method, model, x[id], y[id], features[task.split.clients[id]], text, order)
        if before:
            r = pseudo(method, naive.features(model, x[id]), y[id], means, alpha, order)
            model.classifier.load_state_dict(refitted(method, naive.entries(model.classifier), r, t, id))
        ends.append(naive.entries(model))
    end = naive.average(ends, sizes)
    model.load_state_dict(end)
    if not last or before:
        return end, naive.entries(model.classifier)
    z = {id: naive.features(model, x[id]) for id in data}
    means = prototypes(method, z, y)
    for id in data:
        with seeded(0, "refit", t, id):
            fresh = naive.entries(nn.Linear(64, 4))
        r = pseudo(method, z[id], y[id], means, alpha, naive.generator("order", "refit", t, id))
        classifiers.append(refitted(method, fresh, r, t, id))
    return end, naive.average(classifiers, sizes)


def after_trained(
    method: FedSM, model, data, features: Tensor, task, text: Tensor, alpha: Tensor, t: int
) -> tuple[naive.Entries, naive.Entries]:
    """Do a round in which all clients train, compute prototypes from the trained encoders, and then re-train."""
    start, ends, z = naive.entries(model), {}, {}
    for id, (x, y) in data.items():
        model.load_state_dict(start)
        trained(
            method, model, x, y, features[task.split.clients[id]], text, naive.generator("order", "train_first", t, id)
        )
        ends[id], z[id] = naive.entries(model), naive.features(model, x)
    means = prototypes(method, z, {id: y for id, (_, y) in data.items()})
    for id, (_, y) in data.items():
        r = pseudo(method, z[id], y, means, alpha, naive.generator("order", "retrain_next", t, id))
        classifier = {name: ends[id][f"classifier.{name}"] for name in ("weight", "bias")}
        refit = refitted(method, classifier, r, t, id)
        ends[id] |= {f"classifier.{name}": value for name, value in refit.items()}
    end = naive.average(list(ends.values()), [len(y) for _, y in data.values()])
    model.load_state_dict(end)
    return end, naive.entries(model.classifier)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"kd": 0.3, "temperature": 1.5, "scale": 30.0},
        {"similarity": "dot"},
        {"similarity": "dot", "texts": "raw"},
        {"similarity": "l1"},
        {"similarity": "l1", "texts": "raw"},
        {"similarity": "l2", "softmax": 0.02},
        {"softmax": 0.2},
        {"wording": "label"},
        {"partner": "ranked"},
        {"partner": "ranked", "unit": "sample"},
        {"partner": "deterministic"},
        {"partner": "random"},
        {"partner": "inverted"},
        {"partner": "inverted", "softmax": 0.1},
        {"encoders": "trained"},
        {"encoders": "trained", "norm": "l2"},
        {"unit": "sample"},
        {"norm": "l2"},
        {"lam_low": 0.2, "lam_high": 0.4},
        {"retrain": "after"},
        {"preset": "official", "retrain_rounds": 1, "retrain_epochs": 3, "retrain_batch": 10},
    ],
    ids=str,
)
def test_rounds_are_those_of_equations_1_to_7_written_out(tiny_task, tmp_path, teacher, texts, fields):
    method = make_method(QUICK | {"teacher": teacher} | fields)
    experiment = make_experiment(configure(), tiny_task, tmp_path, method)
    model = naive.new_model(tiny_task)
    e = torch.from_numpy(teachers.feature_arrays(tiny_task)["image"]).float()
    for t in range(1, ROUNDS + 1):
        end, classifier = after_round(method, model, tiny_task, unit(e).half(), texts, t)
        report = experiment.step()
        model.load_state_dict(experiment.server.model.state_dict())
        assert naive.differences(naive.entries(model), end, 5e-4) == {}
        alpha = relevance(method, torch.from_numpy(texts["text_label" if method.wording == "label" else "text"]))
        law = [row / row.sum() if row.sum() else torch.full((4,), 0.25) for row in alpha]
        assert report.figures["relevance"] == pytest.approx(
            sum(sum(abs(p - 0.25) for p in row.tolist()) / 2 for row in law) / 4, abs=1e-6
        )
    judged = experiment.method.global_model(experiment.server).classifier.state_dict()
    assert naive.differences(judged, classifier, 5e-4) == {}
