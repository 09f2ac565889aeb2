from dataclasses import replace

import naive
import pytest
import torch
from rounds import ask_only, flat, replies, run, start
from tiny import open_client, private_states
from torch.nn import functional as F

from raylt import tree
from raylt.methods.fedavg import FedAvg
from raylt.methods.feddyn import FedDyn

SIZES = {0: 24, 1: 14, 2: 9, 3: 1, 5: 12}
MEAN = 60 / 5


def naive_rounds(task, alpha: float, asked: list[list[int]]):
    """Return the mean of the last round's models, D and the clients' sums, with a loop over clients as in the text."""
    mean = naive.new_model(task)
    names = [name for name, _ in mean.named_parameters()]
    ahead = {name: torch.zeros_like(p) for name, p in mean.named_parameters()}
    sums = {id: {name: torch.zeros_like(p) for name, p in mean.named_parameters()} for id in SIZES}
    for t, ids in enumerate(asked, start=1):
        theta = naive.entries(mean)
        theta |= {name: theta[name] + ahead[name] for name in names}
        models = []
        for id in ids:
            x, y = naive.client_data(task, id)
            local = naive.new_model(task)
            local.load_state_dict(theta)
            a = alpha * MEAN / len(y)

            def loss(rows, local=local, x=x, y=y, a=a, d=sums[id], theta=theta):
                value = F.cross_entropy(local(x[rows]), y[rows])
                for name, p in local.named_parameters():  # the terms <-g, theta> with g = -a d, and the quadratic one
                    value = value + a * (p * d[name]).sum() + a / 2 * (p - theta[name]).square().sum()
                return value

            naive.train(local, naive.epochs_of(len(y), naive.generator("order", "train", t, id)), loss)
            models.append(naive.entries(local))
            sums[id] = {name: sums[id][name] + models[-1][name] - theta[name] for name in names}
        mean.load_state_dict(naive.average(models, [1.0] * len(models)))
        ahead = {name: sum(own[name] for own in sums.values()) / len(sums) for name in names}
    return naive.entries(mean), ahead, sums


@pytest.mark.parametrize("asked", [[[0, 1, 2, 3, 5]] * 2, [[0, 1], [1, 2], [0, 5]]], ids=["all", "some"])
def test_rounds_equal_naive_code(tiny_task, tmp_path, monkeypatch, asked):
    mean, ahead, sums = naive_rounds(tiny_task, 0.5, asked)
    rounds = iter(asked)
    monkeypatch.setattr(FedDyn, "sample", lambda self, server, fleet: next(rounds))
    experiment = run(tiny_task, tmp_path, FedDyn(alpha=0.5), rounds=len(asked))
    assert not naive.differences(dict(experiment.server.model.state_dict()), mean, 1e-4)
    assert not naive.differences(experiment.server.state["ahead"], ahead, 1e-4)
    states = private_states(experiment)
    for id in {id for ids in asked for id in ids}:
        assert not naive.differences(states[id]["state"]["updates"], sums[id], 1e-4), id


def test_gradient_is_that_of_the_text(tiny_task):
    """The gradient is grad L_k - g_k + alpha (theta - theta^{t-1}), where g_k = -alpha d_k."""
    client = open_client(tiny_task, FedDyn(), 1)
    params = dict(client.model.named_parameters())
    generator = torch.Generator().manual_seed(0)
    d = {name: torch.randn(p.shape, generator=generator) for name, p in params.items()}
    client.state["updates"] = d
    objective = FedDyn(alpha=0.2).objective(client, {"mean_samples": 28.0})  # twice the 14 samples of the client
    batch = client.samples.batch(torch.arange(8))
    client.model.eval()
    moved = {name: 0.1 * torch.randn(p.shape, generator=generator) for name, p in params.items()}
    with torch.no_grad():
        for name, p in params.items():
            p += moved[name]
    plain = torch.autograd.grad(F.cross_entropy(client.model(batch.x), batch.y), list(params.values()))
    whole = torch.autograd.grad(objective(batch), list(params.values()))
    for (name, _), g, w in zip(params.items(), plain, whole, strict=True):
        assert torch.allclose(w, g + 0.4 * d[name] + 0.4 * moved[name], atol=1e-5), name


def test_clients_get_the_mean_plus_d_and_the_mean_is_judged(tiny_task, tmp_path):
    experiment = start(tiny_task, tmp_path, FedDyn())
    experiment.method.round(experiment.server, experiment.fleet)
    message, own = experiment.method.message(experiment.server), experiment.server.model.state_dict()
    for name, ahead in experiment.server.state["ahead"].items():
        assert ahead.any(), name
        assert torch.allclose(message["model"][name], own[name] + ahead, atol=1e-6), name
    assert torch.equal(message["model"]["encoder.stage1.1.running_mean"], own["encoder.stage1.1.running_mean"])
    assert experiment.method.global_model(experiment.server) is experiment.server.model


def test_models_are_averaged_with_equal_weights_and_nothing_else_is_uploaded(tiny_task, tmp_path, monkeypatch):
    ask_only(monkeypatch, FedDyn(), [0, 2])
    experiment = start(tiny_task, tmp_path, FedDyn())
    before = tree.snapshot(experiment.server.model.state_dict())
    experiment.method.round(experiment.server, experiment.fleet)
    mean = experiment.server.model.state_dict()
    states = private_states(experiment)
    for name, p in experiment.server.model.named_parameters():
        both = sum(states[id]["state"]["updates"][name] for id in (0, 2)) / 2
        assert torch.allclose(p, before[name] + both, atol=1e-5), name
        assert torch.allclose(experiment.server.state["ahead"][name], 2 / 5 * both, atol=1e-5), name
    assert mean.keys() == before.keys()


def test_of_an_over_selected_round_those_that_replied_move_d(tiny_task, tmp_path):
    federation = {"participation": 0.5, "over_select": 0.5}  # asks five clients for three replies
    experiment = run(tiny_task, tmp_path, FedDyn(), rounds=1, federation=federation)
    updates = [state["state"]["updates"] for state in private_states(experiment).values() if state["state"]]
    assert len(updates) == 3
    for name, ahead in experiment.server.state["ahead"].items():
        assert torch.allclose(ahead, sum(own[name] for own in updates) / 5, atol=1e-5), name


def test_first_round_differs_from_fedavg_by_the_pull_and_the_weights_alone(tiny_task, tmp_path):
    weak = replies(start(tiny_task, tmp_path, FedAvg()), [0], "model", "loss")[0]["model"]
    experiment = start(tiny_task, tmp_path, FedDyn(alpha=1e-6))
    message = experiment.method.message(experiment.server)
    experiment.method.round(experiment.server, experiment.fleet)
    updates = private_states(experiment)[0]["state"]["updates"]
    for name, update in updates.items():
        assert torch.allclose(message["model"][name] + update, weak[name], atol=1e-4), name


def test_clients_that_join_late_do_not_count_in_the_mean_number_of_samples(tiny_task, tmp_path):
    experiment = start(replace(tiny_task, new_clients=(0,)), tmp_path, FedDyn())
    assert experiment.server.state["mean_samples"] == (14 + 9 + 1 + 12) / 4


def test_alpha_changes_the_model(tiny_task, tmp_path):
    ends = [flat(run(tiny_task, tmp_path, FedDyn(alpha=alpha), rounds=2)) for alpha in (0.01, 0.1)]
    assert not torch.equal(*ends)
