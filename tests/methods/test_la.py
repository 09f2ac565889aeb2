import math

import naive
import pytest
import torch
from rounds import run, start
from tiny import COUNTS, fingerprint, make_task, open_client
from torch.nn import functional as F

from raylt.methods.fedavg import FedAvg
from raylt.methods.fedetf import FedETF
from raylt.methods.fedrod import FedRoD
from raylt.methods.la import LogitAdjustment


def test_shift_is_tau_log_n_and_leaves_classes_without_samples_out():
    shift = LogitAdjustment(tau=0.5).shift(torch.tensor([1, 4, 9, 0]))
    assert shift.tolist()[:3] == pytest.approx([0, math.log(2), math.log(3)])
    assert shift[3] == -torch.inf
    assert LogitAdjustment(tau=0).shift(torch.tensor([5, 0])).tolist() == [0, 0]


@pytest.mark.parametrize("method", [LogitAdjustment, FedRoD, FedETF])
def test_without_the_mask_a_class_without_samples_counts_as_one(tiny_task, method):
    masked, counted = (method(missing=missing) for missing in ("mask", "one"))
    client = open_client(tiny_task, masked, 1)  # class counts 8, 3, 3, 0
    client.model.eval()
    batch = client.samples.batch(torch.arange(14))
    with torch.no_grad():
        f = client.model(batch.x)
        left_out = F.cross_entropy(f + torch.tensor([8, 3, 3, 0]).log(), batch.y)
        every = F.cross_entropy(f + torch.tensor([8, 3, 3, 1]).log(), batch.y)
        assert every > left_out
        gain = counted.objective(client, {})(batch) - masked.objective(client, {})(batch)
    assert gain.item() == pytest.approx((every - left_out).item(), rel=1e-4)


@pytest.mark.parametrize("prior", ["local", "global"])
def test_without_tau_it_is_fedavg_to_the_bit(tiny_task, tmp_path, prior):
    ends = [run(tiny_task, tmp_path, method) for method in (FedAvg(), LogitAdjustment(tau=0, prior=prior))]
    averaged, adjusted = (fingerprint(end.server.model.state_dict()) for end in ends)
    assert adjusted == averaged


@pytest.mark.parametrize("prior", ["local", "global"])
def test_objective_is_the_adjusted_softmax_written_out(tiny_task, tmp_path, prior):
    method = LogitAdjustment(tau=1.5, prior=prior)
    message = method.message(start(tiny_task, tmp_path, method).server)
    client = open_client(tiny_task, method, 1)  # class counts 8, 3, 3, 0
    client.model.eval()
    batch = client.samples.batch(torch.arange(14))
    counts = COUNTS.sum(0) if prior == "global" else COUNTS[1]
    with torch.no_grad():
        f = client.model(batch.x).double()
        weights = (torch.tensor(counts) / counts.sum()) ** 1.5 * f.exp()
        expected = -(weights / weights.sum(1, keepdim=True)).log()[torch.arange(14), batch.y].mean()
    assert method.objective(client, message)(batch).item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("prior", ["local", "global"])
def test_round_is_that_of_naive_code(tiny_task, tmp_path, prior):
    """Train all clients with the shift of their own or of the pooled counts, then take the weighted mean."""
    server = run(tiny_task, tmp_path, LogitAdjustment(tau=0.5, prior=prior), rounds=1).server
    ends, weights = [], []
    labels = torch.cat([naive.client_data(tiny_task, id)[1] for id in naive.clients_of(tiny_task)])
    for id in naive.clients_of(tiny_task):
        model, (x, y) = naive.new_model(tiny_task), naive.client_data(tiny_task, id)
        pi = torch.bincount(labels if prior == "global" else y, minlength=4).double()
        shift = (0.5 * (pi / pi.sum()).log()).float()
        naive.train(
            model,
            naive.epochs_of(len(y), naive.generator("order", "train", 1, id)),
            lambda rows, model=model, x=x, y=y, shift=shift: F.cross_entropy(model(x[rows]) + shift, y[rows]),
        )
        ends.append(naive.entries(model))
        weights.append(len(y))
    assert naive.differences(naive.entries(server.model), naive.average(ends, weights)) == {}


def test_only_the_global_prior_asks_for_counts(tiny_task, tmp_path):
    for prior in ("local", "global"):
        server = start(tiny_task, tmp_path, LogitAdjustment(prior=prior)).server
        assert ("counts" in server.state) == (prior == "global")
    assert server.state["counts"].tolist() == COUNTS.sum(0).tolist()


def test_class_that_no_client_holds_is_left_out(tmp_path):
    task = make_task()
    for shard in task.shards:
        shard.y[shard.y == 3] = 0
    server = run(task, tmp_path, LogitAdjustment(prior="global"), rounds=1).server
    started = naive.new_model(task).state_dict()["classifier.weight"][3]
    assert torch.equal(server.model.state_dict()["classifier.weight"][3], started)
