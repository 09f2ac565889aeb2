import torch
from tiny import CPU, configure, make_experiment, make_setup

from raylt.core.fleet.client_host import ClientHost
from raylt.methods.fedavg import FedAvg


def test_round_gives_the_weighted_mean_of_separately_trained_models(tiny_task, tmp_path, monkeypatch):
    monkeypatch.setattr(FedAvg, "sample", lambda self, server, fleet: [0, 5])
    experiment = make_experiment(configure(federation={"rounds": 1}), tiny_task, tmp_path)
    method, message = experiment.method, experiment.method.message(experiment.server)
    trained = {}
    for id in (0, 5):
        host = ClientHost(make_setup(experiment.config, method), tiny_task.spec, tiny_task.test, CPU)
        trained[id] = host.run(method.train, message, 1, id, tiny_task.shards[id], None)[0].tree
    report = experiment.step()
    # clients 0 and 5 hold 24 and 12 samples
    for name, value in experiment.server.model.state_dict().items():
        a, b = (trained[id]["model"][name] for id in (0, 5))
        if value.is_floating_point():
            assert torch.equal(value, ((24 * a.double() + 12 * b.double()) / 36).float()), name
            assert not torch.equal(value, message["model"][name]), name
        else:
            assert value == max(a, b), name
    assert report.figures["loss"] == (24 * trained[0]["loss"] + 12 * trained[5]["loss"]) / 36


def test_weights_follow_samples_not_batches(tiny_task, tmp_path, monkeypatch):
    # client 3 cannot train: its one sample gives the old model a weight of 1 / 25 in the mean
    monkeypatch.setattr(FedAvg, "sample", lambda self, server, fleet: [0, 3])
    experiment = make_experiment(configure(federation={"rounds": 1}), tiny_task, tmp_path)
    method, message = experiment.method, experiment.method.message(experiment.server)
    host = ClientHost(make_setup(experiment.config, method), tiny_task.spec, tiny_task.test, CPU)
    trained = host.run(method.train, message, 1, 0, tiny_task.shards[0], None)[0].tree["model"]
    experiment.step()
    name = "classifier.weight"
    expected = (24 * trained[name].double() + message["model"][name].double()) / 25
    assert torch.equal(experiment.server.model.state_dict()[name], expected.float())
