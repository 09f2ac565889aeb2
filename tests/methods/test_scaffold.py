import pytest
import torch
from rounds import ask_only, flat, replies, run, start
from tiny import fingerprint, open_client, private_states
from torch.nn import functional as F

from raylt.core.server import ServerMomentum
from raylt.core.training.optimisers import SGD
from raylt.methods.fedavg import FedAvg
from raylt.methods.scaffold import Scaffold
from raylt.tree import Tree

SIZES = {0: 24, 1: 14, 2: 9, 3: 1, 5: 12}


def controls(experiment) -> dict[int, Tree]:
    return {
        id: state["state"]["control"] for id, state in private_states(experiment).items() if "control" in state["state"]
    }


def test_first_round_is_fedavg_to_the_bit(tiny_task, tmp_path):
    ends = [run(tiny_task, tmp_path, method, rounds=1) for method in (FedAvg(), Scaffold())]
    averaged, controlled = (fingerprint(end.server.model.state_dict()) for end in ends)
    assert controlled == averaged
    assert not torch.equal(*(flat(run(tiny_task, tmp_path, method, rounds=2)) for method in (FedAvg(), Scaffold())))


def test_gradient_is_corrected_by_c_minus_c_i_eq_3(tiny_task):
    client = open_client(tiny_task, Scaffold())
    params = dict(client.model.named_parameters())
    generator = torch.Generator().manual_seed(0)
    c, c_i = ({name: torch.randn(p.shape, generator=generator) for name, p in params.items()} for _ in range(2))
    client.state["control"] = c_i
    objective, batch = Scaffold().objective(client, {"control": c}), client.samples.batch(torch.arange(8))
    client.model.eval()
    with torch.no_grad():
        for p in params.values():
            p += 0.1
    plain = F.cross_entropy(client.model(batch.x), batch.y)
    assert objective(batch).item() == plain.item()
    gradients = torch.autograd.grad(plain, list(params.values()))
    corrected = torch.autograd.grad(objective(batch), list(params.values()))
    for name, g, whole in zip(params, gradients, corrected, strict=True):
        assert torch.allclose(whole, g - c_i[name] + c[name], atol=1e-6), name


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_one_step_makes_c_i_the_gradient_at_the_global_model_eq_4(tiny_task, tmp_path, momentum):
    # client 2 has one batch an epoch; c_i+ is g(x) for any c
    local = {"momentum": momentum, "epochs": 1, "lr": 0.5}
    experiment = start(tiny_task, tmp_path, Scaffold(), local=local)
    message = experiment.method.message(experiment.server)
    message["control"] = {name: torch.full_like(c, 0.25) for name, c in message["control"].items()}
    reply = replies(experiment, [2], "model", "loss", "control", message=message)[2]
    own = controls(experiment)[2]
    client = open_client(tiny_task, Scaffold(), 2, experiment.config)
    client.model.train()
    batch = next(client.batches(1, 8))
    params = dict(client.model.named_parameters())
    gradients = torch.autograd.grad(F.cross_entropy(client.model(batch.x), batch.y), list(params.values()))
    for name, g in zip(params, gradients, strict=True):
        assert torch.allclose(own[name], g, atol=1e-5), name
        assert torch.allclose(reply["control"][name], own[name], atol=1e-6), name  # c_i was 0
        step = message["model"][name] - 0.5 * (g + 0.25)
        assert torch.allclose(reply["model"][name], step, atol=1e-5), name


def test_c_i_is_the_weighted_mean_of_the_gradients_of_all_steps_with_momentum(tiny_task, tmp_path):
    experiment = start(tiny_task, tmp_path, Scaffold(), local={"epochs": 2, "lr": 0.05, "momentum": 0.9})
    replies(experiment, [0], "model", "loss", "control")
    client = open_client(tiny_task, Scaffold(), 0, experiment.config)
    params = dict(client.model.named_parameters())
    optimiser, gradients = SGD(params.values(), 0.05, 0.9), []
    client.model.train()
    for batch in client.batches(2, 8):
        loss = F.cross_entropy(client.model(batch.x), batch.y)
        gradients.append(torch.autograd.grad(loss, list(params.values()), retain_graph=True))
        optimiser.step(loss)
    # over 6 steps the first gradient is applied 1 + 0.9 + ... + 0.9^5 times
    a = [sum(0.9**i for i in range(6 - j)) for j in range(6)]
    for place, (name, own) in enumerate(controls(experiment)[0].items()):
        expected = sum(weight * g[place] for weight, g in zip(a, gradients, strict=True)) / sum(a)
        assert torch.allclose(own, expected, atol=1e-5), name


def test_c_stays_the_weighted_mean_of_all_c_i_line_17(tiny_task, tmp_path):
    experiment = run(tiny_task, tmp_path, Scaffold(), rounds=4, federation={"participation": 0.5})
    own = controls(experiment)
    for name, c in experiment.server.state["control"].items():
        expected = sum(SIZES[id] * control[name].double() for id, control in own.items()) / sum(SIZES.values())
        assert torch.allclose(c.double(), expected, atol=1e-6), name
        assert c.abs().max() > 0, name


def test_a_client_that_takes_no_step_keeps_its_control_variate(tiny_task, tmp_path, monkeypatch):
    ask_only(monkeypatch, Scaffold(), [0, 3])
    own = controls(run(tiny_task, tmp_path, Scaffold(), rounds=2))[3]
    assert all(not c.any() for c in own.values())


def test_server_lr_scales_the_step_of_what_is_trained_line_16(tiny_task, tmp_path):
    whole, half = (run(tiny_task, tmp_path, Scaffold(server_lr=lr), rounds=1).server.model for lr in (1.0, 0.5))
    before = start(tiny_task, tmp_path, Scaffold()).server.model.state_dict()
    for name, p in half.named_parameters():
        assert torch.allclose(p, (before[name] + whole.state_dict()[name]) / 2, atol=1e-6), name
    for name, value in half.named_buffers():
        assert torch.equal(value, whole.state_dict()[name]), name


def test_server_has_no_momentum():
    assert Scaffold().server_optimiser() is None
    assert Scaffold(server_lr=0.5).server_optimiser() == ServerMomentum(beta=0, lr=0.5)


def test_uploads_are_twice_the_trained_entries(tiny_task, tmp_path):
    experiment = start(tiny_task, tmp_path, Scaffold())
    reply = replies(experiment, [0], "model", "loss", "control")[0]
    assert reply["control"].keys() == dict(experiment.server.model.named_parameters()).keys()
