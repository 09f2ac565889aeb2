import naive
import pytest
import torch
from rounds import run, start
from tiny import fingerprint, open_client, private_states
from torch.nn import functional as F

from raylt import tree
from raylt.methods.pfedme import PFedMe


def naive_client(task, id, t, received, method):
    """Return theta_i and w_i of a client after a round, parameter by parameter as in Algorithm 1."""
    x, y = naive.client_data(task, id)
    net = naive.new_model(task)
    net.load_state_dict(received)
    net.train()
    theta = list(net.parameters())
    w = [p.detach().clone() for p in theta]
    for rows in naive.epochs_of(len(y), naive.generator("order", "train", t, id)):
        velocity = [torch.zeros_like(p) for p in theta]
        for _ in range(method.steps):
            gradients = torch.autograd.grad(F.cross_entropy(net(x[rows]), y[rows]), theta)
            with torch.no_grad():
                for p, g, v, anchor in zip(theta, gradients, velocity, w, strict=True):
                    v.mul_(naive.MOMENTUM).add_(g + method.lam * (p - anchor))
                    p.sub_(naive.LR * v)
        with torch.no_grad():
            w = [anchor - method.eta * method.lam * (anchor - p) for anchor, p in zip(w, theta, strict=True)]
    personal = naive.entries(net)
    uploaded = dict(personal) | {name: own for (name, _), own in zip(net.named_parameters(), w, strict=True)}
    return personal, uploaded


@pytest.mark.parametrize("beta", [1.0, 0.5])
def test_two_rounds_equal_naive_code(tiny_task, tmp_path, beta):
    method = PFedMe(lam=4.0, steps=3, eta=0.02, beta=beta)
    model = naive.new_model(tiny_task)
    trained = [name for name, _ in model.named_parameters()]
    personal = {}
    for t in (1, 2):
        received, models, sizes = naive.entries(model), [], []
        for id in naive.clients_of(tiny_task):
            personal[id], uploaded = naive_client(tiny_task, id, t, received, method)
            models.append(uploaded)
            sizes.append(len(naive.client_data(tiny_task, id)[1]))
        mean = naive.average(models, sizes)
        model.load_state_dict(mean | {name: (1 - beta) * received[name] + beta * mean[name] for name in trained})
    experiment = run(tiny_task, tmp_path, method, rounds=2)
    assert not naive.differences(dict(experiment.server.model.state_dict()), naive.entries(model), 1e-4)
    states = private_states(experiment)
    for id, theta in personal.items():
        if tiny_task.sizes[id] > 1:  # a client of one sample takes no step
            assert not naive.differences(dict(states[id]["state"]["personal"]), theta, 1e-4), id


@pytest.mark.parametrize(("lam", "eta"), [(2.0, 0.25), (0.5, 0.8)])
def test_one_step_by_hand(tiny_task, tmp_path, lam, eta):
    """Client 2 has one batch an epoch: theta = w - lr g, then w moves by the share eta lambda towards theta."""
    local = {"epochs": 1, "momentum": 0.0, "lr": 0.1}
    method = PFedMe(steps=1, lam=lam, eta=eta)
    experiment = start(tiny_task, tmp_path, method, local=local)
    received = {name: p.detach().clone() for name, p in experiment.server.model.named_parameters()}
    client = open_client(tiny_task, method, 2, experiment.config)
    reply = method.train(client, method.message(experiment.server))
    for name, w in received.items():
        theta = client.state["personal"][name]
        assert torch.allclose(reply.tree["model"][name], w - lam * eta * (w - theta), atol=1e-6), name
    assert any((client.state["personal"][name] - w).abs().max() > 1e-3 for name, w in received.items())


def test_reported_loss_is_the_cross_entropy_of_the_last_step_alone(tiny_task, tmp_path):
    """Client 0 has one batch: the second of two steps sees theta = w - lr g, and the pull towards w is no loss."""
    method = PFedMe(steps=2, lam=50.0)
    experiment = start(tiny_task, tmp_path, method, local={"epochs": 1, "momentum": 0.0, "lr": 0.1, "batch": 24})
    client = open_client(tiny_task, method, 0, experiment.config)
    reply = method.train(client, method.message(experiment.server))
    net, (x, y) = naive.new_model(tiny_task).train(), naive.client_data(tiny_task, 0)
    naive.descend(list(net.parameters()), iter([lambda: F.cross_entropy(net(x), y)]), 0.1)
    assert reply.tree["loss"] == pytest.approx(F.cross_entropy(net(x), y).item(), rel=1e-4)


def test_clients_are_judged_by_theta_and_others_by_the_global_model(tiny_task, tmp_path):
    experiment = run(tiny_task, tmp_path, PFedMe(), rounds=1, federation={"participation": 0.3})
    states = private_states(experiment)
    own = {id: state["state"]["personal"] for id, state in states.items() if "personal" in state["state"]}
    assert 0 < len(own) < len(states)
    for id in states:
        client = open_client(tiny_task, PFedMe(), id)
        client.state = {"personal": own[id]} if id in own else {}
        client.receive(experiment.server.model.state_dict())
        judged = PFedMe().client_model(client).state_dict()
        assert fingerprint(judged) == fingerprint(own[id] if id in own else experiment.server.model.state_dict())


def test_larger_lambda_keeps_theta_nearer_to_w(tiny_task, tmp_path):
    distances = []
    for lam in (1.0, 5.0, 15.0):
        experiment = start(tiny_task, tmp_path, PFedMe(lam=lam, eta=0.0), local={"momentum": 0.0})
        w = {name: p.detach().clone() for name, p in experiment.server.model.named_parameters()}
        experiment.method.round(experiment.server, experiment.fleet)
        theta = private_states(experiment)[0]["state"]["personal"]
        distances.append(sum((theta[name] - w[name]).square().sum().item() for name in w))
        for name, p in experiment.server.model.named_parameters():  # with eta = 0 w does not move
            assert torch.allclose(p, w[name], atol=1e-6)
    assert distances == sorted(distances, reverse=True)


def test_a_client_of_one_sample_takes_no_step_and_is_evaluated_by_the_global_model(tiny_task):
    (id,) = [id for id, n in enumerate(tiny_task.sizes) if n == 1]
    client = open_client(tiny_task, PFedMe(), id)
    client.begin("train", 1)
    PFedMe().train(client, {"model": tree.snapshot(client.model.state_dict())})
    assert "personal" not in client.state
