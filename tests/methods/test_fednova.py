import pytest
import torch
from rounds import ask_only, flat, replies, run, start, weighted

from raylt.methods.fedavg import FedAvg
from raylt.methods.fednova import FedNova
from raylt.ops.local_updates import gradient_mass

# samples of clients 0, 1, 2, 3, 5: 24, 14, 9, 1, 12; with batches of 8 they take 3, 2, 1, 0, 2 steps an epoch
SIZES = {0: 24, 1: 14, 2: 9, 3: 1, 5: 12}


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_clients_of_equally_many_steps_make_it_fedavg(tiny_task, tmp_path, monkeypatch, momentum):
    ends = []
    for method in (FedAvg(), FedNova()):
        ask_only(monkeypatch, method, [1, 5])
        ends.append(flat(run(tiny_task, tmp_path, method, local={"momentum": momentum})))
    assert torch.allclose(*ends, atol=1e-6, rtol=0)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_upload_is_the_update_over_the_mass_of_its_gradients(tiny_task, tmp_path, momentum):
    local = {"momentum": momentum, "epochs": 2}
    plain = start(tiny_task, tmp_path, FedAvg(), local=local)
    before = plain.method.message(plain.server)["model"]
    ends = replies(plain, [0, 2], "model", "loss")
    uploads = replies(start(tiny_task, tmp_path, FedNova(), local=local), [0, 2], "direction", "mass", "rest", "loss")
    for id, steps in ((0, 6), (2, 2)):
        assert uploads[id]["mass"] == gradient_mass(steps, momentum)
        assert uploads[id]["loss"] == ends[id]["loss"]
        for name, direction in uploads[id]["direction"].items():
            moved = before[name].double() - ends[id]["model"][name].double()
            assert torch.allclose(direction.double(), moved / uploads[id]["mass"], atol=1e-8), name
        for name, value in uploads[id]["rest"].items():
            assert torch.equal(value, ends[id]["model"][name]), name
        assert uploads[id]["direction"].keys() | uploads[id]["rest"].keys() == before.keys()
        assert not uploads[id]["direction"].keys() & uploads[id]["rest"].keys()


def test_round_is_section_5_from_separately_trained_models(tiny_task, tmp_path, monkeypatch):
    plain = start(tiny_task, tmp_path, FedAvg())
    before = plain.method.message(plain.server)["model"]
    asked = [0, 2, 3]
    ends, weights = replies(plain, asked, "model", "loss"), {id: SIZES[id] for id in asked}
    mass = {id: gradient_mass(2 * steps, 0.9) for id, steps in ((0, 3), (2, 1), (3, 0))}
    ask_only(monkeypatch, FedNova(), asked)
    experiment = run(tiny_task, tmp_path, FedNova(), rounds=1)
    p = {id: n / 34 for id, n in weights.items()}
    tau_eff = sum(p[id] * mass[id] for id in asked)
    parameters = dict(experiment.server.model.named_parameters())
    for name, value in experiment.server.model.state_dict().items():
        if name in parameters:
            d = {id: (before[name].double() - ends[id]["model"][name].double()) / max(mass[id], 1) for id in asked}
            expected = before[name].double() - tau_eff * sum(p[id] * d[id] for id in asked)
            assert torch.allclose(value.double(), expected, atol=1e-6), name
        elif value.is_floating_point():
            assert torch.equal(value, weighted(ends, weights, "model", name).float()), name


def test_a_client_of_many_steps_counts_for_less_than_in_fedavg(tiny_task, tmp_path, monkeypatch):
    # client 0 alone owns class 3, and takes three times as many steps as the other client
    biases = []
    for method in (FedAvg(), FedNova()):
        ask_only(monkeypatch, method, [0, 2])
        experiment = start(tiny_task, tmp_path, method)
        before = experiment.method.message(experiment.server)["model"]
        far = replies(start(tiny_task, tmp_path, FedAvg()), [0], "model", "loss")[0]["model"]
        experiment.method.round(experiment.server, experiment.fleet)
        after = experiment.server.model.state_dict()
        move = {name: after[name] - before[name] for name in ("classifier.weight", "encoder.stage1.0.weight")}
        towards = {name: far[name] - before[name] for name in move}
        biases.append(sum((move[name] * towards[name]).sum() / towards[name].square().sum() for name in move).item())
    assert biases[1] < biases[0]


def test_effective_steps_are_reported(tiny_task, tmp_path, monkeypatch):
    ask_only(monkeypatch, FedNova(), [0, 1])
    experiment = start(tiny_task, tmp_path, FedNova(), local={"momentum": 0.0})
    experiment.method.round(experiment.server, experiment.fleet)
    # 2 epochs of 3 and of 2 steps, with 24 and 14 samples
    assert experiment.server.figures["effective_steps"] == pytest.approx((24 * 6 + 14 * 4) / 38)
