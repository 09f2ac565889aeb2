"""Controls for CCVR: noisy class means, an oracle of real features, post-hoc logit adjustment."""

from types import SimpleNamespace

import naive
import numpy as np
import pytest
import torch
from rounds import run
from test_statistics_classifiers import pooled
from tiny import configure, fingerprint, make_experiment, make_task, open_client
from torch.nn import functional as F

from raylt.core.training.features import features
from raylt.core.training.fit_classifier import fit_classifier
from raylt.methods.classifiers.ccvr import CCVR
from raylt.methods.classifiers.fednpc import FedNPC
from raylt.methods.classifiers.means import NoisyMeans
from raylt.methods.classifiers.oracle import Oracle
from raylt.methods.classifiers.posthoc import PostHoc
from raylt.methods.fedavg import FedAvg
from raylt.models.split import linear
from raylt.ops.bootstrap import bootstrap_of_clients, class_bootstrap
from raylt.ops.moments import NEVER, class_sums, isotropic_deviation, moments_from_sums

QUICK = {"virtual": 40, "retrain_epochs": 2}


@pytest.fixture
def calibrations(monkeypatch):
    """Record each calibration of a classifier: its start, features, labels and options."""
    seen = []

    def catch(classifier, z, y, **given):
        seen.append((fingerprint(classifier.state_dict()), z, y, given))
        return fit_classifier(classifier, z, y, **given)

    monkeypatch.setattr("raylt.methods.classifiers.family.fit_classifier", catch)
    return seen


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "method", [NoisyMeans(**QUICK), Oracle(**QUICK), PostHoc(), FedNPC()], ids=lambda method: method.name
)
def test_rounds_are_fedavg_and_the_encoder_stays(tiny_task, tmp_path, method):
    averaged, finished = (run(tiny_task, tmp_path, m) for m in (FedAvg(), method))
    assert fingerprint(finished.server.model.state_dict()) == fingerprint(averaged.server.model.state_dict())
    judged = method.global_model(finished.server)
    assert fingerprint(judged.encoder.state_dict()) == fingerprint(averaged.server.model.encoder.state_dict())
    assert fingerprint(judged.classifier.state_dict()) != fingerprint(averaged.server.model.classifier.state_dict())
    assert method.global_model(averaged.server) is averaged.server.model  # before the last phase


def test_noisymeans_are_pooled_means_with_the_pooled_deviation_in_every_direction(tiny_task, tmp_path, calibrations):
    experiment = run(tiny_task, tmp_path, NoisyMeans(virtual=4000, retrain_epochs=1))
    z, y = (part.numpy() for part in pooled(tiny_task, experiment))
    means = np.stack([z[y == c].mean(0) for c in range(4)])
    deviation = np.sqrt(((z - means[y]) ** 2).mean())
    ((start, drawn, labels, _),) = calibrations
    assert start == fingerprint(experiment.server.model.classifier.state_dict())
    assert labels.tolist() == [c for c in range(4) for _ in range(4000)]
    for c in range(4):
        own = drawn[labels == c].double().numpy()
        # 5 standard deviations of the mean, and of the deviation, of 4000 draws
        assert np.abs(own.mean(0) - means[c]).max() < 5 * deviation / 4000**0.5
        assert own.std(0) == pytest.approx(np.full(z.shape[1], deviation), rel=5 / 8000**0.5)


def test_without_noise_there_are_only_the_means(tiny_task, tmp_path, calibrations):
    experiment = run(tiny_task, tmp_path, NoisyMeans(noise=0.0, **QUICK))
    z, y = pooled(tiny_task, experiment)
    ((_, drawn, labels, _),) = calibrations
    for c in range(4):
        assert torch.allclose(drawn[labels == c].double(), z[y == c].mean(0).expand(40, -1), atol=1e-5)


@pytest.mark.parametrize("kind", [CCVR, NoisyMeans])
def test_draws_of_two_classes_are_independent(monkeypatch, kind):
    sums = class_sums(torch.randn(9, 3, generator=torch.Generator().manual_seed(0)), torch.zeros(9).long())[0]
    monkeypatch.setattr(kind, "class_moments", lambda *_: {0: sums, 1: sums})
    server = SimpleNamespace(model=SimpleNamespace(dim=3))
    drawn = kind(virtual=50).draw(server, None, torch.Generator().manual_seed(0))
    assert torch.cdist(drawn[0], drawn[1]).min() > 0


def test_isotropic_deviation_by_hand():
    # class 0 has 0 and 2 along the first of two directions: variance (1, 0), 2 samples. Class 1 has one sample. The
    # mean over 3 samples of the mean over two directions is (2 * 0.5 + 1 * 0) / 3
    z, y = torch.tensor([[0.0, 0.0], [2.0, 0.0], [7.0, 7.0]]), torch.tensor([0, 0, 1])
    assert isotropic_deviation([moments_from_sums(sums) for sums in class_sums(z, y).values()]) == pytest.approx(
        (1 / 3) ** 0.5
    )


def test_bootstrap_of_clients_is_that_of_the_pooled_features():
    z0, z1 = torch.zeros(3, 1), torch.ones(1, 1)  # class 5 has three samples of client 0 and one of client 1
    drawn = [
        class_bootstrap(z, torch.full((len(z),), 5), 8000, torch.Generator().manual_seed(k))
        for k, z in enumerate((z0, z1))
    ]
    assert [of_client[5]["n"] for of_client in drawn] == [3, 1]
    made = bootstrap_of_clients(drawn, torch.Generator().manual_seed(2))
    assert made.keys() == {5}
    assert made[5].shape == (8000, 1)
    assert made[5].mean().item() == pytest.approx(1 / 4, abs=0.02)  # 4 standard deviations


def test_class_bootstrap_draws_every_feature_alike():
    z, y = torch.arange(6.0)[:, None], torch.tensor([0, 1, 0, 1, 0, 0])
    drawn = class_bootstrap(z, y, 4000, torch.Generator().manual_seed(0))
    values, times = drawn[0]["z"].flatten().unique(return_counts=True)
    assert values.tolist() == [0, 2, 4, 5]
    assert (times - 1000).abs().max() < 120  # 4 standard deviations
    assert drawn[1]["z"].unique().tolist() == [1, 3]


def test_class_bootstrap_is_random_where_fewer_are_drawn_than_there_are():
    z, y = torch.arange(1000.0)[:, None], torch.zeros(1000, dtype=torch.int64)
    one, other = (class_bootstrap(z, y, 100, torch.Generator().manual_seed(seed))[0]["z"] for seed in (0, 1))
    assert not torch.equal(one, other)
    assert one.max() > 900  # all 100 draws miss the last tenth with a chance of 0.9^100 = 3e-5


def test_oracle_is_calibrated_on_real_features_of_all_clients_balanced(tiny_task, tmp_path, calibrations):
    experiment = run(tiny_task, tmp_path, Oracle(virtual=300, retrain_epochs=2))
    z, y = pooled(tiny_task, experiment)
    ((start, drawn, labels, given),) = calibrations
    assert start == fingerprint(experiment.server.model.classifier.state_dict())
    assert labels.tolist() == [c for c in range(4) for _ in range(300)]
    for c in range(4):
        distance = torch.cdist(drawn[labels == c].double(), z[y == c])
        assert distance.min(1).values.max() < 1e-5  # each drawn feature is a real one of its class
        # all clients' features are drawn: the 300 draws miss one of the n features with a chance below n e^(-300 / n)
        assert len(distance.argmin(1).unique()) == int((y == c).sum())
    naive = linear(*(value.clone() for value in experiment.server.model.classifier.state_dict().values()))
    fit_classifier(naive, drawn, labels, **given)
    made = experiment.method.global_model(experiment.server).classifier
    assert torch.equal(made.weight, naive.weight)


def test_posthoc_takes_off_the_log_of_the_pooled_frequencies(tiny_task, tmp_path):
    experiment = run(tiny_task, tmp_path, PostHoc(tau=0.7))
    x = open_client(tiny_task, FedAvg()).samples.batch(torch.arange(24)).x
    with torch.no_grad():
        plain = experiment.server.model.eval()(x)
        judged = experiment.method.global_model(experiment.server).eval()(x)
    counts = torch.tensor([26, 21, 10, 3])  # sums of the columns of COUNTS
    assert torch.allclose(judged, plain - 0.7 * (counts / 60).log(), atol=1e-5)


def test_posthoc_asks_for_counts_without_a_message(tiny_task, tmp_path):
    experiment = make_experiment(configure(federation={"rounds": 1}), tiny_task, tmp_path, PostHoc())
    experiment.step()
    assert experiment.step().traffic["statistics"]["down"] == 0


def test_posthoc_with_tau_0_is_fedavg(tiny_task, tmp_path):
    experiment = run(tiny_task, tmp_path, PostHoc(tau=0.0), rounds=1)
    assert fingerprint(experiment.method.global_model(experiment.server).state_dict()) == fingerprint(
        experiment.server.model.state_dict()
    )


@pytest.mark.parametrize("method", [NoisyMeans(**QUICK), Oracle(**QUICK), PostHoc()], ids=lambda method: method.name)
def test_class_that_no_client_holds(tmp_path, calibrations, method):
    task = make_task()
    for shard in task.shards:
        shard.y[shard.y == 3] = 0
    experiment = run(task, tmp_path, method, rounds=1)
    judged = method.global_model(experiment.server)
    if method.name == "posthoc":
        assert judged.classifier.bias[3].item() == pytest.approx(NEVER)
    else:
        assert calibrations[0][2].unique().tolist() == [0, 1, 2]


def test_fednpc_trains_the_averaged_classifier_on_noise_with_random_labels(tiny_task, tmp_path):
    """Compare with SGD by hand, in which each step trains on all samples of a new draw, without weight decay."""
    experiment = run(tiny_task, tmp_path, FedNPC(samples=50, steps=4), local={"weight_decay": 0.1})
    server = experiment.server
    params = [value.clone().requires_grad_() for value in server.model.classifier.state_dict().values()]
    generator, losses = torch.Generator().manual_seed(server.seed("noise")), []
    for _ in range(4):
        z = torch.randn(50, server.model.dim, generator=generator)
        y = torch.randint(4, (50,), generator=generator)
        losses.append(lambda z=z, y=y: F.cross_entropy(F.linear(z, *params), y))
    naive.descend(params, iter(losses), 0.1, 0.9)
    made = experiment.method.global_model(server).classifier
    assert torch.allclose(made.weight, params[0], atol=1e-6)
    assert torch.allclose(made.bias, params[1], atol=1e-6)


def test_fednpc_shrinks_what_tells_noise_apart(tiny_task, tmp_path):
    experiment = run(tiny_task, tmp_path, FedNPC(samples=2000, steps=200), rounds=1)
    made, trained = (
        model.classifier.weight
        for model in (experiment.method.global_model(experiment.server), experiment.server.model)
    )
    # with random labels the same probability for all classes is best, so only differences between classes count
    assert (made - made.mean(0)).norm() < 0.2 * (trained - trained.mean(0)).norm()


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (FedNPC, {"samples": 50}),
        (FedNPC, {"steps": 3}),
        (FedNPC, {"retrain_lr": 0.2}),
        (FedNPC, {"retrain_momentum": 0.5}),
        (NoisyMeans, {"noise": 2.0}),
        (NoisyMeans, {"virtual": 20}),
        (NoisyMeans, {"retrain_epochs": 4}),
        (Oracle, {"virtual": 20}),
        (Oracle, {"retrain_epochs": 4}),
        (Oracle, {"retrain_batch": 32}),
        (Oracle, {"retrain_lr": 0.05}),
        (Oracle, {"retrain_momentum": 0.0}),
        (Oracle, {"retrain_weight_decay": 1e-3}),
        (PostHoc, {"tau": 0.5}),
    ],
    ids=str,
)
def test_every_field_changes_the_classifier(tiny_task, tmp_path, kind, fields):
    base = {} if kind in (PostHoc, FedNPC) else QUICK
    ends = [
        run(tiny_task, tmp_path, kind(**base | given), rounds=1).server.state["classifier"] for given in ({}, fields)
    ]
    assert fingerprint(ends[0]) != fingerprint(ends[1])


def test_balanced_re_training_on_real_features_lifts_the_few(tiny_task, tmp_path):
    """Cross-entropy on the rare class's features falls below that of the averaged classifier."""
    experiment = run(tiny_task, tmp_path, Oracle(virtual=200, retrain_epochs=20))
    client = open_client(tiny_task, FedAvg())
    client.receive(experiment.server.model.state_dict())
    z, y = features(client)
    few = y == 3
    with torch.no_grad():
        before = F.cross_entropy(experiment.server.model.classifier(z[few]), y[few])
        after = F.cross_entropy(experiment.method.global_model(experiment.server).classifier(z[few]), y[few])
    assert after < before
