import math

import pytest
import torch
from rounds import ask_only, flat, replies, run, start
from tiny import open_client
from torch.nn import functional as F

from raylt.methods.fedavg import FedAvg
from raylt.methods.qfedavg import QFedAvg

SIZES = {0: 24, 1: 14, 2: 9, 3: 1, 5: 12}


def risk(task, id, model, method=None) -> float:
    """Compute the mean cross-entropy of a client's samples."""
    client = open_client(task, method or QFedAvg(), id)
    client.receive(model)
    batch = client.samples.batch(torch.arange(len(client)))
    with torch.no_grad():
        return -client.model.eval()(batch.x).double().log_softmax(1)[torch.arange(len(batch.y)), batch.y].mean().item()


def test_without_momentum_both_constants_are_one(tiny_task, tmp_path):
    ends = [
        flat(run(tiny_task, tmp_path, QFedAvg(q=1, lipschitz=lipschitz), rounds=1, local={"momentum": 0.0}))
        for lipschitz in ("rate", "step")
    ]
    assert torch.equal(*ends)


@pytest.mark.parametrize("lipschitz", ["rate", "step"])
def test_q_of_zero_is_fedavg(tiny_task, tmp_path, lipschitz):
    parts = {"federation": {"participation": 0.5}}
    ends = [flat(run(tiny_task, tmp_path, method, **parts)) for method in (FedAvg(), QFedAvg(q=0, lipschitz=lipschitz))]
    assert torch.allclose(*ends, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("q", "lipschitz", "constant"),
    [(0.5, "rate", 50), (1.0, "rate", 50), (2.0, "rate", 50), (0.5, "step", 5), (2.0, "step", 5)],
)
def test_upload_is_delta_k_and_h_k_of_lines_4_and_5(tiny_task, tmp_path, q, lipschitz, constant):
    """L is 1 / 0.02, or (1 - 0.9) / 0.02 if the momentum 0.9 counts."""
    plain = start(tiny_task, tmp_path, FedAvg(), local={"lr": 0.02})
    before = plain.method.message(plain.server)["model"]
    trained = replies(plain, [0, 1], "model", "loss")
    fair = start(tiny_task, tmp_path, QFedAvg(q=q, lipschitz=lipschitz), local={"lr": 0.02})
    uploads = replies(fair, [0, 1], "delta", "h", "rest", "loss")
    for id in (0, 1):
        f = risk(tiny_task, id, before)
        square = 0.0
        for name, delta in uploads[id]["delta"].items():
            dw = constant * (before[name].double() - trained[id]["model"][name].double())
            square += dw.square().sum().item()
            assert torch.allclose(delta.double(), f**q * dw, rtol=1e-4, atol=1e-5), name
        assert uploads[id]["h"] == pytest.approx(q * f ** (q - 1) * square + constant * f**q, rel=1e-4)
        assert uploads[id]["loss"] == trained[id]["loss"]


def test_round_is_line_7_with_clients_weighted_by_their_samples(tiny_task, tmp_path, monkeypatch):
    asked = [0, 2, 5]
    one = start(tiny_task, tmp_path, QFedAvg(q=1))
    before = one.method.message(one.server)["model"]
    uploads = replies(one, asked, "delta", "h", "rest", "loss")
    ask_only(monkeypatch, QFedAvg(), asked)
    experiment = run(tiny_task, tmp_path, QFedAvg(q=1), rounds=1)
    h = sum(SIZES[id] * uploads[id]["h"] for id in asked)
    for name, p in experiment.server.model.named_parameters():
        step = sum(SIZES[id] * uploads[id]["delta"][name].double() for id in asked) / h
        assert torch.allclose(p.double(), before[name].double() - step, atol=1e-6), name
    for name, value in experiment.server.model.named_buffers():
        if value.is_floating_point():
            mean = sum(SIZES[id] * uploads[id]["rest"][name].double() for id in asked) / sum(SIZES[id] for id in asked)
            assert torch.allclose(value.double(), mean, atol=1e-6), name


def test_risk_is_the_mean_over_samples_in_evaluation_mode(tiny_task):
    client = open_client(tiny_task, QFedAvg(), 0)
    before = {name: value.clone() for name, value in client.model.state_dict().items()}
    assert QFedAvg().risk(client) == pytest.approx(risk(tiny_task, 0, before), rel=1e-5)
    assert all(torch.equal(value, before[name]) for name, value in client.model.state_dict().items())


def test_client_that_already_fits_its_samples_has_finite_figures(tiny_task, tmp_path):
    experiment = start(tiny_task, tmp_path, QFedAvg(q=0.001))
    message = experiment.method.message(experiment.server)
    message["model"]["classifier.bias"] = torch.tensor([0.0, 1e4, 0.0, 0.0])
    reply = replies(experiment, [2], "delta", "h", "rest", "loss", message=message)[2]  # client 2 owns class 1 alone
    assert math.isfinite(reply["h"])
    assert reply["h"] > 0
    assert all(torch.isfinite(value).all() for value in reply["delta"].values())


def test_larger_q_turns_the_step_towards_the_client_with_the_larger_loss(tiny_task, tmp_path, monkeypatch):
    """Compute the shares of both clients' directions in the step; the model fits client 2 (class 1) and not client
    0."""
    shares = []
    for q in (0.0, 1.0, 4.0):
        ask_only(monkeypatch, QFedAvg(), [0, 2])
        experiment = start(tiny_task, tmp_path, QFedAvg(q=q))
        with torch.no_grad():
            experiment.server.model.classifier.bias[1] += 2
        uploads = replies(experiment, [0, 2], "delta", "h", "rest", "loss")
        norms = {
            id: SIZES[id] * math.sqrt(sum(d.square().sum().item() for d in uploads[id]["delta"].values()))
            for id in (0, 2)
        }
        shares.append(norms[0] / (norms[0] + norms[2]))
    assert shares == sorted(shares)
    assert shares[-1] > shares[0]


def test_loss_of_several_batches_is_weighted_by_their_samples(tiny_task):
    client = open_client(tiny_task, QFedAvg(), 0)
    client.config = client.config.model_copy(
        update={"evaluation": client.config.evaluation.model_copy(update={"batch": 10})}
    )
    batch = client.samples.batch(torch.arange(24))
    with torch.no_grad():
        expected = F.cross_entropy(client.model.eval()(batch.x), batch.y).item()
    assert QFedAvg().risk(client) == pytest.approx(expected, rel=1e-5)
