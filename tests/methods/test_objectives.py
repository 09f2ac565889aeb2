"""The losses of all baselines are finite for odd clients, and have the gradient of their values."""

import pytest
import torch
from rounds import start
from small_runs import QUICK
from tiny import open_client
from torch import Tensor
from torch.nn import functional as F

from raylt import tree
from raylt.contract.case import Case
from raylt.core.training.sgd import autocast
from raylt.methods import METHODS as BY_NAME
from raylt.methods.balancefl import BalanceFL
from raylt.methods.ditto import Ditto
from raylt.methods.fedavg import FedAvg
from raylt.methods.feddecorr import FedDecorr
from raylt.methods.fedetf import FedETF
from raylt.methods.fedfocal import FedFocal
from raylt.methods.fedlc import FedLC
from raylt.methods.fedprox import FedProx
from raylt.methods.fedrod import FedRoD
from raylt.methods.la import LogitAdjustment
from raylt.methods.moon import MOON
from raylt.methods.ratioloss import RatioLoss

METHODS = (
    FedAvg(),
    FedProx(mu=0.3),
    FedLC(),
    FedLC(missing="eps"),
    FedFocal(),
    RatioLoss(),
    FedDecorr(),
    MOON(),
    FedRoD(),
    BalanceFL(),
    Ditto(),
)


def opened(task, folder, method, id: int, **local):
    """Open a client in the second round, with the entries of its message; return it and the message."""
    experiment = start(task, folder, method, local=local)
    experiment.server.round = 2
    message = tree.snapshot(method.message(experiment.server))
    client = open_client(task, method, id, experiment.config)
    client.receive(message["model"])
    return client, message


def loss_of(client, method, message):
    return method.near_global(client) if isinstance(method, Ditto) else method.objective(client, message)


@pytest.mark.parametrize("method", METHODS, ids=lambda m: f"{m.name}-{getattr(m, 'missing', '')}".rstrip("-"))
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_loss_and_gradient_are_finite_for_odd_clients_batches_and_logits(tiny_task, tmp_path, method, precision):
    # client 0 has all classes, client 5 has a class of one sample, client 1 lacks one class, client 2 has one class
    # alone
    for id, rows in ((0, 8), (5, 8), (1, 14), (2, 9)):
        client, message = opened(tiny_task, tmp_path, method, id, precision=precision)
        objective = loss_of(client, method, message)
        y = client.samples.y
        alike = (y == y[0]).nonzero().flatten()[:4]
        for batch in (client.samples.batch(torch.arange(rows)), client.samples.batch(alike)):
            for scale in (1.0, 0.0, 1e4):  # logits unchanged, all equal, and huge
                with torch.no_grad():
                    client.receive(message["model"])
                    client.model.classifier.weight.mul_(scale)
                client.model.train()
                with autocast(client):
                    loss = objective(batch)
                gradients = torch.autograd.grad(
                    loss, [p for p in client.model.parameters() if p.requires_grad], allow_unused=True
                )
                assert torch.isfinite(loss), (id, scale)
                assert all(torch.isfinite(g).all() for g in gradients if g is not None), (id, scale)


# FedRoD stops gradients on purpose and FedDecorr works in float32; both have tests of their own
@pytest.mark.parametrize(
    "method",
    [FedProx(mu=0.3), FedLC(), FedFocal(), RatioLoss(), MOON(mu=2.0), BalanceFL(fa=False, entropy=0.0), Ditto(lam=0.5)],
    ids=lambda m: m.name,
)
def test_gradient_is_that_of_finite_differences(tiny_task, tmp_path, method):
    client, message = opened(tiny_task, tmp_path, method, 1)
    client.model.double()
    objective, drawn = loss_of(client, method, message), torch.Generator().manual_seed(0)
    batch = client.samples.batch(torch.arange(14))
    batch = batch._replace(x=batch.x.double())
    client.model.eval()
    with torch.no_grad():  # away from the received model, where proximal terms are flat
        for p in client.model.parameters():
            p += 0.05 * torch.randn(p.shape, generator=drawn, dtype=torch.float64)
    params = [p for p in client.model.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(objective(batch), params, allow_unused=True)

    def value() -> float:
        with torch.no_grad():
            return objective(batch).item()

    for place in range(5):
        which = int(torch.randint(len(params), (1,), generator=drawn))
        p, g = params[which].detach(), gradients[which]
        i = tuple(int(torch.randint(size, (1,), generator=drawn)) for size in p.shape)
        before, ends = p[i].item(), []
        for step in (1e-5, -1e-5):
            p[i] = before + step
            ends.append(value())
        p[i] = before
        assert isinstance(g, Tensor)
        assert (ends[0] - ends[1]) / 2e-5 == pytest.approx(g[i].item(), rel=1e-4, abs=1e-7), place


@pytest.mark.parametrize("method", [FedAvg(), FedLC(), RatioLoss(), FedFocal()], ids=lambda m: m.name)
def test_a_constant_added_to_all_logits_changes_nothing(tiny_task, tmp_path, method):
    client, message = opened(tiny_task, tmp_path, method, 1)
    objective, batch = loss_of(client, method, message), client.samples.batch(torch.arange(14))
    client.model.eval()
    before = objective(batch).item()
    with torch.no_grad():
        client.model.classifier.bias.add_(3.0)
    assert objective(batch).item() == pytest.approx(before, rel=1e-5)


@pytest.mark.parametrize("kind", [FedETF, FedLC, FedRoD, LogitAdjustment], ids=lambda kind: kind.name)
def test_missing_classes_are_left_out_or_count_as_one_sample(tiny_task, tmp_path, kind):
    masked, one = kind(missing="mask"), kind(missing="one")
    client, message = opened(tiny_task, tmp_path, masked, 1)  # the client lacks class 3
    client.model.eval()
    batch = client.samples.batch(torch.arange(14))
    losses = [method.objective(client, message)(batch).item() for method in (masked, one)]
    client.counts = client.counts.clamp(min=1)
    filled = masked.objective(client, message)(batch).item()
    assert losses[1] == pytest.approx(filled, rel=1e-6)
    assert losses[0] < filled - 1e-3


# methods that compute cross-entropies themselves; the other methods run with the slow tests
QUICKLY = ("apfl", "ditto", "fedala", "feddyn", "fedprox", "mupfl", "pfedme", "qfedavg")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in QUICKLY else pytest.mark.slow)
        for name, kind in BY_NAME.items()
        if "segmentation" in kind.problems
    ],
)
def test_losses_of_label_maps_treat_unlabelled_pixels_as_the_setting_says(name, tmp_path, monkeypatch):
    """torch's cross-entropy knows no treatment of unlabelled pixels but to leave them out."""
    case = Case(BY_NAME[name](**QUICK.get(name, {})), "segmentation", tmp_path)
    cross_entropy = F.cross_entropy

    def watched(logits, y, *args, **how):
        assert y.ndim != 3
        return cross_entropy(logits, y, *args, **how)

    monkeypatch.setattr(F, "cross_entropy", watched)
    trace = case.run(case.config(local={"batch": 8, "unlabelled": "absent"}))
    assert [report.lost for report in trace.reports] == [[]] * len(trace.reports)
