import numpy as np
import pytest
import torch
from rounds import ask_only, flat, run
from tiny import configure, fingerprint, open_client
from torch import tensor
from torch.nn import functional as F

from raylt.core.training.features import features
from raylt.core.training.sgd import balanced
from raylt.methods import balancefl
from raylt.methods.balancefl import POOL, BalanceFL, mean_entropy
from raylt.methods.fedavg import FedAvg

OFF = {"resample": False, "fa": False, "kd": 0, "entropy": 0}


class WithoutBias(FedAvg):
    """FedAvg with the network of BalanceFL."""

    def build(self, spec, base):
        return BalanceFL().build(spec, base)


def test_all_off_and_all_classes_owned_is_fedavg(tiny_task, tmp_path, monkeypatch):
    ends = []
    for method in (WithoutBias(), BalanceFL(**OFF)):
        ask_only(monkeypatch, method, [0, 5])
        ends.append(flat(run(tiny_task, tmp_path, method)))
    assert torch.allclose(*ends, atol=1e-6, rtol=0)


def test_own_loss_is_cross_entropy_over_the_owned_classes(tiny_task):
    client = open_client(tiny_task, BalanceFL(), 1)  # class counts 8, 3, 3, 0
    client.model.eval()
    batch = client.samples.batch(torch.arange(14))
    expected = F.cross_entropy(client.model(batch.x)[:, :3], batch.y)
    assert BalanceFL(**OFF).objective(client, {})(batch).item() == pytest.approx(expected.item(), rel=1e-6)


def test_own_loss_without_the_mask_is_cross_entropy_over_all_classes(tiny_task):
    client = open_client(tiny_task, BalanceFL(), 1)  # class counts 8, 3, 3, 0
    client.model.eval()
    batch = client.samples.batch(torch.arange(14))
    logits = client.model(batch.x)
    own = BalanceFL(**OFF, missing="kept").objective(client, {})(batch)
    assert own.item() == pytest.approx(F.cross_entropy(logits, batch.y).item(), rel=1e-6)
    push = torch.autograd.grad(own, client.model.classifier.weight)[0][3]
    expected = logits.softmax(1)[:, 3] @ client.model.encoder(batch.x) / 14
    assert torch.allclose(push, expected, atol=1e-6)  # the missing class is pushed away from every sample
    whole = BalanceFL(**OFF | {"entropy": 0.5}, missing="kept").objective(client, {})(batch)
    assert (own - whole).item() == pytest.approx(0.5 * mean_entropy(logits[:, :3]).item(), rel=1e-4)


def test_missing_classes_are_distilled_from_the_received_model(tiny_task):
    client = open_client(tiny_task, BalanceFL(), 2)  # the client owns class 1 alone and lacks 0, 2 and 3
    fields = OFF | {"kd": 3.0, "temperature": 4.0}
    objective = BalanceFL(**fields).objective(client, {})
    batch = client.samples.batch(torch.arange(9))
    with torch.no_grad():
        target = (client.model.eval()(batch.x)[:, [0, 2, 3]] / 4).softmax(1)
        client.model.classifier.weight += torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
        logits = client.model(batch.x)[:, [0, 2, 3]] / 4
        expected = 3 * -(target * logits.log_softmax(1)).sum(1).mean()
    # with one owned class the cross-entropy is 0
    assert objective(batch).item() == pytest.approx(expected.item(), rel=1e-5)


def test_two_missing_classes_are_distilled_and_one_is_not(tiny_task):
    """A softmax over one class is always 1, so its distillation could only be a constant."""
    for rare, expected in ((2, True), (3, False)):
        client = open_client(tiny_task, BalanceFL(), 1)  # class counts 8, 3, 3, 0
        client.samples.y = client.samples.y.clamp(max=rare - 1)
        client.counts = client.samples.counts(4)
        objective = BalanceFL(**OFF | {"kd": 3.0}).objective(client, {})
        plain = BalanceFL(**OFF).objective(client, {})
        client.model.eval()
        batch = client.samples.batch(torch.arange(14))
        assert (abs(objective(batch).item() - plain(batch).item()) > 0.1) == expected


def test_distillation_holds_the_received_model_where_nothing_is_owned(tiny_task):
    """The gradient of the distillation is 0 at the received model."""
    client = open_client(tiny_task, BalanceFL(), 2)
    objective = BalanceFL(**OFF | {"kd": 1.0}).objective(client, {})
    client.model.eval()
    loss = objective(client.samples.batch(torch.arange(9)))
    assert torch.autograd.grad(loss, client.model.classifier.weight)[0].abs().max() < 1e-6


@pytest.mark.parametrize("id", [0, 1])
def test_no_missing_class_or_a_single_one_is_not_distilled(tiny_task, id):
    client = open_client(tiny_task, BalanceFL(), id)
    client.model.eval()
    batch = client.samples.batch(torch.arange(8))
    losses = [BalanceFL(**OFF | {"kd": kd}).objective(client, {})(batch).item() for kd in (0, 5)]
    assert losses[0] == losses[1]


def test_entropy_by_hand():
    # p = (1/4, 3/4) and (1/2, 1/2)
    logits = tensor([[0.0, np.log(3)], [7.0, 7.0]], dtype=torch.float32)
    expected = (-(0.25 * np.log(0.25) + 0.75 * np.log(0.75)) + np.log(2)) / 2
    assert mean_entropy(logits).item() == pytest.approx(expected, rel=1e-5)


def test_entropy_is_subtracted(tiny_task):
    client = open_client(tiny_task, BalanceFL(), 1)
    client.model.eval()
    batch = client.samples.batch(torch.arange(14))
    plain, less = (BalanceFL(**OFF | {"entropy": e}).objective(client, {})(batch).item() for e in (0, 0.5))
    with torch.no_grad():
        assert plain - less == pytest.approx(0.5 * mean_entropy(client.model(batch.x)[:, :3]).item(), rel=1e-4)


def test_batches_hold_every_owned_class_alike(tiny_task):
    client = open_client(tiny_task, BalanceFL(), 1, configure(local={"epochs": 300}))
    sizes, labels = [], []
    for rows in balanced(client):
        sizes.append(len(rows))
        labels.append(client.samples.y[rows])
    assert sizes == [8, 6] * 300  # as many batches of the same sizes as without resampling
    shares = torch.cat(labels).bincount(minlength=4) / sum(sizes)
    # 4200 draws: a share of 1/3 has a standard deviation of 0.007
    assert torch.allclose(shares, tensor([1 / 3, 1 / 3, 1 / 3, 0]), atol=0.03)


def test_balanced_batches_of_one_sample_are_left_out_as_in_training(tiny_task):
    client = open_client(tiny_task, BalanceFL(), 2, configure(local={"epochs": 3}))  # nine samples
    assert [len(rows) for rows in balanced(client)] == [8, 8, 8]


def test_balanced_batches_of_another_size_are_as_many_as_the_epochs_have(tiny_task):
    client = open_client(tiny_task, BalanceFL(), 1)  # 14 samples
    assert [len(rows) for rows in balanced(client, 2, 4)] == [4, 4, 4, 2] * 2


def test_features_are_perturbed_as_often_as_their_class_is_rare_with_the_pooled_covariance(tiny_task):
    client = open_client(tiny_task, BalanceFL(), 0)  # class counts 12, 6, 4, 2
    z, y = features(client)
    augment = BalanceFL().augmentation(client)
    n, zero = 4000, torch.zeros(4000, z.shape[1])
    for c, chance in enumerate((0, 1 / 2, 2 / 3, 5 / 6)):
        moved = augment(zero, torch.full((n,), c)).abs().sum(1) > 0
        assert moved.float().mean().item() == pytest.approx(chance, abs=0.04)
    noise = augment(zero, torch.full((n,), 3))
    noise = noise[noise.abs().sum(1) > 0]
    sizes = [12, 6, 4, 2]
    expected = sum(size * np.cov(z[y == c].double().numpy().T) for c, size in enumerate(sizes)) / 24
    # a pool of 500 draws estimates the trace up to a relative error of about sqrt(2 / 500)
    assert noise.square().sum(1).mean().item() == pytest.approx(np.trace(expected), rel=0.2)
    assert POOL == 500
    assert len(noise.unique(dim=0)) <= POOL


def test_rows_of_the_perturbation_give_the_pooled_covariance_exactly(tiny_task, monkeypatch):
    client = open_client(tiny_task, BalanceFL(), 0)  # class counts 12, 6, 4, 2
    z, y = features(client)
    handed = []
    monkeypatch.setattr(balancefl, "perturb_along", lambda rows, *how: handed.append(rows) or torch.zeros(POOL, 1))
    BalanceFL().augmentation(client)
    expected = sum(size * np.cov(z[y == c].double().numpy().T) for c, size in enumerate([12, 6, 4, 2])) / 24
    assert np.allclose(handed[0].double().numpy().T @ handed[0].double().numpy(), expected, rtol=1e-4, atol=1e-9)


def test_perturbation_is_of_the_loss_alone_that_tells_classes(tiny_task, monkeypatch):
    """Distillation and entropy see unperturbed features."""
    client = open_client(tiny_task, BalanceFL(), 2)
    monkeypatch.setattr(BalanceFL, "augmentation", lambda self, client: lambda z, y: z + 1000)
    client.model.eval()
    batch = client.samples.batch(torch.arange(9))
    losses = [
        BalanceFL(**OFF | {"kd": 1.0, "entropy": 0.1, "fa": fa}).objective(client, {})(batch).item()
        for fa in (False, True)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)  # with one owned class the cross-entropy is 0 either way


def test_the_entropy_is_that_of_unperturbed_features(tiny_task, monkeypatch):
    client = open_client(tiny_task, BalanceFL(), 0)
    monkeypatch.setattr(BalanceFL, "augmentation", lambda self, client: lambda z, y: 3 * z + 1)
    client.model.eval()
    batch = client.samples.batch(torch.arange(9))
    terms = [
        BalanceFL(**OFF | {"fa": fa}).objective(client, {})(batch).item()
        - BalanceFL(**OFF | {"entropy": 1.0, "fa": fa}).objective(client, {})(batch).item()
        for fa in (False, True)
    ]
    assert terms[0] > 0.1
    assert terms[0] == pytest.approx(terms[1], rel=1e-4)


@pytest.mark.parametrize(
    "fields",
    [{"resample": False}, {"fa": False}, {"kd": 0.1}, {"temperature": 1.0}, {"entropy": 0.0}, {"missing": "kept"}],
    ids=str,
)
def test_every_field_changes_the_model(tiny_task, tmp_path, fields):
    assert not torch.equal(*(flat(run(tiny_task, tmp_path, BalanceFL(**given), rounds=1)) for given in ({}, fields)))


def test_statistics_of_a_client_leave_its_model_as_it_was(tiny_task):
    client = open_client(tiny_task, BalanceFL(), 0)
    before = fingerprint(client.model.state_dict())
    BalanceFL().objective(client, {})
    assert fingerprint(client.model.state_dict()) == before
