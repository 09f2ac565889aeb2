import copy

import naive
import pytest
import torch
from rounds import run, start
from tiny import fingerprint, open_client, private_states
from torch.nn import functional as F

from raylt import tree
from raylt.methods.fedala import FedALA, weights_settled
from raylt.methods.fedavg import FedAvg


def naive_mix(task, id, order, received, own, weights, method):
    """Return the mixture and W, computed weight by weight, with the order that the call draws next."""
    x, y = naive.client_data(task, id)
    net = naive.new_model(task)
    net.load_state_dict(received)
    net.train()
    names = [n for n, _ in net.named_parameters() if method.scope == "all" or n.startswith("classifier")]
    params = dict(net.named_parameters())
    first = weights is None
    weights = {n: torch.ones_like(params[n]) for n in names} if first else dict(weights)
    rows = torch.randperm(len(y), generator=order)[: max(int(method.share * len(y)), min(len(y), 2))]
    losses = []

    def put():
        with torch.no_grad():
            for n in names:
                params[n].copy_(own[n] + (received[n] - own[n]) * weights[n])

    put()
    batches = [part for part in rows.split(naive.BATCH) if len(part) > 1]
    while batches:
        for part in batches:
            loss = F.cross_entropy(net(x[part]), y[part])
            gradients = torch.autograd.grad(loss, [params[n] for n in names])
            for n, g in zip(names, gradients, strict=True):
                weights[n] = (weights[n] - method.eta * g * (received[n] - own[n])).clamp(0, 1)
            put()
        losses.append(loss.item())
        recent = torch.tensor(losses[-10:])
        if not first or len(losses) == 100 or (len(losses) > 10 and recent.std(correction=0) < 0.1):
            break
    return {n: params[n].detach().clone() for n in names}, weights


@pytest.mark.parametrize("scope", ["classifier", "all"])
def test_three_rounds_equal_naive_code(tiny_task, tmp_path, scope):
    method = FedALA(scope=scope, eta=5.0)
    model = naive.new_model(tiny_task)
    own, weights = {}, {}
    for t in (1, 2, 3):
        received, models, sizes = naive.entries(model), [], []
        for id in naive.clients_of(tiny_task):
            x, y = naive.client_data(tiny_task, id)
            order = naive.generator("order", "train", t, id)
            begin = received
            if id in own:
                mixture, weights[id] = naive_mix(tiny_task, id, order, received, own[id], weights.get(id), method)
                begin = received | mixture
            local = naive.new_model(tiny_task)
            local.load_state_dict(begin)

            def loss(rows, local=local, x=x, y=y):
                return F.cross_entropy(local(x[rows]), y[rows])

            naive.train(local, naive.epochs_of(len(y), order), loss)
            own[id] = naive.entries(local)
            models.append(own[id])
            sizes.append(len(y))
        model.load_state_dict(naive.average(models, sizes))
    experiment = run(tiny_task, tmp_path, method, rounds=3)
    assert not naive.differences(dict(experiment.server.model.state_dict()), naive.entries(model), 1e-3)
    states = private_states(experiment)
    for id, entries in own.items():
        if tiny_task.sizes[id] == 1:  # a client of one sample takes no step
            continue
        assert not naive.differences(dict(states[id]["state"]["personal"]), entries, 1e-3), id
        assert not naive.differences(dict(states[id]["state"]["weights"]), weights[id], 1e-3), id
    assert any((w < 1).any() for of_client in weights.values() for w in of_client.values())


def test_first_round_is_fedavg_to_the_bit_and_the_second_is_not(tiny_task, tmp_path):
    ends = [run(tiny_task, tmp_path, method, rounds=1) for method in (FedAvg(), FedALA())]
    assert fingerprint(ends[0].server.model.state_dict()) == fingerprint(ends[1].server.model.state_dict())
    ends = [run(tiny_task, tmp_path, method, rounds=2) for method in (FedAvg(), FedALA(eta=5.0))]
    assert fingerprint(ends[0].server.model.state_dict()) != fingerprint(ends[1].server.model.state_dict())


def test_weights_are_learned_to_convergence_once_and_then_for_one_epoch():
    assert not weights_settled([], first=False)
    assert weights_settled([1.0], first=False)
    assert not weights_settled([1.0] * 10, first=True)
    assert weights_settled([1.0] * 11, first=True)
    assert not weights_settled([0.0, 1.0] * 10, first=True)
    assert not weights_settled([0.0, 1.0] * 49 + [0.0], first=True)
    assert weights_settled([0.0, 1.0] * 50, first=True)


def test_mixture_lies_between_the_two_models(tiny_task):
    client = open_client(tiny_task, FedALA(), 0)
    before = copy.deepcopy(client.model.state_dict())
    client.state["personal"] = {name: value + 1 for name, value in before.items()}
    mixture = FedALA(eta=2.0).mix(client)
    assert mixture.keys() == {"classifier.weight", "classifier.bias"}
    for name, value in mixture.items():
        assert (value >= before[name] - 1e-6).all()
        assert (value <= before[name] + 1 + 1e-6).all()
        assert ((value - before[name]) > 1e-3).any(), name  # a part of the value is the client's own
    assert fingerprint(client.model.state_dict()) == fingerprint(before)  # the client's model is unchanged


def test_a_share_below_two_samples_takes_two(tiny_task):
    """A batch of one sample trains nothing."""
    client = open_client(tiny_task, FedALA(), 0)
    before = copy.deepcopy(client.model.state_dict())
    client.state["personal"] = {name: value + 1 for name, value in before.items()}
    mixture = FedALA(eta=2.0, share=0.01).mix(client)
    assert ((mixture["classifier.weight"] - before["classifier.weight"]) > 1e-3).any()


def test_clients_are_judged_by_their_last_model(tiny_task, tmp_path):
    experiment = run(tiny_task, tmp_path, FedALA(), rounds=1, federation={"participation": 0.3})
    states = private_states(experiment)
    own = {id: state["state"]["personal"] for id, state in states.items() if "personal" in state["state"]}
    assert 0 < len(own) < len(states)
    for id in states:
        client = open_client(tiny_task, FedALA(), id)
        client.state = {"personal": own[id]} if id in own else {}
        client.receive(experiment.server.model.state_dict())
        judged = FedALA().client_model(client).state_dict()
        assert fingerprint(judged) == fingerprint(own[id] if id in own else experiment.server.model.state_dict())


def test_share_and_eta_change_the_model(tiny_task, tmp_path):
    experiments = [run(tiny_task, tmp_path, FedALA(**f), rounds=2) for f in ({}, {"share": 0.3}, {"eta": 5.0})]
    ends = [fingerprint(experiment.server.model.state_dict()) for experiment in experiments]
    assert len(set(map(str, ends))) == 3
    assert start(tiny_task, tmp_path, FedALA()).method == FedALA()


def test_a_client_of_one_sample_takes_no_step_and_is_evaluated_by_the_global_model(tiny_task):
    (id,) = [id for id, n in enumerate(tiny_task.sizes) if n == 1]
    client = open_client(tiny_task, FedALA(), id)
    client.begin("train", 1)
    FedALA().train(client, {"model": tree.snapshot(client.model.state_dict())})
    assert "personal" not in client.state
