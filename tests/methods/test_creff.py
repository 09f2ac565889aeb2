import pytest
import torch
from rounds import ask_only, replies, run, start
from tiny import COUNTS, fingerprint, open_client
from torch import nn
from torch.nn import functional as F

from raylt import tree
from raylt.core.fleet.reductions import Reduction
from raylt.methods.creff.method import CReFF, new_classifier
from raylt.methods.fedavg import FedAvg
from raylt.models.split import linear
from raylt.ops.matching import match_features

QUICK = {"per_class": 5, "matching_steps": 3, "retrain_epochs": 2}


def pooled_gradients(task, server, ids):
    """Return, for each class, the mean over its owners of their samples' mean gradient, by autograd: [C, d + 1]."""
    classifier = linear(**server.state["classifier"])
    by_class: dict[int, list] = {}
    for id in ids:
        client = open_client(task, CReFF(), id)
        client.receive(server.model.state_dict())
        batch = client.samples.batch(torch.arange(len(client)))
        with torch.no_grad():
            z = client.model.eval().encoder(batch.x)
        for c in batch.y.unique().tolist():
            loss = F.cross_entropy(classifier(z[batch.y == c]), batch.y[batch.y == c])
            weight, bias = torch.autograd.grad(loss, [classifier.weight, classifier.bias])
            by_class.setdefault(c, []).append(torch.cat([weight, bias[:, None]], 1))
    return {c: torch.stack(gradients).mean(0) for c, gradients in by_class.items()}


def test_global_stream_is_fedavg_to_the_bit(tiny_task, tmp_path):
    parts = {"federation": {"participation": 0.5}}
    ends = [run(tiny_task, tmp_path, method, **parts) for method in (FedAvg(), CReFF(**QUICK))]
    averaged, matched = (fingerprint(end.server.model.state_dict()) for end in ends)
    assert matched == averaged


def test_judged_is_the_averaged_encoder_under_the_re_trained_classifier(tiny_task, tmp_path):
    experiment = run(tiny_task, tmp_path, CReFF(**QUICK), rounds=1)
    server = experiment.server
    judged = experiment.method.global_model(server)
    assert fingerprint(judged.encoder.state_dict()) == fingerprint(server.model.encoder.state_dict())
    assert fingerprint(judged.classifier.state_dict()) == fingerprint(server.state["classifier"])
    assert not torch.equal(judged.classifier.weight, server.model.classifier.weight)


def test_round_is_that_of_naive_code_on_pooled_gradients(tiny_task, tmp_path, monkeypatch):
    """Compare matching and re-training, from gradients that autograd computes on each client's samples."""
    method, asked = CReFF(per_class=4, matching_steps=6, retrain_epochs=3, retrain_batch=3), [0, 1, 3]
    ask_only(monkeypatch, method, asked)
    experiment = start(tiny_task, tmp_path, method)
    server = experiment.server
    targets = pooled_gradients(tiny_task, server, asked)
    h, classifier = server.state["features"].clone(), linear(**tree.snapshot(server.state["classifier"]))
    method.round(server, experiment.fleet)

    for _ in range(6):  # CReFF's own loop: double backward, row by row
        h.requires_grad_()
        distance = torch.zeros(())
        for c, target in targets.items():
            loss = F.cross_entropy(classifier(h[c]), torch.full((4,), c))
            weight, bias = torch.autograd.grad(loss, [classifier.weight, classifier.bias], create_graph=True)
            rows = [*zip(weight, target[:, :-1], strict=True), (bias, target[:, -1])]
            distance = distance + sum(1 - F.cosine_similarity(a, b, dim=0) for a, b in rows)
        h = (h - 0.1 * torch.autograd.grad(distance, h)[0]).detach()
    assert torch.allclose(server.state["features"], h, atol=1e-5)

    order = torch.Generator().manual_seed(server.seed("retrain"))
    naive, z, y = new_classifier(server), h.flatten(0, 1), torch.arange(4).repeat_interleave(4)
    optimiser = torch.optim.SGD(naive.parameters(), 0.01)
    for _ in range(3):
        for rows in torch.randperm(16, generator=order).split(3):
            optimiser.zero_grad()
            F.cross_entropy(naive(z[rows]), y[rows]).backward()
            optimiser.step()
    assert torch.allclose(server.state["classifier"]["weight"], naive.weight, atol=1e-5)
    assert torch.allclose(server.state["classifier"]["bias"], naive.bias, atol=1e-5)


def test_gradients_are_of_the_classifier_that_was_re_trained_last(tiny_task, tmp_path):
    experiment = run(tiny_task, tmp_path, CReFF(**QUICK), rounds=1)
    server, fleet = experiment.server, experiment.fleet
    fleet.begin(2)
    reply = replies(experiment, [0], "model", "loss", "gradients")[0]
    expected = pooled_gradients(tiny_task, server, [0])
    assert set(reply["gradients"]) == expected.keys()
    for c, gradient in reply["gradients"].items():
        assert torch.allclose(gradient, expected[c], atol=1e-6)


def test_features_of_absent_classes_stay_and_take_no_part_in_re_training(tiny_task, tmp_path, monkeypatch):
    method = CReFF(**QUICK)
    ask_only(monkeypatch, method, [1, 2])  # neither client owns class 3
    assert not COUNTS[[1, 2], 3].any()
    experiment = start(tiny_task, tmp_path, method)
    server, before = experiment.server, experiment.server.state["features"].clone()
    seen = []
    monkeypatch.setattr(
        "raylt.methods.creff.method.fit_classifier", lambda classifier, z, y, **_: seen.append(y) or 0.0
    )
    method.round(server, experiment.fleet)
    after = server.state["features"]
    assert torch.equal(after[3], before[3])
    assert all(not torch.equal(after[c], before[c]) for c in range(3))
    assert server.state["known"].tolist() == [True, True, True, False]
    assert seen[0].unique(return_counts=True)[1].tolist() == [5, 5, 5]
    assert seen[0].max() == 2


def test_class_known_once_stays_known(tiny_task, tmp_path, monkeypatch):
    method, asked = CReFF(**QUICK), [[0], [2]]
    monkeypatch.setattr(CReFF, "sample", lambda self, server, fleet: asked[server.round - 1])
    server = run(tiny_task, tmp_path, method, rounds=2).server
    assert server.state["known"].all()


def test_message_holds_the_model_once_and_a_reply_the_owned_classes(tiny_task, tmp_path):
    experiment = start(tiny_task, tmp_path, CReFF(**QUICK))
    message, model = experiment.method.message(experiment.server), experiment.server.model
    classifier = 4 * (model.classes * model.dim + model.classes)
    assert tree.nbytes(message) == tree.nbytes(model.state_dict()) + classifier
    reply = replies(experiment, [1], "model", "loss", "gradients")[1]
    # the model, the gradients of three classes, and the loss
    assert tree.nbytes(reply) == tree.nbytes(model.state_dict()) + 3 * classifier + 8


def test_server_never_holds_more_than_one_clients_gradients(tiny_task, tmp_path, monkeypatch):
    experiment = start(tiny_task, tmp_path, CReFF(**QUICK))
    asked: list[dict[str, Reduction]] = []
    ask = experiment.fleet.ask
    monkeypatch.setattr(experiment.fleet, "ask", lambda *args, **parts: asked.append(parts) or ask(*args, **parts))
    experiment.method.round(experiment.server, experiment.fleet)
    assert [{name: part.kind for name, part in parts.items()} for parts in asked] == [
        {"model": "mean", "loss": "mean", "gradients": "total"}
    ]


def test_each_re_training_starts_from_new_weights(tiny_task, tmp_path):
    starts = []
    for rounds in (1, 2):
        experiment = run(tiny_task, tmp_path, CReFF(**QUICK | {"retrain_epochs": 0}), rounds=rounds)
        starts.append(experiment.server.state["classifier"]["weight"])
    assert not torch.equal(*starts)
    assert not torch.equal(starts[0], start(tiny_task, tmp_path, CReFF()).server.state["classifier"]["weight"])


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "field",
    [
        {"matching_lr": 5.0},
        {"matching_steps": 9},
        {"per_class": 7},
        {"retrain_epochs": 5},
        {"retrain_batch": 2},
        {"retrain_lr": 0.1},
    ],
    ids=str,
)
def test_every_field_changes_the_re_trained_classifier(tiny_task, tmp_path, field):
    plain, other = (
        run(tiny_task, tmp_path, CReFF(**QUICK | fields), rounds=1).server.state["classifier"]["weight"]
        for fields in ({}, field)
    )
    assert not torch.equal(plain, other)


def test_matching_real_features_of_a_class_gives_a_cosine_of_one():
    torch.manual_seed(0)
    classifier, z, y = nn.Linear(6, 4), torch.randn(8, 6), torch.full((8,), 2)
    weight, bias = torch.autograd.grad(F.cross_entropy(classifier(z), y), [classifier.weight, classifier.bias])
    target = torch.cat([weight, bias[:, None]], 1)
    _, cosine = match_features(z[None], y[:1], target[None], classifier, steps=0, lr=0.1, distance="rows")
    assert cosine.item() == pytest.approx(1, abs=1e-6)
