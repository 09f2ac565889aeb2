"""FedAvgM, FedAdam and FedYogi: the clients of FedAvg with another server step."""

import pytest
import torch
from rounds import flat, run, start
from tiny import fingerprint

from raylt.methods.fedavg import FedAvg
from raylt.methods.fedavgm import FedAvgM
from raylt.methods.fedopt import FedAdam, FedYogi


def deltas(task, folder, method, rounds=3):
    """Return the global model before each round, the clients' mean step in it (float64), and the last model."""
    experiment = start(task, folder, method)
    server, means = experiment.server, []
    take = server.step
    server.step = lambda mean: (
        means.append(
            ({n: v.double() for n, v in server.model.state_dict().items()}, {n: v.double() for n, v in mean.items()})
        ),
        take(mean),
    )
    for round in range(1, rounds + 1):
        server.round = round
        experiment.fleet.begin(round)
        method.round(server, experiment.fleet)
    moved = [{name: mean[name] - before[name] for name in mean} for before, mean in means]
    # copied, because the first model's tensors are still in use
    return [{n: v.clone() for n, v in before.items()} for before, _ in means], moved, server.model


def parameters(model):
    return dict(model.named_parameters())


def test_fedavgm_without_momentum_is_fedavg_to_the_bit(tiny_task, tmp_path):
    ends = [run(tiny_task, tmp_path, method) for method in (FedAvg(), FedAvgM(beta=0))]
    averaged, plain = (fingerprint(end.server.model.state_dict()) for end in ends)
    assert plain == averaged


def test_server_without_momentum_remembers_nothing(tiny_task, tmp_path):
    state = run(tiny_task, tmp_path, FedAvgM(beta=0, server_lr=0.5)).server.state
    assert not state.get("server_optimiser")
    assert run(tiny_task, tmp_path, FedAvgM()).server.state["server_optimiser"]


@pytest.mark.parametrize(("beta", "lr"), [(0.9, 1.0), (0.5, 0.3)])
def test_fedavgm_by_its_recursion(tiny_task, tmp_path, beta, lr):
    before, delta, model = deltas(tiny_task, tmp_path, FedAvgM(beta=beta, server_lr=lr))
    for name, p in parameters(model).items():
        v, w = torch.zeros_like(delta[0][name]), before[0][name]
        for round in range(3):
            assert torch.allclose(before[round][name], w, atol=1e-6), name
            v = beta * v + delta[round][name]
            w = w + lr * v
        assert torch.allclose(p.double(), w, atol=1e-6), name


@pytest.mark.parametrize("kind", [FedAdam, FedYogi])
def test_fedadam_and_fedyogi_by_algorithm_2(tiny_task, tmp_path, kind):
    method = kind(server_lr=0.02, beta1=0.8, beta2=0.95, tau=0.01)
    before, delta, model = deltas(tiny_task, tmp_path, method)
    for name, p in parameters(model).items():
        w, m, v = before[0][name], torch.zeros_like(delta[0][name]), torch.full_like(delta[0][name], 0.01**2)
        for round in range(3):
            d = delta[round][name]
            m = 0.8 * m + 0.2 * d
            v = 0.95 * v + 0.05 * d**2 if kind is FedAdam else v - 0.05 * d**2 * torch.sign(v - d**2)
            w = w + 0.02 * m / (v.sqrt() + 0.01)
        assert torch.allclose(p.double(), w, atol=1e-5), name


@pytest.mark.parametrize("method", [FedAvgM(), FedAdam(), FedYogi()])
def test_running_statistics_are_the_clients_mean(tiny_task, tmp_path, method):
    before, delta, model = deltas(tiny_task, tmp_path, method, rounds=1)
    for name, value in model.named_buffers():
        assert torch.allclose(value.double(), before[0][name] + delta[0][name], atol=1e-6), name


def test_yogi_and_adam_differ_once_their_second_moments_do(tiny_task, tmp_path):
    ends = [flat(run(tiny_task, tmp_path, method)) for method in (FedAdam(), FedYogi())]
    assert not torch.allclose(*ends, atol=1e-4)


@pytest.mark.parametrize("fields", [{"server_lr": 0.2}, {"beta1": 0.5}, {"beta2": 0.5}, {"tau": 0.1}], ids=str)
@pytest.mark.parametrize("kind", [FedAdam, FedYogi])
def test_every_field_changes_the_model(tiny_task, tmp_path, kind, fields):
    assert not torch.equal(*(flat(run(tiny_task, tmp_path, kind(**given), rounds=2)) for given in ({}, fields)))
