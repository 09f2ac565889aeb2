from types import SimpleNamespace

import naive
import pytest
import torch
from rounds import ask_only, run, start
from tiny import open_client
from torch import tensor
from torch.nn import functional as F

from raylt import tree
from raylt.methods.fednh import PROTOTYPES, Cosines, FedNH


def unit(v):
    return v / v.norm()


def test_logits_are_scaled_cosines_by_hand():
    head = Cosines(tensor([[1.0, 0.0], [0.0, 1.0]]), 10.0)
    assert torch.allclose(head(tensor([[3.0, 4.0]])), tensor([[6.0, 8.0]]))
    assert not list(head.parameters())


def test_prototypes_start_as_orthonormal_rows(tiny_task, tmp_path):
    w = start(tiny_task, tmp_path, FedNH()).server.model.state_dict()[PROTOTYPES]
    assert torch.allclose(w @ w.T, torch.eye(4), atol=1e-5)


def test_more_prototypes_than_dimensions_have_length_one():
    head = FedNH().build(SimpleNamespace(classes=6), SimpleNamespace(dim=3)).classifier
    assert dict(head.named_buffers())["weight"].norm(dim=1).tolist() == pytest.approx([1.0] * 6)


@pytest.mark.parametrize("asked", [[[0, 1, 2, 3, 5]] * 2, [[0, 1], [2, 3]]], ids=["all", "some"])
def test_rounds_equal_naive_code(tiny_task, tmp_path, monkeypatch, asked):
    method = FedNH(rho=0.6, scale=8.0)
    entries = dict(start(tiny_task, tmp_path, method).server.model.state_dict())
    w = entries.pop(PROTOTYPES).clone()
    encoder = {name.removeprefix("encoder."): value.clone() for name, value in entries.items()}
    for t, ids in enumerate(asked, start=1):
        models, sizes = [], []
        sums = {}
        for id in ids:
            x, y = naive.client_data(tiny_task, id)
            net = naive.new_model(tiny_task).encoder
            net.load_state_dict(encoder)

            def logits(rows, net=net, x=x, w=w):
                return torch.stack([torch.stack([8 * (unit(z) @ row) for row in w]) for z in net(x[rows])])

            def loss(rows, y=y, logits=logits):
                return F.cross_entropy(logits(rows), y[rows])

            naive.train(net, naive.epochs_of(len(y), naive.generator("order", "train", t, id)), loss)
            with torch.no_grad():
                z = net.eval()(x)
            for c in set(y.tolist()):
                own = torch.stack([unit(row) for row in z[y == c]])
                sums.setdefault(c, []).append((len(own), unit(own.mean(0))))
            models.append(naive.entries(net))
            sizes.append(len(y))
        encoder = naive.average(models, sizes)
        w = w.clone()
        for c, parts in sums.items():
            w[c] = unit(0.6 * w[c] + 0.4 * unit(sum(n * mu for n, mu in parts)))
    rounds = iter(asked)
    monkeypatch.setattr(FedNH, "sample", lambda self, server, fleet: next(rounds))
    ours = run(tiny_task, tmp_path, method, rounds=len(asked)).server.model.state_dict()
    expected = {f"encoder.{name}": value for name, value in encoder.items()} | {PROTOTYPES: w}
    assert not naive.differences(dict(ours), expected, 1e-4)


def test_training_does_not_move_prototypes_and_clients_do_not_upload_them(tiny_task, tmp_path):
    experiment = start(tiny_task, tmp_path, FedNH())
    client = open_client(tiny_task, FedNH(), 0)
    message = experiment.method.message(experiment.server)
    reply = FedNH().train(client, message)
    assert torch.equal(client.model.state_dict()[PROTOTYPES], message["model"][PROTOTYPES])
    assert PROTOTYPES in message["model"]
    assert PROTOTYPES not in {path for path, _ in tree.leaves(reply.tree["model"])}


def test_a_class_that_no_asked_client_holds_keeps_its_prototype(tiny_task, tmp_path, monkeypatch):
    ask_only(monkeypatch, FedNH(), [2])  # client 2 owns class 1 alone
    experiment = start(tiny_task, tmp_path, FedNH())
    before = experiment.server.model.state_dict()[PROTOTYPES].clone()
    experiment.method.round(experiment.server, experiment.fleet)
    after = experiment.server.model.state_dict()[PROTOTYPES]
    assert torch.equal(after[[0, 2, 3]], before[[0, 2, 3]])
    assert not torch.equal(after[1], before[1])
    assert torch.allclose(after.norm(dim=1), torch.ones(4), atol=1e-5)


def test_rho_of_one_keeps_the_first_prototypes(tiny_task, tmp_path):
    before = start(tiny_task, tmp_path, FedNH()).server.model.state_dict()[PROTOTYPES]
    still, moved = (
        run(tiny_task, tmp_path, FedNH(rho=rho), rounds=2).server.model.state_dict()[PROTOTYPES] for rho in (1.0, 0.5)
    )
    assert torch.allclose(still, before, atol=1e-6)
    assert not torch.allclose(moved, before, atol=1e-2)
