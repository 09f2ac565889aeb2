import naive
import pytest
import torch
from refusals import refused
from rounds import ask_only, run, start
from tiny import COUNTS, configure, fingerprint, make_setup, open_client
from torch import nn
from torch.nn import functional as F

from raylt.methods.fedavg import FedAvg
from raylt.methods.rucr import RUCR

QUICK = {"size": 4, "retrain_epochs": 2, "retrain_batch": 8}


def prototypes(task, model, ids):
    """Return each class's weighted mean of the clients' unit means (zeros without an owner), and the counts [C]."""
    total, counts = torch.zeros(4, model.dim, dtype=torch.float64), torch.zeros(4)
    for id in ids:
        x, y = naive.client_data(task, id)
        z = naive.features(model, x).double()
        for c in y.unique().tolist():
            mean = z[y == c].mean(0)
            total[c] += (y == c).sum() * mean / mean.norm()
            counts[c] += (y == c).sum()
    return (total / counts.clamp(min=1)[:, None]).float(), counts


def objective(model, p, counts, own, weight, tau):
    """Return a function that computes cross-entropy and the cross-entropy of cosines for one batch."""

    def loss(x, y):
        z, value = model.encoder(x), 0.0
        for feature, c in zip(z, y.tolist(), strict=True):
            s = torch.stack(
                [F.cosine_similarity(feature, p[j], dim=0) / tau if own[j] else torch.zeros(()) for j in range(4)]
            )
            s = s + torch.eye(4)[c] * (counts[c] / counts.sum()).log()
            value = value - s.log_softmax(0)[c] / len(y)
        return F.cross_entropy(model.classifier(z), y) + weight * value

    return loss


def test_without_the_loss_on_prototypes_the_federated_model_is_fedavg_to_the_bit(tiny_task, tmp_path):
    parts = {"federation": {"participation": 0.5}}
    averaged, ours = (
        run(tiny_task, tmp_path, method, **parts) for method in (FedAvg(), RUCR(weight=0, retrain_rounds=1, **QUICK))
    )
    assert fingerprint(ours.server.model.state_dict()) == fingerprint(averaged.server.model.state_dict())
    judged = ours.method.global_model(ours.server)
    assert fingerprint(judged.encoder.state_dict()) == fingerprint(averaged.server.model.encoder.state_dict())
    assert fingerprint(judged.classifier.state_dict()) == fingerprint(ours.server.state["classifier"])


def test_objective_written_out(tiny_task, tmp_path):
    method = RUCR(weight=0.3, tau=0.5)
    experiment = start(tiny_task, tmp_path, method)
    message = method.global_prototypes(experiment.server, experiment.fleet, [1, 2])
    p, counts = prototypes(tiny_task, experiment.server.model, [1, 2])
    assert counts.tolist() == COUNTS[[1, 2]].sum(0).tolist()
    assert torch.allclose(message["means"], p, atol=1e-5)
    assert torch.allclose(message["pi"], counts / counts.sum())
    assert message["present"].tolist() == [True, True, True, False]
    client = open_client(tiny_task, method, 1)
    client.receive(experiment.server.model.state_dict())
    client.model.eval()
    batch = client.samples.batch(torch.arange(14))
    expected = objective(client.model, p, counts, client.counts > 0, 0.3, 0.5)(batch.x, batch.y)
    assert method.objective(client, message)(batch).item() == pytest.approx(expected.item(), rel=1e-5)


def test_a_class_of_the_client_without_a_prototype_is_not_shifted(tiny_task):
    """The reply of its only owner may have been lost."""
    client, pi = open_client(tiny_task, RUCR(), 2), torch.tensor([0.5, 0.0, 0.25, 0.25])  # the client has class 1 alone
    message = {"means": torch.eye(4, 64) * (pi > 0)[:, None], "present": pi > 0, "pi": pi}
    terms = RUCR(weight=1.0).objective(client, message).split(client.samples.batch(torch.arange(8)))
    # all cosines count as 0
    assert terms["prototypes"].item() == pytest.approx(torch.tensor(4.0).log().item())


@pytest.mark.parametrize("last", [False, True])
def test_round_is_that_of_naive_code(tiny_task, tmp_path, monkeypatch, last):
    """Compare prototypes, local training and, in a last round, classifiers re-trained on mixed features."""
    method, asked = RUCR(retrain_rounds=int(last), **QUICK), [0, 1, 3]
    ask_only(monkeypatch, method, asked)
    server = run(tiny_task, tmp_path, method, rounds=1).server
    before = naive.new_model(tiny_task)
    p, counts = prototypes(tiny_task, before, naive.clients_of(tiny_task) if last else asked)
    ends, heads, weights = [], [], []
    for id in asked:
        model, (x, y) = naive.new_model(tiny_task), naive.client_data(tiny_task, id)
        z = naive.features(model, x)
        call = naive.generator("order", "train", 1, id)
        loss = objective(model, p, counts, torch.bincount(y, minlength=4) > 0, 0.15, 0.9)
        naive.train(model, naive.epochs_of(len(y), call), lambda rows, x=x, y=y, loss=loss: loss(x[rows], y[rows]))
        ends.append(naive.entries(model))
        weights.append(len(y))
        if last:
            labels = torch.arange(4).repeat_interleave(4)
            rows = torch.randint(len(z), (16,), generator=call)
            lam = 0.35 + 0.6 * torch.rand(16, 1, generator=call)
            r = lam * p[labels] + (1 - lam) * z[rows] / z[rows].norm(dim=1, keepdim=True)
            head = nn.Linear(64, 4)
            head.load_state_dict({name: value.clone() for name, value in model.classifier.state_dict().items()})
            order = naive.generator("retrain", 1, id)
            steps = [rows for _ in range(2) for rows in torch.randperm(16, generator=order).split(8)]
            naive.descend(
                list(head.parameters()),
                ((lambda x=r[rows], c=labels[rows], head=head: F.cross_entropy(head(x), c)) for rows in steps),
                0.01,
            )
            heads.append(naive.entries(head))
    assert naive.differences(naive.entries(server.model), naive.average(ends, weights), atol=2e-5) == {}
    assert ("classifier" in server.state) == last
    if last:
        assert naive.differences(dict(server.state["classifier"]), naive.average(heads, weights), atol=2e-5) == {}
        assert not torch.equal(server.state["classifier"]["weight"], server.model.classifier.weight)


def test_mixed_features_are_of_classes_that_have_a_prototype_and_lie_between(tiny_task):
    z, means = torch.tensor([[3.0, 4.0]]), torch.tensor([[1.0, 0.0], [9.0, 9.0], [0.0, 2.0]])
    message = {"means": means, "present": torch.tensor([True, False, True])}
    r, y = RUCR(size=50, lam_low=0.25, lam_high=0.75).mixed(z, message, torch.Generator().manual_seed(0))
    assert y.tolist() == [0] * 50 + [2] * 50
    # features mixed with class 0: x = lam + 0.6 (1 - lam), y = 0.8 (1 - lam)
    lam = 1 - r[:50, 1] / 0.8
    assert torch.allclose(r[:50, 0], lam + 0.6 * (1 - lam))
    assert 0.25 <= lam.min() < 0.3 < 0.7 < lam.max() <= 0.75


def test_in_the_last_rounds_all_clients_are_asked_for_prototypes(tiny_task, tmp_path, monkeypatch):
    method = RUCR(retrain_rounds=1, **QUICK)
    ask_only(monkeypatch, method, [0, 2])
    experiment = start(tiny_task, tmp_path, method, federation={"rounds": 2})
    method.round(experiment.server, experiment.fleet)
    traffic = experiment.fleet.round_stats.traffic
    assert (traffic["prototypes"].replies, traffic["train"].replies) == (2, 2)
    experiment.server.round = 2
    experiment.fleet.begin(2)
    method.round(experiment.server, experiment.fleet)
    traffic = experiment.fleet.round_stats.traffic
    assert (traffic["prototypes"].replies, traffic["train"].replies) == (5, 2)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "field",
    [
        {"weight": 0.5},
        {"tau": 0.2},
        {"size": 6},
        {"lam_low": 0.7},
        {"lam_high": 0.8},
        {"retrain_epochs": 4},
        {"retrain_batch": 3},
        {"retrain_lr": 0.1},
        {"retrain_rounds": 0},
    ],
    ids=str,
)
def test_every_field_changes_the_judged_model(tiny_task, tmp_path, field):
    plain, other = (
        fingerprint(method.global_model(run(tiny_task, tmp_path, method, rounds=1).server).state_dict())
        for method in (RUCR(**QUICK), RUCR(**QUICK | field))
    )
    assert plain != other


def test_classifiers_are_re_trained_from_the_stage_on_that_a_branch_starts_from():
    assert RUCR(retrain_rounds=3).stages(10)["retraining"] == 7
    assert RUCR(retrain_rounds=3).stages(2)["retraining"] == 0


def test_an_interval_of_shares_that_is_the_wrong_way_round_is_refused(tiny_task):
    setup = make_setup(configure(), RUCR(lam_low=0.9, lam_high=0.2))
    with refused("config.out-of-range", key="method.lam_low", value=0.9):
        setup.method.prepare(tiny_task, setup.config, setup.new_model(tiny_task.spec))
