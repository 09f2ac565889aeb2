import pytest
import torch
from rounds import flat, replies, run, start
from tiny import configure, fingerprint, make_experiment, open_client, private_states
from torch.nn import functional as F

from raylt.core.training.optimisers import SGD
from raylt.methods.fedper import FedPer
from raylt.methods.fedrep import FedRep


def classifier(state) -> dict:
    return {name: value for name, value in state["model"].items() if name.startswith("classifier.")}


@pytest.mark.parametrize("rounds", [1, 2])
def test_round_is_algorithm_1_by_naive_code(tiny_task, tmp_path, rounds):
    """Train the classifier on the received encoder, then the encoder under it, on the client's own batches.

    In the second round the received running statistics are no longer those of a new model.
    """
    method = FedRep(head_epochs=3)
    experiment = start(tiny_task, tmp_path, method, local={"epochs": 2})
    if rounds == 2:
        method.round(experiment.server, experiment.fleet)
        experiment.server.round = 2
        experiment.fleet.begin(2)
    message, own = method.message(experiment.server), classifier(private_states(experiment)[0])
    client = open_client(tiny_task, method, 0, experiment.config)
    client.begin("train", rounds)
    client.receive(message["model"])
    client.receive(own)
    reply = replies(experiment, [0], "model", "loss")[0]
    model, local = client.model.train(), experiment.config.local
    for part, epochs in ((model.classifier, 3), (model.encoder, 2)):
        optimiser = SGD(part.parameters(), local.lr, local.momentum)
        for batch in client.batches(epochs, local.batch):
            optimiser.step(F.cross_entropy(model(batch.x), batch.y))
    for name, value in reply["model"].items():
        assert torch.allclose(value.double(), model.state_dict()[name].double(), atol=1e-6), name
    for name, value in classifier(private_states(experiment)[0]).items():
        assert torch.allclose(value, model.state_dict()[name], atol=1e-6), name


def test_first_half_moves_the_classifier_alone_and_the_second_the_encoder_alone(tiny_task, monkeypatch):
    seen = []
    client = open_client(tiny_task, FedRep())
    names = {id(p): name for name, p in client.model.named_parameters()}

    def record(client, objective, params, epochs=None):
        seen.append(({names[id(p)].partition(".")[0] for p in params}, epochs))
        return 0.0

    monkeypatch.setattr("raylt.methods.fedrep.sgd", record)
    FedRep(head_epochs=7).train(client, {"model": {}})
    assert seen == [({"classifier"}, 7), ({"encoder"}, None)]


def test_classifiers_never_leave_their_clients(tiny_task, tmp_path):
    experiment = start(tiny_task, tmp_path, FedRep(head_epochs=1))
    message = experiment.method.message(experiment.server)
    reply = replies(experiment, [0, 1], "model", "loss", message=message)
    assert all(name.startswith("encoder.") for name in [*message["model"], *reply[0]["model"]])
    own = {id: fingerprint(classifier(state)) for id, state in private_states(experiment).items()}
    assert own[0] != own[1]
    assert own[2] == own[5]  # neither client has trained, so both have the common start


def test_clients_go_on_from_their_own_classifier_and_those_not_sampled_keep_it(tiny_task, tmp_path, monkeypatch):
    asked = [[0, 1], [1, 2]]
    monkeypatch.setattr(FedRep, "sample", lambda self, server, fleet: asked[server.round - 1])
    experiment = start(tiny_task, tmp_path, FedRep(head_epochs=1))
    states = []
    for round in (1, 2):
        experiment.server.round = round
        experiment.fleet.begin(round)
        experiment.method.round(experiment.server, experiment.fleet)
        states.append({id: fingerprint(classifier(state)) for id, state in private_states(experiment).items()})
    assert states[0][0] == states[1][0]
    assert states[0][1] != states[1][1]
    assert states[0][2] != states[1][2]


@pytest.mark.slow
@pytest.mark.parametrize("epochs", [1, 4])
def test_head_epochs_change_the_model(tiny_task, tmp_path, epochs):
    method = FedRep(head_epochs=epochs)
    others = FedPer(), FedRep(head_epochs=2)
    ends = [flat(run(tiny_task, tmp_path, m, rounds=1)) for m in (method, *others)]
    assert not torch.equal(ends[0], ends[1])
    assert not torch.equal(ends[0], ends[2])


def test_every_client_trains_its_classifier_on_the_final_encoder(tiny_task, tmp_path):
    """This includes clients that were not asked in the last round; compared with naive code."""
    method = FedRep(head_epochs=2)
    before, after = (
        make_experiment(configure(federation={"rounds": 1, "participation": 0.3}), tiny_task, tmp_path, method)
        for _ in range(2)
    )
    for experiment, steps in ((before, 1), (after, 2)):
        for _ in range(steps):
            experiment.step()
    encoder = after.server.model.state_dict()
    assert all(torch.equal(encoder[name], value) for name, value in before.server.model.state_dict().items())
    own = private_states(before)
    for id, state in private_states(after).items():
        client = open_client(tiny_task, method, id, after.config)
        client.begin("train_classifier", 2)
        client.receive(encoder)
        client.receive(classifier(own[id]))
        model, local = client.model.train(), after.config.local
        optimiser = SGD(model.classifier.parameters(), local.lr, local.momentum)
        for batch in client.batches(2, local.batch):
            optimiser.step(F.cross_entropy(model(batch.x), batch.y))
        for name, value in classifier(state).items():
            assert torch.allclose(value, model.state_dict()[name], atol=1e-5), (id, name)
    assert not FedRep(head_epochs=0).finishes
