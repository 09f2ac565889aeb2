import math

import numpy as np
import pytest
import torch
from bpfed_runs import GENERATOR, features_of, run

from raylt.methods.bpfed.method import BPFed, balance
from raylt.ops.moments import class_scatter, perturb, unpack

# covariance and augmentation, Eq. 12-17


@pytest.mark.parametrize("weight", ["n", "n-1"])
def test_covariance_of_one_client_is_the_weighted_mean_of_its_classes(weight):  # T-BPF-3
    z, y = features_of([9, 1, 5])  # a class of one sample counts as zero
    scatter, total = class_scatter(z, y, weight)
    expected = np.zeros((5, 5))
    for c, n in [(0, 9), (2, 5)]:
        expected += (n if weight == "n" else n - 1) * np.cov(z[y == c].double().numpy().T)
    assert total == (15 if weight == "n" else 12)
    assert np.allclose(scatter / total, expected / total)


def test_global_covariance_leaves_out_what_differs_between_the_means_of_clients():  # T-BPF-3
    def pooled(parts):
        z = torch.cat([z - z.mean(0) for z in parts]).double()
        return z.T @ z / (len(z) - len(parts))

    first, second = (features_of([12], seed=s)[0] for s in (1, 2))
    second = second - second.mean(0) + first.mean(0)
    for shift, equal in [(0.0, True), (2.0, False)]:
        parts = [first, second + shift]
        sums = [class_scatter(z, torch.zeros(12, dtype=torch.int64), "n-1") for z in parts]
        ours = sum(s for s, _ in sums) / sum(n for _, n in sums)
        assert torch.allclose(ours, pooled(parts))  # equal to the covariance within each client's classes, always
        together = torch.cov(torch.cat(parts).double().T, correction=2)
        # equal to the covariance of the class over both clients only if their means are equal
        assert torch.allclose(ours, together) == equal


@pytest.mark.parametrize("weight", ["n", "n-1"])
def test_what_clients_send_adds_up_to_the_global_covariance(tiny_task, tmp_path, weight):  # Eq. 16
    experiment, _ = run(tiny_task, tmp_path, BPFed(cov_weight=weight))
    host, model = experiment.fleet._host, experiment.server.model.eval()
    m_glo = next(unpack(m["covariance"], 64) for m in host.messages if "covariance" in m).double().numpy()
    top, bottom = np.zeros((64, 64)), 0
    for shard in tiny_task.shards:
        x = torch.from_numpy(((shard.x / 255 - 0.5) / 0.25).transpose(0, 3, 1, 2)).float()
        with torch.no_grad():
            z = model.encoder(x).double().numpy() if len(x) else np.zeros((0, 64))
        for c in range(4):
            own = z[shard.y == c]
            n = len(own) if weight == "n" else max(len(own) - 1, 0)
            top += n * np.cov(own.T) if len(own) > 1 else 0
            bottom += n
    assert np.allclose(m_glo, top / bottom, atol=1e-6 * np.abs(m_glo).max())
    replies = [reply for name, *_, reply in host.replies if name == "covariance"]
    assert all(reply.keys() == {"scatter", "n"} for reply in replies)
    assert {reply["scatter"].shape for reply in replies} == {(64 * 65 // 2,)}


def test_classes_of_equal_size_are_left_as_they_are():  # T-BPF-4
    z, y = features_of([4, 4, 4])
    same, labels = balance(z, y, torch.eye(5), GENERATOR)
    assert torch.equal(same, z)
    assert torch.equal(labels, y)


@pytest.mark.parametrize("counts", [[9, 4, 1], [9, 0, 2], [0, 6, 0], [1]], ids=str)
def test_balanced_set_brings_every_owned_class_to_the_size_of_the_largest(counts):  # T-BPF-5
    z, y = features_of(counts)
    covariance = 1e-4 * torch.eye(5)
    more, labels = balance(z, y, covariance, torch.Generator().manual_seed(0))
    assert torch.bincount(labels, minlength=len(counts)).tolist() == [max(counts) if n else 0 for n in counts]
    assert torch.equal(more[: len(z)], z)
    assert torch.equal(labels[: len(z)], y)
    for c, n in enumerate(counts):
        own, copies = z[y == c], more[len(z) :][labels[len(z) :] == c]
        if not len(copies):
            continue
        # perturbations are hundreds of times smaller than the distance between two originals, so each copy has one base
        distance, base = torch.cdist(copies, own).min(1)
        assert (distance > 0).all()
        used = torch.bincount(base, minlength=n)
        assert used.max() - used.min() <= 1
        assert (distance < 0.1).all()


@pytest.mark.parametrize("rank", [6, 2, 0])
def test_perturbations_have_the_covariance_asked_for(rank):  # T-BPF-6
    root = torch.randn(6, rank, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    covariance = root @ root.T
    n = 200_000
    eps = perturb(covariance.float(), n, torch.Generator().manual_seed(0))
    # the standard error of an entry of a covariance is below sqrt(2) * the largest variance / sqrt(n)
    bound = 5 * math.sqrt(2 / n) * max(covariance.diagonal().max().item(), 1e-9)
    assert (torch.cov(eps.T) - covariance).abs().max() < max(bound, 1e-6)
    assert (eps.mean(0).abs() < max(5 * math.sqrt(covariance.diagonal().max().item() / n), 1e-3)).all()
    if rank < 6:  # nothing leaves the subspace up to float32 rounding
        outside = torch.linalg.svd(root, full_matrices=True).U[:, rank:] if rank else torch.eye(6, dtype=torch.float64)
        assert (eps @ outside).abs().max() < 5e-3
