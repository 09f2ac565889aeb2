import copy

import pytest
import torch
from rounds import flat, replies, run, start
from tiny import fingerprint, open_client, private_states
from torch.nn import functional as F

from raylt.methods.fedavg import FedAvg
from raylt.methods.moon import MOON


class Averaged(FedAvg):
    """FedAvg with the network of MOON."""

    def build(self, spec, base):
        return MOON(projection=256).build(spec, base)


def test_mu_of_zero_is_fedavg_of_the_same_network_to_the_bit(tiny_task, tmp_path):
    ends = [run(tiny_task, tmp_path, method) for method in (Averaged(), MOON(mu=0, projection=256))]
    assert fingerprint(ends[0].server.model.state_dict()) == fingerprint(ends[1].server.model.state_dict())
    plain = [run(tiny_task, tmp_path, method) for method in (FedAvg(), MOON(mu=0))]
    assert fingerprint(plain[0].server.model.state_dict()) == fingerprint(plain[1].server.model.state_dict())


@pytest.mark.slow
def test_first_round_of_a_client_adds_a_constant(tiny_task, tmp_path):
    """Both frozen encoders are the received one, so the term is mu log 2 and has no gradient."""
    client = open_client(tiny_task, MOON(mu=2))
    batch = client.samples.batch(torch.arange(8))
    loss = MOON(mu=2).objective(client, {})(batch)
    plain = F.cross_entropy(client.model(batch.x), batch.y)
    assert loss.item() == pytest.approx(plain.item() + 2 * torch.tensor(2.0).log().item(), rel=1e-5)
    ends = [flat(run(tiny_task, tmp_path, method, rounds=1)) for method in (Averaged(), MOON(projection=256))]
    assert torch.allclose(*ends, atol=1e-5)
    assert not torch.allclose(
        *(flat(run(tiny_task, tmp_path, method, rounds=2)) for method in (Averaged(), MOON(projection=256))), atol=1e-4
    )


@pytest.mark.parametrize("tau", [0.5, 1.0])
def test_objective_is_eq_3_and_4(tiny_task, tau):
    method = MOON(mu=1.5, tau=tau)
    client = open_client(tiny_task, method)
    generator = torch.Generator().manual_seed(0)
    previous = copy.deepcopy(client.model.encoder)
    with torch.no_grad():
        for p in previous.parameters():
            p += 0.1 * torch.randn(p.shape, generator=generator)
    client.state["previous"] = {name: value.clone() for name, value in previous.state_dict().items()}
    objective, received = method.objective(client, {}), copy.deepcopy(client.model.encoder)
    with torch.no_grad():
        for p in client.model.parameters():
            p += 0.05 * torch.randn(p.shape, generator=generator)
    client.model.eval()
    batch = client.samples.batch(torch.arange(8))
    with torch.no_grad():
        z, near, far = (e.eval()(batch.x).double() for e in (client.model.encoder, received, previous))
        a, b = ((z * other).sum(1) / (z.norm(dim=1) * other.norm(dim=1)) / tau for other in (near, far))
        contrast = -(a.exp() / (a.exp() + b.exp())).log().mean()
        plain = F.cross_entropy(client.model(batch.x), batch.y)
    assert objective(batch).item() == pytest.approx((plain + 1.5 * contrast).item(), rel=1e-5)


def test_term_moves_features_towards_the_global_and_away_from_the_previous_ones(tiny_task):
    method = MOON(mu=1, projection=0)
    client = open_client(tiny_task, method)
    previous = copy.deepcopy(client.model.encoder)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in previous.parameters():
            p += 0.3 * torch.randn(p.shape, generator=generator)
    client.state["previous"] = previous.state_dict()
    objective = method.objective(client, {})
    with torch.no_grad():
        for p in client.model.encoder.parameters():
            p += 0.1 * torch.randn(p.shape, generator=generator)
    batch, params = client.samples.batch(torch.arange(8)), list(client.model.encoder.parameters())
    client.model.eval()
    term = objective(batch) - F.cross_entropy(client.model(batch.x), batch.y)
    before = term.item()
    with torch.no_grad():
        for p, g in zip(params, torch.autograd.grad(term, params), strict=True):
            p -= 0.1 * g
        after = (objective(batch) - F.cross_entropy(client.model(batch.x), batch.y)).item()
    assert after < before


def test_client_keeps_the_encoder_of_its_last_local_model(tiny_task, tmp_path):
    experiment = start(tiny_task, tmp_path, MOON())
    reply = replies(experiment, [0], "model", "loss", "shares")[0]
    kept = private_states(experiment)[0]["state"]["previous"]
    sent = {
        name.removeprefix("encoder."): value for name, value in reply["model"].items() if name.startswith("encoder.")
    }
    assert fingerprint(kept) == fingerprint(sent)


def test_network_has_a_projection_head_before_the_classifier(tiny_task, tmp_path):
    model = start(tiny_task, tmp_path, MOON(projection=128)).server.model
    assert model.dim == model.classifier.in_features == 128
    assert [type(layer).__name__ for layer in model.encoder.projection] == ["Linear", "ReLU", "Linear"]
    # without a projection, the network is that of the other methods
    assert start(tiny_task, tmp_path, MOON()).server.model.dim == 64


def test_frozen_encoders_are_left_alone(tiny_task):
    client = open_client(tiny_task, MOON())
    previous = {name: value.clone() for name, value in client.model.encoder.state_dict().items()}
    client.state["previous"] = previous
    objective = MOON().objective(client, {})
    client.model.train()
    objective(client.samples.batch(torch.arange(8)))
    client.check_stamps()
    assert fingerprint(client.state["previous"]) == fingerprint(previous)


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{"mu": 1.0}, {"tau": 0.2}, {"projection": 128}], ids=str)
def test_every_field_changes_the_model(tiny_task, tmp_path, fields):
    plain, other = (flat(run(tiny_task, tmp_path, MOON(**given), rounds=2)) for given in ({}, fields))
    assert plain.shape != other.shape or not torch.equal(plain, other)
