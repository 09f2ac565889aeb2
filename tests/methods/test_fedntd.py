import copy
from types import SimpleNamespace

import naive
import pytest
import torch
from refusals import refused
from rounds import flat, run
from tiny import configure, fingerprint, open_client
from torch import tensor
from torch.nn import functional as F

from raylt.errors import ConfigError
from raylt.methods.fedavg import FedAvg
from raylt.methods.fedntd import FedNTD
from raylt.models import build_model
from raylt.ops.distillation import divergence


def test_divergence_by_hand():
    # q = (1/4, 3/4), p = (1/2, 1/2): KL = 1/4 log(1/2) + 3/4 log(3/2)
    q, p = tensor([[1.0, 3.0]]).log(), tensor([[0.0, 0.0]])
    expected = 0.25 * tensor(0.5).log() + 0.75 * tensor(1.5).log()
    assert divergence(p, teacher=q).item() == pytest.approx(expected.item(), rel=1e-6)
    # at tau = 2 a teacher with logits log 1, log 9 gives (1/4, 3/4); there is no factor tau^2
    assert divergence(p, teacher=2 * q, temperature=2.0).item() == pytest.approx(expected.item(), rel=1e-6)


def not_true(logits, c):
    return torch.cat([logits[:c], logits[c + 1 :]])


def loss_by_hand(logits, teacher, y, beta, tau):
    total = torch.zeros(())
    for own, other, c in zip(logits, teacher, y.tolist(), strict=True):
        q, p = (not_true(row, c).div(tau).softmax(0) for row in (other, own))
        total = total - own.log_softmax(0)[c] + beta * (q * (q / p).log()).sum()
    return total / len(y)


@pytest.mark.parametrize(("beta", "tau"), [(0.7, 1.0), (1.0, 3.0)])
def test_objective_equals_naive_code(tiny_task, beta, tau):
    client = open_client(tiny_task, FedNTD(), 0)
    received = copy.deepcopy(client.model).eval()
    objective = FedNTD(beta=beta, tau=tau).objective(client, {})
    with torch.no_grad():
        for p in client.model.parameters():
            p += 0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel()))
        batch = client.samples.batch(torch.arange(8))
        client.model.eval()
        expected = loss_by_hand(client.model(batch.x), received(batch.x), batch.y, beta, tau)
        assert objective(batch).item() == pytest.approx(expected.item(), rel=1e-5)


def test_two_rounds_equal_naive_code(tiny_task, tmp_path):
    model = naive.new_model(tiny_task)
    for t in (1, 2):
        models, sizes = [], []
        for id in naive.clients_of(tiny_task):
            x, y = naive.client_data(tiny_task, id)
            local, received = naive.new_model(tiny_task), naive.new_model(tiny_task).eval()
            local.load_state_dict(naive.entries(model))
            received.load_state_dict(naive.entries(model))

            def loss(rows, local=local, received=received, x=x, y=y):
                return loss_by_hand(local(x[rows]), received(x[rows]).detach(), y[rows], 2.0, 1.5)

            naive.train(local, naive.epochs_of(len(y), naive.generator("order", "train", t, id)), loss)
            models.append(naive.entries(local))
            sizes.append(len(y))
        model.load_state_dict(naive.average(models, sizes))
    ours = run(tiny_task, tmp_path, FedNTD(beta=2.0, tau=1.5), rounds=2).server.model.state_dict()
    assert not naive.differences(dict(ours), naive.entries(model), 1e-4)


def test_term_is_blind_to_the_true_class(tiny_task):
    teacher, logits = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(0))
    client = open_client(tiny_task, FedNTD())
    client.model.forward = lambda x: x
    y = tensor([0, 1, 2, 3, 3, 0])
    batch = client.samples.batch(torch.arange(6))._replace(y=y)
    values = []
    for shift in (0.0, 5.0):
        shifted = logits + shift * F.one_hot(y, 4)
        places = torch.arange(3) + (torch.arange(3) >= batch.y[:, None])
        values.append(divergence(shifted.gather(1, places), teacher=teacher.gather(1, places)).item())
    assert values[0] == pytest.approx(values[1])


def test_beta_of_zero_is_fedavg_to_the_bit(tiny_task, tmp_path):
    ends = [run(tiny_task, tmp_path, method) for method in (FedAvg(), FedNTD(beta=0))]
    assert fingerprint(ends[0].server.model.state_dict()) == fingerprint(ends[1].server.model.state_dict())


def test_every_field_changes_the_model(tiny_task, tmp_path):
    ends = [flat(run(tiny_task, tmp_path, FedNTD(**given), rounds=1)) for given in ({}, {"beta": 3.0}, {"tau": 3.0})]
    assert all(not torch.equal(a, b) for i, a in enumerate(ends) for b in ends[:i])


def test_two_classes_are_refused():
    model = build_model("small", 2, (8, 8, 1))
    FedNTD(beta=0).prepare(SimpleNamespace(classes=2), configure(), model)
    FedNTD().prepare(SimpleNamespace(classes=3), configure(), model)
    with refused("data.too-few", ConfigError, key="method.beta", value=1.0):
        FedNTD().prepare(SimpleNamespace(classes=2), configure(), model)
