import pytest
import torch
from rounds import flat, run
from tiny import open_client
from torch import tensor
from torch.nn import functional as F

from raylt.methods.fedavg import FedAvg
from raylt.methods.fedlc import FedLC


def test_margin_by_hand():
    # 16^(-1/4) = 1/2, 81^(-1/4) = 1/3
    margin = FedLC(tau=0.6).margin(tensor([16, 81, 0, 1]))
    assert torch.allclose(margin, tensor([0.3, 0.2, torch.inf, 0.6]))
    assert FedLC(tau=0.6, missing="one").margin(tensor([16, 0]))[1].item() == pytest.approx(0.6)
    # (1e-8)^(-1/4) = 100
    assert FedLC(tau=0.6, missing="eps").margin(tensor([16, 0]))[1].item() == pytest.approx(60, rel=1e-5)


def loss_by_hand(logits, y, counts, tau):
    total = 0.0
    for row, c in zip(logits.double(), y.tolist(), strict=True):
        shifted = {j: row[j] - tau * counts[j].item() ** -0.25 for j in range(len(counts)) if counts[j] > 0}
        total -= shifted[c] - torch.logsumexp(torch.stack(list(shifted.values())), 0)
    return (total / len(y)).item()


def test_objective_is_the_calibrated_cross_entropy_over_the_owned_classes(tiny_task):
    client = open_client(tiny_task, FedLC(), 1)  # class counts 8, 3, 3, 0
    client.model.eval()
    batch = client.samples.batch(torch.arange(14))
    expected = loss_by_hand(client.model(batch.x).detach(), batch.y, client.counts, 0.7)
    assert FedLC(tau=0.7).objective(client, {})(batch).item() == pytest.approx(expected, rel=1e-5)


def test_without_tau_it_is_cross_entropy_over_the_owned_classes(tiny_task):
    client = open_client(tiny_task, FedLC(), 1)
    client.model.eval()
    batch = client.samples.batch(torch.arange(14))
    expected = F.cross_entropy(client.model(batch.x)[:, :3], batch.y)
    assert FedLC(tau=0).objective(client, {})(batch).item() == pytest.approx(expected.item(), rel=1e-6)
    every = F.cross_entropy(client.model(batch.x), batch.y)
    assert FedLC(tau=0, missing="one").objective(client, {})(batch).item() == every.item()


def test_classes_that_are_missing_get_no_gradient_and_rare_ones_a_larger_one(tiny_task):
    client = open_client(tiny_task, FedLC(), 1)
    batch = client.samples.batch(torch.arange(14))
    weight = client.model.classifier.weight
    (masked,) = torch.autograd.grad(FedLC().objective(client, {})(batch), weight, retain_graph=True)
    assert not masked[3].any()
    assert torch.isfinite(masked).all()
    (eps,) = torch.autograd.grad(FedLC(missing="one").objective(client, {})(batch), weight)
    assert eps[3].any()


def test_client_of_one_class_learns_nothing(tiny_task):
    client = open_client(tiny_task, FedLC(), 2)
    loss = FedLC().objective(client, {})(client.samples.batch(torch.arange(9)))
    gradients = torch.autograd.grad(loss, list(client.model.parameters()))
    assert loss.item() == pytest.approx(0)
    assert all(torch.isfinite(g).all() and g.abs().max() < 1e-6 for g in gradients)


@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_loss_does_not_change_when_a_constant_is_added_to_the_logits(scale):
    margin, y = FedLC().margin(tensor([8, 3, 3, 0])), tensor([0, 1, 2])
    logits = scale * torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    losses = [F.cross_entropy(logits + shift - margin, y) for shift in (0, 100)]
    assert torch.isfinite(losses[0])
    assert torch.allclose(*losses, rtol=1e-3)


def test_every_field_changes_the_model(tiny_task, tmp_path):
    # at tau = 1 a class of 1e-8 samples has a weight of exp(-100), which vanishes in float32
    ends = [
        flat(run(tiny_task, tmp_path, method, rounds=1))
        for method in (FedAvg(), FedLC(), *(FedLC(tau=0.1, missing=missing) for missing in ("mask", "eps", "one")))
    ]
    assert all(not torch.equal(a, b) for i, a in enumerate(ends) for b in ends[:i])
