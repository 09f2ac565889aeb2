import copy

import naive
import pytest
import torch
from refusals import refused
from rounds import run, start
from tiny import configure, make_experiment
from torch import tensor
from torch.nn import functional as F

from raylt.core.training.optimisers import Adam
from raylt.errors import ConfigError
from raylt.methods.fedavg import FedAvg
from raylt.methods.fedic import FEDIC, Ensemble
from raylt.ops.distillation import divergence

QUICK = {"steps": 3, "distil_batch": 6}


def adam(params, loss_of, batches, lr, weight_decay=0.0):
    """Train with torch's Adam and its coupled weight decay."""
    optimiser = torch.optim.Adam(params, lr=lr, weight_decay=weight_decay)
    for rows in batches:
        optimiser.zero_grad()
        loss_of(rows).backward()
        optimiser.step()


def test_ensemble_by_hand():
    """Two clients, one image, two classes; the trust in a client is the sigmoid of the sum of its logits."""
    ensemble = Ensemble(1, 2)
    logits = tensor([[[1.0, -1.0]], [[2.0, 0.0]]])
    trust = [0.5, torch.sigmoid(tensor(2.0)).item()]
    share = [part / sum(trust) for part in trust]
    weighted = [share[0] * 1 + share[1] * 2, -share[0]]
    own = tensor([[4.0, 6.0]])
    made = ensemble(tensor([[3.0]]), logits, own)[0]  # the gate is 1/2
    assert made.tolist() == pytest.approx([(weighted[0] + 4) / 2, (weighted[1] + 6) / 2])
    with torch.no_grad():
        ensemble.gate_bias.fill_(100.0)  # the gate is 1
    assert ensemble(tensor([[3.0]]), logits, own)[0].tolist() == pytest.approx(weighted)
    with torch.no_grad():
        ensemble.gate_bias.fill_(0.0)
        ensemble.class_scale.copy_(tensor([2.0, 1.0]))
        ensemble.class_bias.copy_(tensor([0.0, 1.0]))
        ensemble.gate_weight.fill_(100.0)  # the gate is 1
    made = ensemble(tensor([[3.0]]), logits, own)[0]
    assert made.tolist() == pytest.approx([2 * weighted[0], weighted[1] + 1])
    with torch.no_grad():
        ensemble.client_scale.copy_(tensor([2.0, 1.0]))
        ensemble.client_bias.fill_(-1.0)
    trust = [0.5, torch.sigmoid(tensor(3.0)).item()]  # of 2 - 1 - 1 and 4 + 0 - 1
    share = [part / sum(trust) for part in trust]
    made = ensemble(tensor([[3.0]]), logits, own)[0]
    assert made.tolist() == pytest.approx([2 * (share[0] * 1 + share[1] * 2), -share[0] + 1])


def test_divergence_by_hand():
    # log 1, log 9 at T = 2 gives q = (1/4, 3/4); p = (1/2, 1/2); there is no factor T^2
    expected = 0.25 * tensor(0.5).log() + 0.75 * tensor(1.5).log()
    assert divergence(torch.zeros(1, 2), teacher=tensor([[1.0, 9.0]]).log(), temperature=2.0).item() == pytest.approx(
        expected.item()
    )


def test_round_equals_naive_code(tiny_task, tmp_path):
    """Compare local training, the mean, and the server's three trainings; the naive code takes the method's
    ensemble."""
    method = FEDIC(**QUICK, weight=0.7, temperature=3.0, distil_lr=0.01)
    models, sizes = [], []
    for id in naive.clients_of(tiny_task):
        x, y = naive.client_data(tiny_task, id)
        local = naive.new_model(tiny_task)

        def loss(rows, local=local, x=x, y=y):
            return F.cross_entropy(local(x[rows]), y[rows])

        naive.train(local, naive.epochs_of(len(y), naive.generator("order", "train", 1, id)), loss)
        models.append(local.eval())
        sizes.append(len(y))
    student = naive.new_model(tiny_task)
    student.load_state_dict(naive.average([naive.entries(m) for m in models], sizes))
    x = naive.pixels(torch.from_numpy(tiny_task.auxiliary.x))
    y = torch.from_numpy(tiny_task.auxiliary.y)
    generator = naive.generator("server", "batches", 1)

    def draws():
        return [torch.randperm(len(y), generator=generator)[:6] for _ in range(3)]

    tuned = copy.deepcopy(student).train()
    adam(tuned.parameters(), lambda rows: F.cross_entropy(tuned(x[rows]), y[rows]), draws(), 0.01, 2e-4)
    tuned.eval()
    ensemble = Ensemble(64, 4)

    def answer(rows):
        with torch.no_grad():
            z = sum(m.encoder(x[rows]) for m in models) / len(models)
            logits = torch.stack([m(x[rows]) for m in models])
            own = tuned(x[rows])
        return ensemble(z, logits, own)

    adam(ensemble.parameters(), lambda rows: F.cross_entropy(answer(rows), y[rows]), draws(), 0.01)
    student.train()
    figures = []

    def mixed(rows):
        q = (answer(rows).detach() / 3).softmax(1)
        logits = student(x[rows])
        soft = (q * (q.log() - (logits / 3).log_softmax(1))).sum(1).mean()
        hard = F.cross_entropy(logits, y[rows])
        figures.append((hard.item(), soft.item()))
        return 0.7 * soft + 0.3 * hard

    adam(student.parameters(), mixed, draws(), 0.01, 2e-4)
    experiment = make_experiment(configure(federation={"rounds": 1}), tiny_task, tmp_path, method)
    experiment.server.model.eval()  # as an evaluation leaves it, before every round but the first
    experiment.step()
    assert not naive.differences(dict(experiment.server.model.state_dict()), naive.entries(student), 1e-4)
    assert not naive.differences(experiment.server.state["ensemble"], naive.entries(ensemble), 1e-4)
    reported = [experiment.server.figures[name] for name in ("labels_loss", "distillation")]
    assert reported == pytest.approx(figures[-1], rel=1e-3)


def test_networks_are_trained_with_weight_decay_and_the_ensemble_without(tiny_task, tmp_path, monkeypatch):
    """In so few steps the decay of 2e-4 hardly moves a weight."""
    made = []

    def recorded(params, lr, weight_decay=0.0):
        params = list(params)
        made.append((sum(p.numel() for p in params), lr, weight_decay))
        return Adam(params, lr, weight_decay)

    monkeypatch.setattr("raylt.methods.fedic.Adam", recorded)
    run(tiny_task, tmp_path, FEDIC(**QUICK), rounds=1)
    network, ensemble = (sum(p.numel() for p in m.parameters()) for m in (naive.new_model(tiny_task), Ensemble(64, 4)))
    assert made == [(network, 0.001, 2e-4), (ensemble, 0.001, 0.0), (network, 0.001, 2e-4)]


def test_ensemble_keeps_its_weights_in_the_next_round(tiny_task, tmp_path):
    one, two = (run(tiny_task, tmp_path, FEDIC(**QUICK), rounds=n).server.state["ensemble"] for n in (1, 2))
    fresh = Ensemble(64, 4).class_scale
    # three steps of Adam move a weight by at most 0.003
    assert 0 < (one["class_scale"] - fresh).abs().max() < 0.0031
    assert (two["class_scale"] - fresh).abs().max() > 0.0031


def test_server_without_images_or_statistics_is_refused(tiny_task, tmp_path):
    from dataclasses import replace

    model = start(tiny_task, tmp_path, FEDIC()).server.model
    with refused("config.conflict", ConfigError, key="data.auxiliary"):
        FEDIC().prepare(replace(tiny_task, auxiliary=None), configure(), model)
    with refused("config.conflict", ConfigError, key="federation.batchnorm"):
        FEDIC().prepare(tiny_task, configure(federation={"batchnorm": "local"}), model)
    FEDIC().prepare(tiny_task, configure(), model)


@pytest.mark.parametrize(
    "fields", [{"steps": 2}, {"distil_batch": 4}, {"distil_lr": 0.01}, {"weight": 0.0}, {"temperature": 1.0}], ids=str
)
def test_every_field_changes_the_model(tiny_task, tmp_path, fields):
    plain, other = (
        run(tiny_task, tmp_path, FEDIC(**(QUICK | given)), rounds=1).server.model.state_dict() for given in ({}, fields)
    )
    assert not torch.equal(plain["classifier.weight"], other["classifier.weight"])


def test_it_is_more_than_fedavg(tiny_task, tmp_path):
    averaged, ours = (
        run(tiny_task, tmp_path, method, rounds=1).server.model.state_dict() for method in (FedAvg(), FEDIC(**QUICK))
    )
    assert not torch.equal(averaged["classifier.weight"], ours["classifier.weight"])
