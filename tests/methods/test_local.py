import torch
from rounds import flat, run, start
from tiny import CPU, configure, fingerprint, make_experiment, open_client, private_states
from torch.nn import functional as F

from raylt.core.training.optimisers import SGD
from raylt.methods.local import Local


def test_client_trains_on_its_own_samples_alone_round_after_round(tiny_task, tmp_path):
    experiment = run(tiny_task, tmp_path, Local(), rounds=3)
    client, local = open_client(tiny_task, Local(), 0), experiment.config.local
    model = client.model.to(CPU).train()
    for round in (1, 2, 3):
        client.begin("train", round)
        optimiser = SGD(model.parameters(), local.lr, local.momentum)
        for batch in client.batches(local.epochs, local.batch):
            optimiser.step(F.cross_entropy(model(batch.x), batch.y))
    own = private_states(experiment)[0]["model"]
    for name, value in model.state_dict().items():
        assert torch.allclose(own[name].double(), value.double(), atol=1e-5), name


def test_nothing_travels_and_the_global_model_stays(tiny_task, tmp_path):
    experiment = make_experiment(configure(), tiny_task, tmp_path, Local())
    before = flat(experiment)
    reports = []
    while not experiment.done:
        reports.append(experiment.step())
    assert torch.equal(flat(experiment), before)
    assert all(report.traffic["train"]["down"] == 0 for report in reports)
    assert all(report.traffic["train"]["up"] == 8 * 5 for report in reports)  # the loss only, for the log


def test_another_client_changes_nothing(tiny_task, tmp_path, monkeypatch):
    ends = []
    for asked in ([0], [0, 1, 2]):
        monkeypatch.setattr(Local, "sample", lambda self, server, fleet, ids=asked: ids)
        ends.append(fingerprint(private_states(run(tiny_task, tmp_path, Local(), rounds=2))[0]))
    assert ends[0] == ends[1]


def test_clients_are_judged_by_their_own_models(tiny_task, tmp_path):
    experiment = start(tiny_task, tmp_path, Local())
    client = open_client(tiny_task, Local())
    assert experiment.method.client_model(client) is client.model
    assert experiment.method.shared(client.model) == {}
