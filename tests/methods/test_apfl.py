import naive
import pytest
import torch
from rounds import run
from tiny import fingerprint, open_client, private_states
from torch.func import functional_call
from torch.nn import functional as F

from raylt.methods.apfl import APFL
from raylt.methods.fedavg import FedAvg


def velocity_step(params, gradients, velocity, lr=naive.LR):
    with torch.no_grad():
        for p, g, v in zip(params, gradients, velocity, strict=True):
            v.mul_(naive.MOMENTUM).add_(g)
            p.sub_(lr * v)


def naive_round(task, id, t, w_start, v, alpha, adaptive):
    """Return w_i, v_i and alpha of a client after a round, which steps w and then v on each batch."""
    x, y = naive.client_data(task, id)
    w, own = naive.new_model(task), naive.new_model(task)
    w.load_state_dict(w_start)
    own.load_state_dict(v)
    w.train()
    own.train()
    params, own_params = list(w.parameters()), list(own.parameters())
    velocities = [[torch.zeros_like(p) for p in part] for part in (params, own_params)]
    for number, rows in enumerate(naive.epochs_of(len(y), naive.generator("order", "train", t, id))):
        loss = F.cross_entropy(w(x[rows]), y[rows])
        velocity_step(params, torch.autograd.grad(loss, params), velocities[0])
        mixture = {
            name: (alpha * a + (1 - alpha) * b).detach().requires_grad_()
            for (name, a), b in zip(own.named_parameters(), params, strict=True)
        }
        loss = F.cross_entropy(functional_call(own, mixture, (x[rows],)), y[rows])
        gradients = torch.autograd.grad(loss, list(mixture.values()))
        slope = sum(((a - b) * g).sum() for a, b, g in zip(own_params, params, gradients, strict=True)).item()
        velocity_step(own_params, [alpha * g for g in gradients], velocities[1])
        if adaptive and number == 0:
            alpha = min(max(alpha - naive.LR * slope, 0.0), 1.0)
    return naive.entries(w), naive.entries(own), alpha


# from 0 the first step of alpha leads below 0
@pytest.mark.parametrize(("first", "adaptive"), [(0.4, True), (0.4, False), (0.0, True)])
def test_two_rounds_equal_naive_code(tiny_task, tmp_path, first, adaptive):
    model = naive.new_model(tiny_task)
    v, alphas = {}, {}
    for t in (1, 2):
        start, models, sizes = naive.entries(model), [], []
        for id in naive.clients_of(tiny_task):
            w, v[id], alphas[id] = naive_round(
                tiny_task, id, t, start, v.get(id, start), alphas.get(id, first), adaptive
            )
            models.append(w)
            sizes.append(len(naive.client_data(tiny_task, id)[1]))
        model.load_state_dict(naive.average(models, sizes))
    experiment = run(tiny_task, tmp_path, APFL(alpha=first, adaptive=adaptive), rounds=2)
    assert not naive.differences(dict(experiment.server.model.state_dict()), naive.entries(model), 1e-4)
    states = private_states(experiment)
    for id, own in v.items():
        if len(naive.client_data(tiny_task, id)[1]) == 1:  # no step, so the global model remains
            assert "own" not in states[id]["state"], id
            continue
        assert not naive.differences(dict(states[id]["state"]["own"]), own, 1e-4), id
        assert states[id]["state"]["alpha"].item() == pytest.approx(alphas[id], abs=1e-5), id
    if first:
        assert adaptive == any(abs(alpha - first) > 1e-4 for alpha in alphas.values())


def test_global_model_and_loss_are_fedavgs_to_the_bit(tiny_task, tmp_path):
    ends = [run(tiny_task, tmp_path, m, federation={"participation": 0.5}) for m in (FedAvg(), APFL())]
    assert fingerprint(ends[0].server.model.state_dict()) == fingerprint(ends[1].server.model.state_dict())
    assert ends[0].server.figures["loss"] == ends[1].server.figures["loss"]


def test_clients_are_judged_by_the_mixture_with_the_received_model(tiny_task):
    client = open_client(tiny_task, APFL(), 0)
    assert APFL().client_model(client) is client.model  # this client never took part
    own = {name: value + 1 for name, value in client.model.state_dict().items()}
    client.state["own"] = own
    client.state["alpha"] = torch.tensor(0.25)
    judged = APFL().client_model(client).state_dict()
    for name, p in client.model.named_parameters():
        assert torch.allclose(judged[name], p + 0.25), name
    assert torch.equal(judged["encoder.stage1.1.running_mean"], own["encoder.stage1.1.running_mean"])


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_ends_of_alpha(tiny_task, tmp_path, alpha):
    """With alpha 0, v_i does not move; with alpha 1, it is trained alone, like w_i in its first round."""
    own = private_states(run(tiny_task, tmp_path, APFL(alpha=alpha, adaptive=False), rounds=1))[0]["state"]["own"]
    start = naive.entries(naive.new_model(tiny_task))
    x, y = naive.client_data(tiny_task, 0)
    local = naive.new_model(tiny_task)
    order = naive.generator("order", "train", 1, 0)
    naive.train(local, naive.epochs_of(len(y), order), lambda rows: F.cross_entropy(local(x[rows]), y[rows]))
    expected = naive.entries(local) if alpha else start
    for name, _ in local.named_parameters():
        assert torch.allclose(own[name], expected[name], atol=1e-5), name
