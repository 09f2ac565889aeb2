import numpy as np
import pytest
import torch
from fedsm_runs import QUICK, message_of, open_client, run, states_of
from tiny import configure, make_experiment
from torch.nn import functional as F

from raylt.core.checkpoint.checkpoint import hash_tensors
from raylt.core.training.features import features
from raylt.core.training.optimisers import SGD
from raylt.methods.fedsm.method import FedSM
from raylt.seeds import seed_for

# pseudo-features, Eq. 4-6


@pytest.mark.parametrize("lam", [0.0, 1.0])
def test_lambda_of_one_gives_prototypes_and_of_zero_local_features(tiny_task, npz, lam):  # T-FSM-5
    method = FedSM(teacher=npz, lam_low=lam, lam_high=lam, size=20)
    client = open_client(tiny_task, method, id=1, state=states_of(tiny_task))  # the client lacks class 3
    message = message_of(client)
    r, y = method.pseudo_features(client, message)
    assert torch.bincount(y).tolist() == [20] * 4
    if lam == 1:
        assert torch.equal(r, message["means"][y])
    else:
        z, _ = features(client)
        assert (r[:, None] == z).all(2).any(1).all()


@pytest.mark.parametrize("partner", ["probabilistic", "deterministic", "random"])
@pytest.mark.parametrize("id", [0, 2, 3])  # client 2 owns one class, client 3 has one sample
@pytest.mark.parametrize("unit", ["class", "sample"])
def test_every_class_with_a_prototype_gets_its_share_and_no_other(tiny_task, npz, unit, id, partner):  # T-FSM-8
    method = FedSM(teacher=npz, size=7, partner=partner, unit=unit)
    client = open_client(tiny_task, method, id=id, state=states_of(tiny_task))
    r, y = method.pseudo_features(client, message_of(client, (True, False, True, True)))
    assert r.shape == (21, 64)
    assert torch.bincount(y, minlength=4).tolist() == [7, 0, 7, 7]


def test_lambdas_are_uniform_in_their_range_and_one_for_each_pair(tiny_task, npz):
    method = FedSM(teacher=npz, size=500)
    client = open_client(tiny_task, method, id=3, state=states_of(tiny_task))  # with one sample there is one z
    message = message_of(client)
    r, y = method.pseudo_features(client, message)
    z, means = features(client)[0], message["means"][y]
    lam = ((r - z) * (means - z)).sum(1) / (means - z).square().sum(1)
    assert lam.min() >= 0.65 - 1e-4
    assert lam.max() <= 0.9 + 1e-4
    # the mean of 2000 draws from U(0.65, 0.9): 0.775 with a standard error of 0.25 / sqrt(12 * 2000)
    assert abs(lam.mean().item() - 0.775) < 5 * 0.25 / (12 * 2000) ** 0.5
    assert len(lam.mul(1e6).round().unique()) > 1900


def test_without_a_teacher_relevance_is_uniform(tiny_task):
    kinds = [FedSM(teacher="none", partner=partner) for partner in ("probabilistic", "random")]
    first, second = (method.pseudo_features(c := open_client(tiny_task, method), message_of(c)) for method in kinds)
    assert torch.equal(first[0], second[0])


def test_without_distillation_partners_are_still_drawn_by_relevance(tiny_task, npz):
    drawn = [
        method.pseudo_features(c := open_client(tiny_task, method, state=states_of(tiny_task)), message_of(c))[0]
        for method in (FedSM(teacher=npz), FedSM(teacher=npz, kd=0), FedSM(teacher=npz, kd=0, partner="random"))
    ]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[1], drawn[2])


def test_class_that_no_client_holds_gets_no_pseudo_features_at_any_client(tiny_task, tmp_path, npz):
    experiment = make_experiment(configure(), tiny_task, tmp_path, FedSM(teacher=npz, size=6))
    experiment.fleet.begin(1)
    experiment.fleet.ids = [2, 3]  # the clients own class 1 and class 2
    message = experiment.method.global_prototypes(experiment.server, experiment.fleet)
    assert message["present"].tolist() == [False, True, True, False]
    client = open_client(tiny_task, experiment.method, state=states_of(tiny_task))
    _, y = experiment.method.pseudo_features(client, message)
    assert torch.bincount(y, minlength=4).tolist() == [0, 6, 6, 0]


def test_prototypes_are_those_of_the_global_encoder_over_all_clients(tiny_task, tmp_path, npz):  # T-FSM-4
    experiment, _ = run(tiny_task, tmp_path, FedSM(teacher=npz, **QUICK), until=1, federation={"participation": 0.3})
    model = experiment.server.model.eval()
    x = np.concatenate([shard.x for shard in tiny_task.shards])
    y = np.concatenate([shard.y for shard in tiny_task.shards])
    with torch.no_grad():
        z = model.encoder(torch.from_numpy(((x / 255 - 0.5) / 0.25).transpose(0, 3, 1, 2)).float()).numpy()
    experiment.step()
    means = next(m["means"] for m in experiment.fleet._host.messages if "means" in m)
    for c in range(4):
        assert np.allclose(means[c], z[y == c].mean(0), atol=1e-5)


# re-training, Eq. 7


def test_retraining_is_that_of_equation_7_and_touches_the_classifier_alone(tiny_task, npz):  # T-FSM-7
    method = FedSM(teacher=npz, size=9, retrain_epochs=3, retrain_batch=8)
    client, twin = (open_client(tiny_task, method, id=1, state=states_of(tiny_task)) for _ in range(2))
    message = message_of(client)
    before = hash_tensors(client.model.entries("encoder."))
    method.fit(client, client.model.classifier, message)
    assert hash_tensors(client.model.entries("encoder.")) == before
    r, y = method.pseudo_features(twin, message)
    head = torch.nn.Linear(64, 4)
    head.load_state_dict(twin.model.classifier.state_dict())
    order = torch.Generator().manual_seed(seed_for(0, "retrain", 1, 1))
    optimiser = SGD(head.parameters(), 0.01)
    for _ in range(3):
        for rows in torch.randperm(36, generator=order).split(8):
            optimiser.step(F.cross_entropy(head(r[rows]), y[rows]))
    assert torch.equal(head.weight, client.model.classifier.weight)
    assert not torch.equal(head.weight, twin.model.classifier.weight)


def test_retrained_classifiers_are_averaged_and_fed_back(tiny_task, tmp_path, npz):
    experiment, _ = run(tiny_task, tmp_path, FedSM(teacher=npz, **QUICK))
    replies = {id: reply for name, _, id, reply in experiment.fleet._host.replies if name == "train_and_retrain"}
    sizes = {id: len(tiny_task.shards[id]) for id in replies}
    mean = sum(n * replies[id]["model"]["classifier.weight"].double() for id, n in sizes.items()) / sum(sizes.values())
    assert torch.allclose(experiment.server.model.classifier.weight.double(), mean, atol=1e-6)
    assert experiment.method.global_model(experiment.server) is experiment.server.model


@pytest.mark.parametrize("fields", [{}, {"encoders": "trained"}, {"retrain": "after"}], ids=str)
def test_reported_loss_of_the_retraining_is_the_clients_mean(tiny_task, tmp_path, monkeypatch, fields):
    fit, losses = FedSM.fit, {}

    def watched(self, client, classifier, message):
        losses[client.id] = fit(self, client, classifier, message)
        return losses[client.id]

    monkeypatch.setattr(FedSM, "fit", watched)
    _, reports = run(tiny_task, tmp_path, FedSM(teacher="none", **QUICK | fields))
    sizes = {id: len(tiny_task.shards[id]) for id in losses}
    mean = sum(n * losses[id] for id, n in sizes.items()) / sum(sizes.values())
    assert len(losses) == 5
    assert reports[-1].figures["retrain_loss"] == pytest.approx(mean, rel=1e-6)
    assert mean != pytest.approx(reports[-1].figures["loss"], rel=1e-3)
