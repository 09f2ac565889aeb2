"""Other classifiers on SFD's encoder, from the sums that SFD collects anyway."""

import naive
import numpy as np
import pytest
import torch
from rounds import run
from test_sfd_oracle import QUICK

from raylt.core.training.fit_classifier import fit_classifier
from raylt.methods.sfd.controls import closed_form, draws
from raylt.methods.sfd.method import SFD
from raylt.ops.moments import NEVER, class_sums


def pooled(task, experiment):
    parts = [naive.client_data(task, id) for id in naive.clients_of(task)]
    z = torch.cat([naive.features(experiment.server.model, x) for x, _ in parts])
    return z.double(), torch.cat([y for _, y in parts])


def test_draws_have_the_mean_and_the_covariance_of_their_class():
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(60, 3, generator=generator) @ torch.diag(torch.tensor([3.0, 1.0, 0.3])) + 2
    y = torch.arange(60) % 2
    sums = class_sums(z, y)
    made = draws("gaussian", {1: sums[1], 0: sums[0]}, [8000, 5], 7)
    assert [len(part) for part in made] == [8000, 5]
    own = z[y == 1].double().numpy()
    assert np.allclose(made[0].double().mean(0), own.mean(0), atol=0.15)
    assert np.allclose(np.cov(made[0].double().numpy().T), np.cov(own.T, bias=True), rtol=0.1, atol=0.15)
    even = draws("means", {1: sums[1], 0: sums[0]}, [8000, 5], 7)[0].double()
    centred = z.double().numpy() - np.stack([z[y == c].double().mean(0).numpy() for c in y.tolist()])
    assert np.allclose(np.cov(even.numpy().T), np.eye(3) * (centred**2).mean(), rtol=0.05, atol=0.15)
    assert np.allclose(even.mean(0), own.mean(0), atol=0.1)


@pytest.mark.parametrize("kind", ["gaussian", "means"])
def test_draws_of_two_classes_are_independent(kind):
    z = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    sums = class_sums(z, torch.zeros(40, dtype=torch.int64))[0]
    one, other = draws(kind, {0: sums, 1: sums}, [50, 50], 7)
    assert abs(np.corrcoef(one.flatten().numpy(), other.flatten().numpy())[0, 1]) < 0.4


def test_noise_around_means_is_as_wide_for_a_narrow_class_as_for_a_wide_one():
    z = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    y = torch.arange(40) % 2
    z[y == 1] *= 20
    narrow, wide = draws("means", class_sums(z, y), [4000, 4000], 7)
    assert (narrow - narrow.mean(0)).std().item() == pytest.approx((wide - wide.mean(0)).std().item(), rel=0.05)


def test_closed_forms_leave_a_class_without_samples_out():
    z, y = torch.randn(9, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 2] * 4 + [2])
    for kind in ("ncm", "ridge"):
        made = closed_form(kind, class_sums(z, y), 3)
        assert made["bias"][1].item() == pytest.approx(NEVER)
        assert (made["bias"][[0, 2]].abs() < 10).all()


def test_nearest_means_and_ridge_regression_are_those_of_the_pooled_features(tiny_task, tmp_path):
    experiment = run(tiny_task, tmp_path, SFD(**QUICK, classifier="ncm"))
    z, y = pooled(tiny_task, experiment)
    weight = experiment.method.global_model(experiment.server).classifier.weight.double()
    for c in range(4):
        mean = z[y == c].mean(0)
        assert torch.allclose(weight[c], mean / mean.norm(), atol=1e-5)
    experiment = run(tiny_task, tmp_path, SFD(**QUICK, classifier="ridge"))
    x = np.concatenate([z.numpy(), np.ones((len(z), 1))], 1)
    rows = np.concatenate([x, 0.1 * np.eye(65)])  # the rows of sqrt(0.01) I are appended to the data
    solution = np.linalg.lstsq(rows, np.concatenate([np.eye(4)[y.numpy()], np.zeros((65, 4))]), rcond=None)[0]
    solution = solution / np.linalg.norm(solution[:-1], axis=0)
    classifier = experiment.method.global_model(experiment.server).classifier
    assert np.allclose(classifier.weight.detach().numpy(), solution[:-1].T, atol=1e-4)
    assert np.allclose(classifier.bias.detach().numpy(), solution[-1], atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gaussian", "means", "oracle"])
def test_what_is_drawn_has_saf_ss_sizes_and_trains_the_same_classifier(tiny_task, tmp_path, monkeypatch, kind):
    seen = []

    def catch(classifier, z, y, **given):
        seen.append((z, y))
        return fit_classifier(classifier, z, y, **given)

    monkeypatch.setattr("raylt.methods.sfd.method.fit_classifier", catch)
    for classifier in ("safs", kind):
        experiment = run(tiny_task, tmp_path, SFD(**QUICK, classifier=classifier))
    (ours, labels), (other, others_labels) = seen
    assert labels.tolist() == others_labels.tolist()
    assert ours.shape == other.shape
    assert not torch.equal(ours, other)
    z, y = pooled(tiny_task, experiment)
    for c in range(4):
        own = other[labels == c].double()
        if kind == "oracle":
            assert torch.cdist(own, z[y == c]).min(1).values.max() < 1e-5
            assert len(own.unique(dim=0)) > int((y == c).sum()) / 2  # 70 draws or more of at most 26 samples
        else:
            deviation = (own.var(0).sum() / len(own)).sqrt()
            assert (own.mean(0) - z[y == c].mean(0)).norm() < 3 * deviation
