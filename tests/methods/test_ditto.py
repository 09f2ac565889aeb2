import pytest
import torch
from rounds import ask_only, flat, replies, run, start
from tiny import configure, fingerprint, open_client, private_states
from torch import Tensor
from torch.nn import functional as F

from raylt.core.training.optimisers import SGD
from raylt.methods.ditto import Ditto
from raylt.methods.fedavg import FedAvg
from raylt.tree import Tree


def personal(experiment) -> dict[int, Tree]:
    return {
        id: state["state"]["personal"]
        for id, state in private_states(experiment).items()
        if "personal" in state["state"]
    }


@pytest.mark.parametrize("batchnorm", ["average", "local"])
def test_global_stream_is_fedavg_to_the_bit(tiny_task, tmp_path, batchnorm):
    federation = {"participation": 0.5, "batchnorm": batchnorm}
    ends = [run(tiny_task, tmp_path, method, federation=federation) for method in (FedAvg(), Ditto())]
    averaged, beside = (fingerprint(end.server.model.state_dict()) for end in ends)
    assert beside == averaged
    private = [{id: fingerprint(state["model"]) for id, state in private_states(end).items()} for end in ends]
    assert private[0] == private[1]


def test_a_client_of_one_sample_makes_no_step_and_uses_the_global_model(tiny_task, tmp_path):
    sizes = [len(shard.y) for shard in tiny_task.shards]
    assert sizes[3] == 1
    kept = personal(run(tiny_task, tmp_path, Ditto()))
    assert kept.keys() == {id for id, size in enumerate(sizes) if size > 1}


def test_personal_step_adds_lambda_times_the_distance_to_the_gradient(tiny_task):
    client = open_client(tiny_task, Ditto())
    batch, params = client.samples.batch(torch.arange(8)), list(client.model.parameters())
    objective = Ditto(lam=0.3).near_global(client)
    anchor = [p.detach().clone() for p in params]
    client.model.eval()
    with torch.no_grad():
        for p in params:
            p += 0.1
    loss = objective(batch)
    plain = F.cross_entropy(client.model(batch.x), batch.y)
    # lambda / 2 times 0.1^2 for each weight
    assert loss.item() == pytest.approx(plain.item() + 0.3 / 2 * 0.01 * sum(p.numel() for p in params), rel=1e-5)
    for whole, g, p, w in zip(
        torch.autograd.grad(loss, params), torch.autograd.grad(plain, params), params, anchor, strict=True
    ):
        assert torch.allclose(whole - g, 0.3 * (p - w).detach(), atol=1e-6)


def test_second_round_starts_from_v_k_and_holds_it_near_the_new_global_model(tiny_task, tmp_path):
    """Compute v in rounds 1 and 2 by Algorithm 1, from the batches that the client draws."""
    lam, local = 0.5, {"epochs": 1, "lr": 0.1, "momentum": 0.0}
    experiment = start(tiny_task, tmp_path, Ditto(lam=lam), local=local, federation={"rounds": 2})
    method, server, fleet = experiment.method, experiment.server, experiment.fleet
    v: dict[str, Tensor] | None = None
    for round in (1, 2):
        server.round = round
        fleet.begin(round)
        w = method.message(server)["model"]
        method.round(server, fleet)
        client = open_client(tiny_task, method, 0, experiment.config)
        client.begin("train", round)
        list(client.batches(1, 8))  # skips the batches that w_k was trained on
        client.receive(w if v is None else v)
        params = dict(client.model.named_parameters())
        client.model.train()
        for batch in client.batches(1, 8):
            gradients = torch.autograd.grad(F.cross_entropy(client.model(batch.x), batch.y), list(params.values()))
            with torch.no_grad():
                for (name, p), g in zip(params.items(), gradients, strict=True):
                    p -= 0.1 * (g + lam * (p - w[name]))
        v = {name: value.clone() for name, value in client.model.state_dict().items()}
        for name, value in personal(experiment)[0].items():
            assert torch.allclose(value.double(), v[name].double(), atol=1e-5), (round, name)


def test_only_w_k_is_uploaded(tiny_task, tmp_path):
    experiment = start(tiny_task, tmp_path, Ditto())
    reply = replies(experiment, [0], "model", "loss")[0]
    plain = replies(start(tiny_task, tmp_path, FedAvg()), [0], "model", "loss")[0]
    assert fingerprint(reply) == fingerprint(plain)
    assert fingerprint(personal(experiment)[0]) != fingerprint(reply["model"])


def test_clients_are_judged_by_v_k_and_those_that_never_took_part_by_the_global_model(tiny_task, tmp_path):
    experiment = run(tiny_task, tmp_path, Ditto(), rounds=1, federation={"participation": 0.3})
    own, server = personal(experiment), experiment.server
    assert 0 < len(own) < len(experiment.fleet.ids)
    for id in experiment.fleet.ids:
        client = open_client(tiny_task, Ditto(), id)
        client.state = {"personal": own[id]} if id in own else {}
        client.receive(server.model.state_dict())
        judged = experiment.method.client_model(client).state_dict()
        assert fingerprint(judged) == fingerprint(own[id] if id in own else server.model.state_dict())
        # judging leaves the client's own entries unchanged
        assert fingerprint(client.model.state_dict()) == fingerprint(server.model.state_dict())


def test_personal_models_of_those_that_are_not_sampled_stay(tiny_task, tmp_path, monkeypatch):
    asked = [[0, 1], [1, 2]]
    monkeypatch.setattr(Ditto, "sample", lambda self, server, fleet: asked[server.round - 1])
    experiment = start(tiny_task, tmp_path, Ditto())
    states = []
    for round in (1, 2):
        experiment.server.round = round
        experiment.fleet.begin(round)
        experiment.method.round(experiment.server, experiment.fleet)
        states.append({id: fingerprint(state) for id, state in personal(experiment).items()})
    assert states[0][0] == states[1][0]
    assert states[0][1] != states[1][1]
    assert states[0][0] != states[0][1]
    assert states[1].keys() == {0, 1, 2}


def test_without_lambda_v_k_is_local_training_alone(tiny_task, tmp_path):
    experiment = run(tiny_task, tmp_path, Ditto(lam=0), rounds=1, local={"epochs": 1})
    config = configure(local={"epochs": 1})
    client = open_client(tiny_task, Ditto(), 0, config)
    list(client.batches(1, 8))
    optimiser = SGD(client.model.parameters(), config.local.lr, config.local.momentum)
    client.model.train()
    for batch in client.batches(1, 8):
        optimiser.step(F.cross_entropy(client.model(batch.x), batch.y))
    for name, value in client.model.state_dict().items():
        assert torch.allclose(personal(experiment)[0][name].double(), value.double(), atol=1e-6), name


def test_larger_lambda_keeps_v_k_nearer_to_the_global_model(tiny_task, tmp_path):
    distances = []
    for lam in (0.0, 0.1, 1.0, 5.0):
        experiment = start(tiny_task, tmp_path, Ditto(lam=lam), local={"momentum": 0.0})
        w = {name: p.detach().clone() for name, p in experiment.server.model.named_parameters()}
        experiment.method.round(experiment.server, experiment.fleet)
        distances.append(sum((personal(experiment)[0][name] - w[name]).square().sum().item() for name in w))
    assert distances == sorted(distances, reverse=True)
    assert distances[-1] < 0.8 * distances[0]
    assert torch.isfinite(flat(experiment)).all()


def test_global_model_is_the_mean_of_w_k_weighted_by_samples(tiny_task, tmp_path, monkeypatch):
    sizes = {0: 24, 1: 14, 2: 9}
    experiment = start(tiny_task, tmp_path, Ditto())
    own = replies(experiment, list(sizes), "model", "loss")
    other = start(tiny_task, tmp_path, Ditto())
    ask_only(monkeypatch, Ditto(), list(sizes))
    other.method.round(other.server, other.fleet)
    name = "classifier.weight"
    expected = sum(n / 47 * own[id]["model"][name].double() for id, n in sizes.items())
    assert torch.allclose(other.server.model.state_dict()[name].double(), expected, atol=1e-6)
