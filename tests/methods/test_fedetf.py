import naive
import pytest
import torch
from killed import resume, run_and_kill
from rounds import run
from tiny import configure, fingerprint, make_experiment, open_client, private_states
from torch.nn import functional as F

from raylt.methods.fedetf import FRAME, FedETF


def test_classes_are_equally_far_apart_and_the_same_for_everybody(tiny_task, tmp_path):
    frames = [open_client(tiny_task, FedETF(), id).model.classifier.weight for id in (0, 1)]
    assert torch.equal(*frames)
    cosines = frames[0] @ frames[0].T
    assert torch.allclose(cosines, torch.full((4, 4), -1 / 3).fill_diagonal_(1), atol=1e-6)
    other = make_experiment(configure(seed=1), tiny_task, tmp_path, FedETF()).server.model.classifier.weight
    assert not torch.allclose(other, frames[0], atol=0.01)


def test_frame_neither_moves_nor_travels_and_the_temperature_does_both(tiny_task, tmp_path):
    before = open_client(tiny_task, FedETF()).model.classifier
    experiment = run(tiny_task, tmp_path, FedETF(temperature=2.0, turns=0), rounds=1)
    message, after = experiment.method.message(experiment.server), experiment.server.model.classifier
    assert torch.equal(after.weight, before.weight)
    assert FRAME not in message["model"]
    assert after.temperature.item() != 2.0
    assert message["model"]["classifier.temperature"].item() == after.temperature.item()


@pytest.mark.parametrize("gamma", [0.0, 0.7])
def test_objective_written_out(tiny_task, gamma):
    method = FedETF(gamma=gamma, temperature=3.0)
    client = open_client(tiny_task, method, 1)  # class counts 8, 3, 3, 0
    client.model.eval()
    batch = client.samples.batch(torch.arange(14))
    parts = client.model.encoder
    with torch.no_grad():
        z = F.linear(parts.base(batch.x), parts.projection.weight, parts.projection.bias).double()
        logits = 3.0 * (z / z.norm(dim=1, keepdim=True)) @ client.model.classifier.weight.T.double()
        weights = client.counts.double() ** gamma * logits.exp()
        expected = -(weights / weights.sum(1, keepdim=True))[torch.arange(14), batch.y].log().mean()
    assert method.objective(client, {})(batch).item() == pytest.approx(expected.item(), rel=1e-5)


def test_round_is_that_of_naive_code(tiny_task, tmp_path):
    """Compare local training of encoder, projection and temperature against the frame, then their weighted mean."""
    method = FedETF(turns=0)
    server = run(tiny_task, tmp_path, method, rounds=1).server
    ends, weights = [], []
    for id in naive.clients_of(tiny_task):
        model = open_client(tiny_task, method, id).model
        frame, (x, y) = model.classifier.weight.clone(), naive.client_data(tiny_task, id)
        log_n = torch.bincount(y, minlength=4).log()

        def loss(rows, model=model, x=x, y=y, frame=frame, log_n=log_n):
            h = model.encoder.projection(model.encoder.base(x[rows]))
            logits = model.classifier.temperature * (h / h.norm(dim=1, keepdim=True)) @ frame.T
            return F.cross_entropy(logits + log_n, y[rows])

        naive.train(model, naive.epochs_of(len(y), naive.generator("order", "train", 1, id)), loss)
        ends.append(naive.entries(model))
        weights.append(len(y))
    assert naive.differences(naive.entries(server.model), naive.average(ends, weights)) == {}


def test_fields_change_the_model(tiny_task, tmp_path):
    ends = {
        fingerprint(run(tiny_task, tmp_path, method, rounds=1).server.model.state_dict())
        for method in (FedETF(turns=0), FedETF(turns=0, gamma=0.5), FedETF(turns=0, temperature=4.0))
    }
    assert len(ends) == 3


def tuned_by_hand(task, id, model, t, method, decay=0.0):
    """Train the global model once more, then frame and projection in turns on fixed features.

    The frame alone is trained without momentum and weight decay.
    """
    x, y = naive.client_data(task, id)
    order = naive.generator("order", "personalise", t, id)
    frame, log_n = model.classifier.weight.clone(), torch.bincount(y, minlength=4).log()

    def logits(rows, frame):
        h = model.encoder.projection(model.encoder.base(x[rows]))
        return model.classifier.temperature * (h / h.norm(dim=1, keepdim=True)) @ frame.T

    model.train()
    naive.descend(
        list(model.parameters()),
        (
            (lambda rows=rows: F.cross_entropy(logits(rows, frame) + log_n, y[rows]))
            for rows in naive.epochs_of(len(y), order)
        ),
        naive.LR,
        naive.MOMENTUM,
        decay,
    )
    frame.requires_grad_()
    projection = list(model.encoder.projection.parameters())
    for _ in range(method.turns):
        for params, lr, momentum, own_decay in (
            ([frame], method.frame_lr, 0.0, 0.0),
            (projection, method.projection_lr, 0.9, decay),
        ):
            naive.descend(
                params,
                (
                    (lambda rows=rows: F.cross_entropy(logits(rows, frame), y[rows]))
                    for rows in naive.epochs_of(len(y), order, method.turn_epochs)
                ),
                lr,
                momentum,
                own_decay,
            )
    return naive.entries(model) | {FRAME: frame.detach()}


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_clients_own_models_are_those_of_naive_code(tiny_task, tmp_path, decay):
    method = FedETF(turns=2, turn_epochs=2, frame_lr=0.3, projection_lr=0.02)
    experiment = run(tiny_task, tmp_path, method, rounds=1, local={"weight_decay": decay})
    before = naive.entries(experiment.server.model)
    for id, state in private_states(experiment).items():
        model = open_client(tiny_task, method, id).model
        assert torch.equal(before[FRAME], state["model"][FRAME])  # the client's own frame is kept apart
        model.load_state_dict(before)
        expected = tuned_by_hand(tiny_task, id, model, 2, method, decay)
        assert naive.differences(state["state"]["tuned"], expected, atol=1e-4) == {}, id
        client = open_client(tiny_task, method, id)
        client.state = state["state"]
        assert naive.differences(naive.entries(method.client_model(client)), expected, atol=1e-4) == {}


def test_without_turns_clients_have_the_global_model_and_nothing_follows_the_rounds(tiny_task, tmp_path):
    experiment = run(tiny_task, tmp_path, FedETF(turns=0), rounds=1)
    assert not any(state["state"] for state in private_states(experiment).values())
    client = open_client(tiny_task, FedETF(turns=0))
    client.receive(experiment.method.message(experiment.server)["model"])
    assert (
        naive.differences(
            naive.entries(experiment.method.client_model(client)), naive.entries(experiment.server.model), atol=1e-9
        )
        == {}
    )


@pytest.mark.parametrize(
    "field", [{"turns": 2}, {"turn_epochs": 2}, {"frame_lr": 0.3}, {"projection_lr": 0.2}], ids=str
)
def test_fields_of_the_tuning_change_clients_models_and_not_the_global_one(tiny_task, tmp_path, field):
    base = {"turns": 1, "turn_epochs": 1}
    plain, other = (run(tiny_task, tmp_path, FedETF(**base | fields), rounds=1) for fields in ({}, field))
    assert fingerprint(plain.server.model.state_dict()) == fingerprint(other.server.model.state_dict())
    assert fingerprint(private_states(plain)[0]["state"]) != fingerprint(private_states(other)[0]["state"])


@pytest.mark.slow
@pytest.mark.soak
def test_killed_in_the_tuning_and_resumed_it_ends_the_same(tmp_path):
    run_and_kill(
        tmp_path,
        ["method=fedetf", "method.turns=2", "federation.rounds=1", "local.epochs=1", "data.clients=3"],
        "raylt.methods.fedetf",
        "tune",
        6,
    )
    assert len((tmp_path / "killed" / "metrics.jsonl").read_text().splitlines()) == 1
    straight, killed = resume(tmp_path)
    assert straight["model_sha256"] == killed["model_sha256"]
    assert straight["clients"] == killed["clients"]
