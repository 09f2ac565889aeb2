import naive
import pytest
import torch
from rounds import ask_only, run, start
from tiny import open_client, private_states
from torch import tensor
from torch.nn import functional as F

from raylt import tree
from raylt.methods.fedproto import FedProto, prototypes_of
from raylt.methods.local import Local

MEANS, PRESENT = "prototypes.means", "prototypes.present"
FILLED = torch.tensor([[0.5], [1.0], [2.0], [3.0]]) * torch.eye(4, 64)  # prototypes of four lengths


def naive_rounds(task, weight: float, asked: list[list[int]]):
    """Return each client's model and the global prototypes by class, with loops over clients and samples."""
    models = {id: naive.new_model(task) for id in naive.clients_of(task)}
    prototypes: dict[int, torch.Tensor] = {}
    for t, ids in enumerate(asked, start=1):
        sums: dict[int, list[torch.Tensor]] = {}
        for id in ids:
            x, y = naive.client_data(task, id)
            local = models[id]

            def loss(rows, local=local, x=x, y=y):
                z = local.encoder(x[rows])
                pull = torch.zeros(())
                for own, c in zip(z, y[rows].tolist(), strict=True):
                    if c in prototypes:
                        pull = pull + (own - prototypes[c]).square().sum()
                return F.cross_entropy(local.classifier(z), y[rows]) + weight * pull / z.numel()

            naive.train(local, naive.epochs_of(len(y), naive.generator("order", "train", t, id)), loss)
            for own, c in zip(naive.features(local, x), y.tolist(), strict=True):
                sums.setdefault(c, []).append(own)
        prototypes.update({c: torch.stack(own).mean(0) for c, own in sums.items()})
    return models, prototypes


@pytest.mark.parametrize("asked", [[[0, 1, 2, 3, 5]] * 2, [[0, 1], [1, 2], [0, 2]]], ids=["all", "some"])
def test_rounds_equal_naive_code(tiny_task, tmp_path, monkeypatch, asked):
    models, prototypes = naive_rounds(tiny_task, 1.5, asked)
    rounds = iter(asked)
    monkeypatch.setattr(FedProto, "sample", lambda self, server, fleet: next(rounds))
    experiment = run(tiny_task, tmp_path, FedProto(weight=1.5), rounds=len(asked))
    own = experiment.server.model.state_dict()
    assert own[PRESENT].tolist() == [int(c in prototypes) for c in range(4)]
    for c, mean in prototypes.items():
        assert torch.allclose(own[MEANS][c], mean, atol=1e-4), c
    states = private_states(experiment)
    for id in {id for ids in asked for id in ids}:
        assert not naive.differences(dict(states[id]["model"]), naive.entries(models[id]), 1e-4), id


def test_only_prototypes_travel(tiny_task, tmp_path):
    experiment = start(tiny_task, tmp_path, FedProto())
    message = experiment.method.message(experiment.server)
    assert {path for path, _ in tree.leaves(message["model"])} == {MEANS, PRESENT}


def filled(client, present):
    with torch.no_grad():
        client.model.prototypes.means.copy_(FILLED)
        client.model.prototypes.present.copy_(tensor(present))


def test_clients_are_judged_by_the_nearest_prototype(tiny_task):
    client = open_client(tiny_task, FedProto(), 1)
    assert FedProto().client_model(client) is client.model  # the client has no prototypes yet
    filled(client, [1, 0, 1, 1])
    x = client.samples.batch(torch.arange(14)).x
    with torch.no_grad():
        judged = FedProto().client_model(client).eval()
        z = client.model.encoder(x)
        distances = torch.stack([(z - FILLED[c]).square().sum(1) for c in range(4)], 1)
        logits = judged(x)
    assert (logits[:, 1] < -1e8).all()
    shown = [0, 2, 3]
    assert torch.equal(logits[:, shown].argmax(1), distances[:, shown].argmin(1))
    # differences of logits equal differences of squared distances
    assert torch.allclose(logits[:, 0] - logits[:, 2], distances[:, 2] - distances[:, 0], atol=1e-5)
    assert FedProto(predict_by="classifier").client_model(client) is client.model
    with torch.no_grad():
        own = FedProto(predict_by="own_prototypes").client_model(client).eval()(x)
    allowed = [c for c in shown if client.counts[c] > 0]
    absent = [int(c not in allowed and c in shown) for c in range(4)]
    assert 0 < len(allowed) < len(shown)
    assert torch.equal(own[:, allowed], logits[:, allowed])
    assert (own.argmax(1)[:, None] == torch.tensor(allowed)).any(1).all()
    filled(client, absent)  # no prototype of a class that the client holds
    assert FedProto(predict_by="own_prototypes").client_model(client) is client.model


def test_term_is_the_mean_square_over_batch_and_dimensions(tiny_task):
    client = open_client(tiny_task, FedProto(), 0)
    filled(client, [1, 1, 0, 1])
    batch = client.samples.batch(torch.arange(8))
    client.model.eval()
    with torch.no_grad():
        loss = FedProto(weight=3.0).objective(client, {})(batch).item()
        z = client.model.encoder(batch.x)
        plain = F.cross_entropy(client.model.classifier(z), batch.y).item()
    squares = [(own - FILLED[c]).square().sum().item() for own, c in zip(z, batch.y.tolist(), strict=True) if c != 2]
    assert loss == pytest.approx(plain + 3 * sum(squares) / (8 * 64), rel=1e-5)


def test_prototypes_of_classes_that_no_asked_client_holds_stay(tiny_task, tmp_path, monkeypatch):
    ask_only(monkeypatch, FedProto(), [2])  # client 2 owns class 1 alone
    experiment = start(tiny_task, tmp_path, FedProto())
    with torch.no_grad():
        experiment.server.model.prototypes.means.fill_(7.0)
        experiment.server.model.prototypes.present.fill_(1)
    experiment.method.round(experiment.server, experiment.fleet)
    means, present = prototypes_of(experiment.server.model)
    assert present.all()
    assert (means[[0, 2, 3]] == 7.0).all()
    assert not (means[1] == 7.0).any()


def test_without_weight_clients_train_alone(tiny_task, tmp_path):
    alone, ours = (private_states(run(tiny_task, tmp_path, method)) for method in (Local(), FedProto(weight=0)))
    for id in alone:
        for name, value in alone[id]["model"].items():
            assert torch.equal(value, ours[id]["model"][name]), (id, name)


def test_every_field_counts(tiny_task, tmp_path):
    ends = [private_states(run(tiny_task, tmp_path, FedProto(weight=weight)))[0]["model"] for weight in (1.0, 10.0)]
    assert not torch.equal(ends[0]["encoder.stage1.0.weight"], ends[1]["encoder.stage1.0.weight"])
