import naive
import pytest
import torch
from rounds import run, start
from tiny import fingerprint, open_client, private_states
from torch.nn import functional as F

from raylt import tree
from raylt.methods.fedavg import FedAvg
from raylt.methods.fedbabu import FedBABU

FIRST = "encoder.stage1.0.weight"


def naive_round(task, model, t):
    """Do one round, in which the encoder is trained under the drawn classifier; return the mean."""
    models, sizes = [], []
    for id in naive.clients_of(task):
        x, y = naive.client_data(task, id)
        local = naive.new_model(task)
        local.load_state_dict(naive.entries(model))
        for p in local.classifier.parameters():
            p.requires_grad_(False)
        local.train()
        order = naive.generator("order", "train", t, id)
        losses = (
            (lambda rows=rows, local=local, x=x, y=y: F.cross_entropy(local(x[rows]), y[rows]))
            for rows in naive.epochs_of(len(y), order)
        )
        naive.descend(list(local.encoder.parameters()), losses, naive.LR, naive.MOMENTUM)
        models.append(naive.entries(local))
        sizes.append(len(y))
    model.load_state_dict(naive.average(models, sizes))


@pytest.mark.parametrize("tune", ["all", "encoder", "classifier"])
def test_rounds_and_fine_tuning_equal_naive_code(tiny_task, tmp_path, tune):
    model = naive.new_model(tiny_task)
    for t in (1, 2):
        naive_round(tiny_task, model, t)
    experiment = run(tiny_task, tmp_path, FedBABU(tune_epochs=3, tune=tune), rounds=2)
    assert not naive.differences(dict(experiment.server.model.state_dict()), naive.entries(model), 1e-4)
    for id in (0, 2):
        x, y = naive.client_data(tiny_task, id)
        local = naive.new_model(tiny_task)
        local.load_state_dict(naive.entries(model))
        local.train()
        part = local if tune == "all" else getattr(local, tune)
        losses = (
            (lambda rows=rows, local=local, x=x, y=y: F.cross_entropy(local(x[rows]), y[rows]))
            for rows in naive.epochs_of(len(y), naive.generator("order", "personalise", 3, id), 3)
        )
        naive.descend(list(part.parameters()), losses, naive.LR, naive.MOMENTUM)
        tuned = private_states(experiment)[id]["state"]["tuned"]
        assert not naive.differences(dict(tuned), naive.entries(local), 1e-4), id


def test_classifier_is_never_trained_and_never_travels(tiny_task, tmp_path):
    experiment = start(tiny_task, tmp_path, FedBABU())
    drawn = {k: v.clone() for k, v in experiment.server.model.state_dict().items() if k.startswith("classifier.")}
    message = experiment.method.message(experiment.server)
    assert not any(path.startswith("classifier") for path, _ in tree.leaves(message["model"]))
    experiment.method.round(experiment.server, experiment.fleet)
    states = private_states(experiment)
    for name, value in drawn.items():
        assert torch.equal(experiment.server.model.state_dict()[name], value)
        assert torch.equal(states[0]["model"][name], value)
    assert not torch.equal(experiment.server.model.state_dict()[FIRST], message["model"][FIRST])


def test_clients_are_judged_by_what_they_tuned(tiny_task, tmp_path):
    experiment = run(tiny_task, tmp_path, FedBABU(), rounds=1)
    own = private_states(experiment)[0]
    client = open_client(tiny_task, FedBABU(), 0)
    client.state = {"tuned": own["state"]["tuned"]}
    client.receive(experiment.server.model.state_dict())
    judged = experiment.method.client_model(client)
    assert fingerprint(judged.state_dict()) == fingerprint(own["state"]["tuned"])
    assert fingerprint(client.model.state_dict()) == fingerprint(experiment.server.model.state_dict())
    # the private entries are again the drawn ones
    assert torch.equal(own["model"]["classifier.weight"], experiment.server.model.state_dict()["classifier.weight"])


def test_without_fine_tuning_there_is_no_last_phase(tiny_task, tmp_path):
    assert not FedBABU(tune_epochs=0).finishes
    experiment = run(tiny_task, tmp_path, FedBABU(tune_epochs=0), rounds=1)
    assert all("tuned" not in state["state"] for state in private_states(experiment).values())
    averaged = run(tiny_task, tmp_path, FedAvg(), rounds=1).server.model.state_dict()
    assert not torch.equal(averaged[FIRST], experiment.server.model.state_dict()[FIRST])


@pytest.mark.parametrize("epochs", [0, 2])
def test_a_new_client_tunes_as_the_others_did(tiny_task, tmp_path, epochs):
    method = FedBABU(tune_epochs=epochs)
    experiment = start(tiny_task, tmp_path, method)
    client = open_client(tiny_task, method, 1)
    method.settle(client, method.message(experiment.server))
    assert ("tuned" in client.state) == (epochs > 0)
