"""FedNCM, Fed3R and CCVR: the classifier from sums of features, against the pooled features of all clients."""

import numpy as np
import pytest
import torch
from rounds import ask_only, run
from tiny import fingerprint, make_task, open_client
from torch import Tensor, nn
from torch.nn import functional as F

from raylt.core.training.features import features
from raylt.core.training.fit_classifier import fit_classifier
from raylt.core.training.optimisers import SGD
from raylt.methods.classifiers.ccvr import CCVR
from raylt.methods.classifiers.fed3r import Fed3R
from raylt.methods.classifiers.fedncm import FedNCM
from raylt.methods.fedavg import FedAvg
from raylt.ops.closed_form import ridge_classifier, ridge_regression
from raylt.ops.moments import NEVER, class_sums, moments_from_sums
from raylt.tree import RunningSum

QUICK = {"virtual": 30, "retrain_epochs": 2}
METHODS = [FedNCM(), Fed3R(), CCVR(**QUICK)]


def pooled(task, experiment) -> tuple[Tensor, Tensor]:
    """Return the features (float64) and labels of all clients under the server's model."""
    parts = []
    for id in experiment.fleet.ids:
        client = open_client(task, experiment.method, id)
        client.receive(experiment.server.model.state_dict())
        parts.append(features(client))
    z, y = zip(*parts, strict=True)
    return torch.cat(z).double(), torch.cat(y)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_rounds_are_fedavg_and_the_encoder_stays_as_they_left_it(tiny_task, tmp_path, method):
    averaged, finished = (run(tiny_task, tmp_path, m) for m in (FedAvg(), method))
    assert fingerprint(finished.server.model.state_dict()) == fingerprint(averaged.server.model.state_dict())
    judged = method.global_model(finished.server)
    assert fingerprint(judged.encoder.state_dict()) == fingerprint(averaged.server.model.encoder.state_dict())
    assert fingerprint(judged.classifier.state_dict()) == fingerprint(finished.server.state["classifier"])


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_all_clients_take_part_in_the_statistics_also_those_that_did_not_train(
    tiny_task, tmp_path, monkeypatch, method
):
    ask_only(monkeypatch, method, [0])
    experiment = run(tiny_task, tmp_path, method, rounds=1)
    assert experiment.fleet.round_stats.traffic["statistics"].replies == 5


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_before_the_finish_the_averaged_model_is_judged(tiny_task, tmp_path, method):
    experiment = run(tiny_task, tmp_path, FedAvg(), rounds=1)
    assert method.global_model(experiment.server) is experiment.server.model


def test_fedncm_is_the_centralised_class_means(tiny_task, tmp_path):
    experiment = run(tiny_task, tmp_path, FedNCM())
    z, y = pooled(tiny_task, experiment)
    classifier = FedNCM().global_model(experiment.server).classifier
    for c in range(4):
        mean = z[y == c].mean(0)
        assert torch.allclose(classifier.weight[c].double(), mean / mean.norm(), atol=1e-6)
    assert not classifier.bias.any()


@pytest.mark.parametrize("normalise", [False, True])
def test_fed3r_is_the_centralised_ridge_regression(tiny_task, tmp_path, normalise):
    method = Fed3R(ridge=0.3, normalise=normalise)
    experiment = run(tiny_task, tmp_path, method)
    z, y = pooled(tiny_task, experiment)
    x = np.concatenate([z.numpy(), np.ones((len(z), 1))], 1)
    # least squares with the rows of sqrt(lambda) I appended to the data
    rows = np.concatenate([x, np.sqrt(0.3) * np.eye(x.shape[1])])
    labels = np.concatenate([np.eye(4)[y.numpy()], np.zeros((x.shape[1], 4))])
    solution = np.linalg.lstsq(rows, labels, rcond=None)[0]
    if normalise:
        solution = solution / np.linalg.norm(solution[:-1], axis=0)
    classifier = method.global_model(experiment.server).classifier
    assert np.allclose(classifier.weight.detach().numpy(), solution[:-1].T, atol=1e-5)
    assert np.allclose(classifier.bias.detach().numpy(), solution[-1], atol=1e-5)


def test_ridge_regression_by_hand():
    # (2 + 1) w = 6 and (4 + 1) w = 10
    a, b = torch.diag(torch.tensor([2.0, 4.0])), torch.tensor([[6.0], [10.0]])
    assert ridge_regression(a, b, 1.0).flatten().tolist() == [2.0, 2.0]


def test_a_class_of_one_sample_may_be_predicted_by_ridge_regression_and_one_of_none_is_not():
    z, y = torch.randn(9, 3, generator=torch.Generator().manual_seed(0)).double(), torch.tensor([0] * 5 + [1] * 3 + [2])
    x = F.pad(z, (0, 1), value=1.0)
    made = ridge_classifier(x.T @ x, x.T @ F.one_hot(y, 4).double(), 0.1)
    assert (made["bias"] == NEVER).tolist() == [False, False, False, True]
    assert (z[8].float() @ made["weight"].T + made["bias"]).argmax() == 2


def test_sums_over_any_split_are_those_of_the_pooled_features():
    z, y = torch.randn(40, 6, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 3
    fold = RunningSum()
    for rows in (slice(0, 7), slice(7, 8), slice(8, 40)):
        fold.add(class_sums(z[rows], y[rows]))
    for c, of_class in class_sums(z, y).items():
        for name, value in of_class.items():
            assert np.allclose(fold.sum()[c][name], value, rtol=1e-10)


def test_ccvr_draws_from_the_pooled_mean_and_unbiased_covariance():
    z = torch.randn(50, 4, generator=torch.Generator().manual_seed(0)) @ torch.diag(torch.tensor([3.0, 1.0, 0.5, 2.0]))
    sums = class_sums(z + 5, torch.zeros(50, dtype=torch.int64))[0]
    n, mean, covariance = moments_from_sums(sums)
    assert np.allclose(covariance * n / (n - 1), np.cov(z.double().numpy().T), atol=1e-6)
    drawn = CCVR(virtual=2000).gaussian(sums, torch.Generator().manual_seed(1)).double()
    assert drawn.shape == (2000, 4)
    assert torch.allclose(drawn.mean(0), mean, atol=0.3)
    assert np.allclose(np.cov(drawn.numpy().T), np.cov(z.double().numpy().T), rtol=0.15, atol=0.3)


def test_ccvr_of_a_single_sample_draws_copies_of_it():
    sums = class_sums(torch.tensor([[1.0, 2.0]]), torch.tensor([0]))[0]
    assert torch.allclose(CCVR(virtual=5).gaussian(sums, torch.Generator()), torch.tensor([[1.0, 2.0]]).expand(5, 2))


def test_ccvr_draws_with_the_unbiased_covariance_of_few_samples():
    # the variance of 0 and 2 is 2, the biased one 1; 4000 draws estimate it up to sqrt(2 / 4000)
    sums = class_sums(torch.tensor([[0.0], [2.0]]), torch.zeros(2, dtype=torch.int64))[0]
    drawn = CCVR(virtual=4000).gaussian(sums, torch.Generator().manual_seed(0))
    assert drawn.var().item() == pytest.approx(2, rel=0.1)


def test_ccvr_calibrates_the_averaged_classifier_on_the_virtual_features(tiny_task, tmp_path, monkeypatch):
    """Repeat the calibration on the same features by plain SGD, with half a cosine over two epochs."""
    seen = []

    def catch(classifier, z, y, **given):
        seen.append((fingerprint(classifier.state_dict()), z, y))
        return fit_classifier(classifier, z, y, **given)

    monkeypatch.setattr("raylt.methods.classifiers.family.fit_classifier", catch)
    experiment = run(tiny_task, tmp_path, CCVR(**QUICK))
    server, (z, y) = experiment.server, pooled(tiny_task, experiment)
    ((start, virtual, labels),) = seen
    assert start == fingerprint(server.model.classifier.state_dict())
    assert labels.tolist() == [c for c in range(4) for _ in range(30)]
    for c in range(4):
        deviation = (np.trace(np.cov(z[y == c].numpy().T)) / 30) ** 0.5  # standard deviation of the mean of 30 draws
        assert (virtual[labels == c].mean(0) - z[y == c].mean(0)).norm() < 3 * deviation, c
    naive = nn.Linear(z.shape[1], 4)
    naive.load_state_dict(server.model.classifier.state_dict())
    optimiser, order = SGD(naive.parameters(), 0.01, 0.9, 1e-5), torch.Generator().manual_seed(server.seed("calibrate"))
    for epoch in range(2):
        optimiser.lr = 0.01 * (0.5 if epoch else 1.0)
        for rows in torch.randperm(120, generator=order).split(64):
            optimiser.step(F.cross_entropy(naive(virtual[rows]), labels[rows]))
    made = CCVR(**QUICK).global_model(server).classifier
    assert torch.allclose(made.weight, naive.weight, atol=1e-6)
    assert torch.allclose(made.bias, naive.bias, atol=1e-6)
    assert not torch.allclose(made.weight, server.model.classifier.weight, atol=1e-3)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_class_that_no_client_holds_is_never_predicted(tmp_path, method):
    task = make_task()
    for shard in task.shards:
        shard.y[shard.y == 3] = 0  # class 3 is merged into class 0
    experiment = run(task, tmp_path, method)
    judged = method.global_model(experiment.server).eval()
    if method.name != "ccvr":  # ccvr has no draws for class 3 and keeps what FedAvg learned
        assert judged.classifier.bias[3].item() == pytest.approx(NEVER)
    x = open_client(task, method).samples.batch(torch.arange(24)).x
    with torch.no_grad():
        logits = judged(x)
    assert torch.isfinite(logits).all()
    assert (logits.argmax(1) != 3).all()


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (Fed3R, {"ridge": 10.0}),
        (Fed3R, {"normalise": False}),
        (CCVR, {"virtual": 20}),
        (CCVR, {"retrain_epochs": 4}),
        (CCVR, {"retrain_batch": 32}),
        (CCVR, {"retrain_lr": 0.05}),
        (CCVR, {"retrain_momentum": 0.0}),
        (CCVR, {"retrain_weight_decay": 1e-3}),
    ],
    ids=str,
)
def test_every_field_changes_the_classifier(tiny_task, tmp_path, kind, fields):
    base = QUICK if kind is CCVR else {}
    ends = [
        run(tiny_task, tmp_path, kind(**base | given), rounds=1).server.state["classifier"]["weight"]
        for given in ({}, fields)
    ]
    assert not torch.equal(*ends)
