import numpy as np
import pytest
import torch
from bpfed_runs import open_client
from torch.nn import functional as F

from raylt.core.client import Client
from raylt.core.training.optimisers import SGD
from raylt.core.training.sgd import sgd
from raylt.methods.bpfed.method import BPFed, mix
from raylt.seeds import seed_for

# Mixup, Eq. 7 and 8


def mixed(client, **fields):
    """Return the batches of a local training."""
    local = client.config.local
    return list(map(BPFed(**fields).mixed(client), client.rows(local.epochs, local.batch)))


def test_mixed_batches_are_those_of_equations_7_and_8(tiny_task):
    client = open_client(tiny_task)
    rng = np.random.default_rng(seed_for(0, "mixup", 1, 0))
    i, j = rng.integers(24, size=(2, 24))
    lam = rng.beta(1.0, 1.0, 24)
    shard = tiny_task.shards[0]
    x = (shard.x / 255 - 0.5) / 0.25
    batches, seen = mixed(client), []
    assert [len(batch.y) for batch in batches] == [8, 8, 8] * 2
    order = torch.Generator().manual_seed(seed_for(0, "order", "train", 1, 0))
    for epoch in range(2):  # the same triples in every epoch, in a new order
        for rows, batch in zip(torch.randperm(24, generator=order).split(8), batches[3 * epoch :][:3], strict=True):
            for place, row in enumerate(rows.tolist()):
                image = lam[row] * x[i[row]] + (1 - lam[row]) * x[j[row]]
                label = lam[row] * np.eye(4)[shard.y[i[row]]] + (1 - lam[row]) * np.eye(4)[shard.y[j[row]]]
                assert np.allclose(batch.x[place].permute(1, 2, 0).numpy(), image, atol=1e-5)
                assert np.allclose(batch.y[place].numpy(), label, atol=1e-6)
                seen.append(row)
    assert sorted(seen[:24]) == sorted(seen[24:]) == list(range(24))
    assert seen[:24] != seen[24:]


def test_triples_are_fresh_in_every_round_and_for_every_client(tiny_task):
    def labels(round, id=0):
        client = open_client(tiny_task)
        client.id = id
        client.begin("train", round)
        return torch.cat([batch.y for batch in mixed(client)][:3]).sort(0).values

    assert torch.equal(labels(1), labels(1))
    assert not torch.equal(labels(1), labels(2))
    assert not torch.equal(labels(1), labels(1, id=5))


def test_images_of_a_pair_are_augmented_each_by_itself(tiny_task):
    config = {"augment": "crop_flip"}
    client = open_client(tiny_task, **config)
    client.batch = lambda rows: calls.append(rows) or plain(rows)  # type: ignore[method-assign]
    plain, calls = Client.batch.__get__(client), []
    batches = mixed(client)
    assert len(calls) == 2 * len(batches)  # crops and flips are drawn twice per batch, once for each side of the pairs


def test_pairs_of_equal_images_keep_them_and_mixed_labels_give_the_mixed_loss(tiny_task):
    client = open_client(tiny_task)
    batch = client.samples.batch(torch.arange(8))
    lam = torch.rand(8, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(mix(batch, batch, lam, 4).x, batch.x, atol=1e-6)
    other = client.samples.batch(torch.arange(8, 16))
    both = mix(batch, other, lam, 4)
    logits = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    each = [F.cross_entropy(logits, b.y, reduction="none") for b in (batch, other)]
    assert F.cross_entropy(logits, both.y).item() == pytest.approx(
        (lam * each[0] + (1 - lam) * each[1]).mean().item(), rel=1e-5
    )


def test_lambda_of_one_is_plain_training_on_the_first_of_each_pair(tiny_task, monkeypatch):  # T-BPF-7
    class Ones(np.random.Generator):
        def beta(self, a, b, size=None):
            return np.ones(size) if size else 1.0

    monkeypatch.setattr(np.random, "default_rng", lambda seed: Ones(np.random.PCG64(seed)))
    first = np.random.default_rng(seed_for(0, "mixup", 1, 0)).integers(24, size=(2, 24))[0]
    ours, plain = open_client(tiny_task), open_client(tiny_task)
    sgd(ours, BPFed().objective(ours, {}), make=BPFed().mixed(ours))
    plain.model.train()
    optimiser = SGD(plain.model.parameters(), 0.05, 0.9)
    for rows in plain.rows(2, 8):
        batch = plain.samples.batch(torch.from_numpy(first)[rows])
        optimiser.step(F.cross_entropy(plain.model(batch.x), batch.y))
    for (name, a), b in zip(ours.model.state_dict().items(), plain.model.state_dict().values(), strict=True):
        assert torch.allclose(a, b, atol=1e-5), name


def test_one_lambda_per_batch_mixes_a_batch_with_itself(tiny_task):
    client = open_client(tiny_task)
    for batch in mixed(client, mixup="batch"):
        # a permutation keeps the sum of the labels when all pairs have one lambda
        own = torch.bincount(client.samples.y[batch.rows], minlength=4).float()
        assert torch.allclose(batch.y.sum(0), own, atol=1e-5)
        assert len(set(batch.y[batch.y > 0].mul(1e4).round().tolist())) <= 3  # the labels are lambda, 1 - lambda or 1


def test_sgd_takes_other_batches_and_counts_their_samples(tiny_task):
    client = open_client(tiny_task)
    rows, batches = list(client.rows(1, 8))[:2], {}
    losses = []
    mean = sgd(
        client,
        lambda batch: losses.append(client.model(batch.x).square().mean()) or losses[-1],
        rows=rows,
        make=lambda places: batches.setdefault(len(batches), client.batch(places)),
    )
    assert len(losses) == len(batches) == 2
    assert mean == pytest.approx(sum(loss.item() for loss in losses) / 2)


@pytest.mark.parametrize(("alpha", "mixes"), [(1.0, True), (0.0, False)])
def test_new_client_trains_its_classifier_with_mixup_too(tiny_task, monkeypatch, alpha, mixes):
    makers = []

    def watch(client, objective, params, make):
        makers.append(make)
        return 0.0

    monkeypatch.setattr("raylt.methods.bpfed.method.sgd", watch)
    method = BPFed(alpha=alpha, crt=False, lws=False)
    client = open_client(tiny_task)
    method.settle(client, {"model": method.shared(client.model)})
    assert len(makers) == 1
    assert (makers[0] is not None) == mixes
