import pytest
import torch
from tiny import configure, fingerprint, make_experiment, open_client
from torch.nn import functional as F

from raylt.core.client import Client
from raylt.core.fleet.reductions import each
from raylt.methods.fedavg import FedAvg
from raylt.methods.fedprox import FedProx


@pytest.fixture
def client(tiny_task) -> Client:
    return open_client(tiny_task, FedProx())


def move(model, by: float) -> None:
    """Move every parameter by random steps of the given size."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p += by * torch.randn(p.shape, generator=generator)


def test_mu_of_zero_is_fedavg_bit_for_bit(tiny_task, tmp_path):
    config = configure(federation={"rounds": 3, "participation": 0.5})
    runs = [make_experiment(config, tiny_task, tmp_path, method) for method in (FedAvg(), FedProx(mu=0))]
    for experiment in runs:
        while not experiment.done:
            experiment.step()
    averaged, proximal = (fingerprint(experiment.server.model.state_dict()) for experiment in runs)
    assert proximal == averaged


def test_proximal_term_adds_mu_times_the_distance_to_the_gradient_eq_2(client):
    mu, batch = 0.3, client.samples.batch(torch.arange(8))
    params = list(client.model.parameters())
    objective = FedProx(mu=mu).objective(client, {})
    anchor = [p.detach().clone() for p in params]
    move(client.model, 0.1)
    client.model.eval()
    whole = torch.autograd.grad(objective(batch), params)
    plain = torch.autograd.grad(F.cross_entropy(client.model(batch.x), batch.y), params)
    for g, g_plain, p, a in zip(whole, plain, params, anchor, strict=True):
        assert torch.allclose(g - g_plain, mu * (p - a).detach(), atol=1e-6)


def test_objective_adds_half_mu_times_the_squared_distance_eq_2(client):
    batch = client.samples.batch(torch.arange(8))
    objective = FedProx(mu=0.5).objective(client, {})
    client.model.eval()
    with torch.no_grad():
        plain = F.cross_entropy(client.model(batch.x), batch.y)
        assert objective(batch) == plain  # the term is zero at w_t
        client.model.classifier.bias += torch.tensor([1.0, 2.0, 0.0, -2.0])
        shifted = F.cross_entropy(client.model(batch.x), batch.y)
        # 0.5 / 2 * (1 + 4 + 0 + 4) = 2.25
        assert objective(batch).item() == pytest.approx(shifted.item() + 2.25, rel=1e-6)


def test_frozen_parameters_are_not_part_of_the_term(client):
    batch = client.samples.batch(torch.arange(8))
    client.model.encoder.requires_grad_(False)
    objective = FedProx(mu=1).objective(client, {})
    client.model.eval()
    move(client.model.encoder, 0.1)
    with torch.no_grad():
        assert objective(batch) == F.cross_entropy(client.model(batch.x), batch.y)


def test_larger_mu_keeps_a_client_nearer_to_the_global_model(tiny_task, tmp_path):
    # the rate times the largest mu is below 1, so the term cannot make a step overshoot
    distances = []
    for mu in (0.0, 0.1, 1.0, 10.0):
        experiment = make_experiment(configure(local={"momentum": 0.0}), tiny_task, tmp_path, FedProx(mu=mu))
        message = experiment.method.message(experiment.server)
        got = experiment.fleet.ask(experiment.method.train, [0], message, model=each, loss=each, shares=each)
        distances.append(
            sum(
                (got["model"][0][name] - p.detach()).square().sum().item()
                for name, p in experiment.server.model.named_parameters()
            )
        )
    assert distances == sorted(distances, reverse=True)
    assert distances[-1] < 0.8 * distances[0]
