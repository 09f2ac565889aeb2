from dataclasses import replace

import naive
import pytest
import torch
from refusals import refused
from rounds import flat, run, start
from tiny import configure, open_client
from torch import tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from raylt.config import load
from raylt.errors import ConfigError
from raylt.methods.fedavg import FedAvg
from raylt.methods.ratioloss import RatioLoss, ratios


def test_ratios_by_hand():
    pulls = torch.zeros(3, 3, 2)
    pulls[:, 0, 0] = tensor([4.0, -1.0, -2.0])  # class 0 pulls alone: 4 over -1.5
    # class 2 pulls at least 0.8 times as strongly as class 1: no class pulls alone
    pulls[:, 1, 0] = tensor([-1.0, 5.0, 4.1])
    # class 1 does not pull alone, because class 0 pulls down almost as strongly
    pulls[:, 1, 1] = tensor([-4.5, 5.0, -1.0])
    pulls[:, 2, 0] = tensor([2.0, 0.5, -0.5])  # class 0 pulls alone at the output of class 2: 2 over 0
    pulls[:, 2, 1] = tensor([-0.1, -0.3, 0.5])  # class 2 pulls alone: 0.5 over -0.2
    # class 0: (4 + 2) / |-1.5 + 0|; class 1 never pulls alone: 10
    assert ratios(pulls, 0.8).tolist() == pytest.approx([4.0, 10.0, 2.5])
    # with a threshold of 0.85, class 2's 4.1 is no longer near and class 0's 4.5 still is: 5 / |-1 + 4.1| * 2
    assert ratios(pulls, 0.85)[1].item() == pytest.approx(10 / 3.1)


def test_a_class_that_the_server_has_no_image_of_is_refused_by_name(tiny_task):
    auxiliary = tiny_task.auxiliary
    kept = auxiliary.y != 2
    few = replace(tiny_task, auxiliary=replace(auxiliary, x=auxiliary.x[kept], y=auxiliary.y[kept]))
    with refused("data.too-few", ConfigError, key="data.auxiliary", classes=[tiny_task.class_names[2]]):
        RatioLoss().prepare(few, configure(), None)


def test_running_statistics_that_stay_at_clients_are_refused(tiny_task):
    with refused("config.conflict", ConfigError, key="federation.batchnorm", value="local"):
        RatioLoss().prepare(tiny_task, configure(federation={"batchnorm": "local"}), None)


def test_a_weight_at_which_no_class_pulls_counts_for_none():
    pulls = torch.zeros(2, 2, 1)
    assert ratios(pulls, 0.8).tolist() == [10.0, 10.0]
    pulls[1, 0, 0] = -3.0  # class 0 does not pull and the other class pulls down, so class 0 is alone, with 0 over 3
    assert ratios(pulls, 0.8).tolist() == [0.0, 10.0]
    pulls = torch.zeros(3, 3, 1)
    pulls[1:, 0, 0] = tensor([-3.0, -1.0])  # class 0 is alone again, with 0 over 2
    assert ratios(pulls, 0.8).tolist() == [0.0, 10.0, 10.0]
    pulls[1, 0, 0] = 0.0  # two classes do not pull, so neither is alone
    assert ratios(pulls, 0.8).tolist() == [10.0, 10.0, 10.0]


def naive_weights(task, model, alpha=1.0, beta=0.1, clip=5000.0):
    """Compute the weights of the classes: an update of the classifier by autograd for each class, then every weight."""
    x, y = naive.pixels(torch.from_numpy(task.auxiliary.x)), torch.from_numpy(task.auxiliary.y)
    model.eval()
    pulls = [
        -torch.autograd.grad(F.cross_entropy(model(x[y == c]), y[y == c]), model.classifier.weight)[0]
        for c in range(task.classes)
    ]
    own, others = [0.0] * task.classes, [0.0] * task.classes
    for i in range(pulls[0].shape[0]):
        for j in range(pulls[0].shape[1]):
            values = [pull[i, j].item() for pull in pulls]
            best = max(range(len(values)), key=values.__getitem__)
            near = [v for v in values if (v == 0 if values[best] == 0 else abs(v) > 0.8 * abs(values[best]))]
            if len(near) < 2:
                own[best] += values[best]
                others[best] += (sum(values) - values[best]) / (len(values) - 1)
    return tensor([alpha + beta * min(abs(a) / abs(b) if b else 10.0, clip) for a, b in zip(own, others, strict=True)])


def test_three_rounds_by_naive_code(tiny_task, tmp_path):
    experiment = run(tiny_task, tmp_path, RatioLoss(beta=0.3, alpha=0.8))
    model = naive.new_model(tiny_task)
    w = naive.entries(model)
    for round in (1, 2, 3):
        model.load_state_dict(w)
        weights = torch.ones(4) if round == 1 else naive_weights(tiny_task, model, 0.8, 0.3)
        ends, sizes = [], []
        for id in naive.clients_of(tiny_task):
            x, y = naive.client_data(tiny_task, id)
            model.load_state_dict(w)
            order = naive.generator("order", "train", round, id)
            naive.train(
                model,
                naive.epochs_of(len(y), order),
                lambda rows, x=x, y=y, r=weights: (
                    r[y[rows]] * F.cross_entropy(model(x[rows]), y[rows], reduction="none")
                ).mean(),
            )
            ends.append(naive.entries(model))
            sizes.append(float(len(y)))
        w = naive.average(ends, sizes)
    # weights of up to 10 amplify rounding, which differs between processors: 1e-4 on some after three rounds
    assert naive.differences(dict(experiment.server.model.state_dict()), w, atol=5e-4) == {}
    assert experiment.server.figures["largest_weight"] == pytest.approx(weights.max().item(), rel=1e-4)


def test_weights_multiply_the_loss_of_each_sample(tiny_task):
    client = open_client(tiny_task, RatioLoss(), 1)
    client.model.eval()
    batch, weights = client.samples.batch(torch.arange(14)), tensor([1.0, 2.0, 3.0, 4.0])
    loss = RatioLoss().objective(client, {"weights": weights})(batch)
    nll = -client.model(batch.x).log_softmax(1)[torch.arange(14), batch.y]
    assert loss.item() == pytest.approx(
        sum((w + 1) * n.item() for w, n in zip(batch.y.tolist(), nll, strict=True)) / 14, rel=1e-5
    )


def test_without_beta_it_is_fedavg(tiny_task, tmp_path):
    ends = [flat(run(tiny_task, tmp_path, method)) for method in (FedAvg(), RatioLoss(beta=0))]
    assert torch.allclose(*ends, atol=1e-6, rtol=0)


def test_the_first_round_is_fedavgs_and_ratios_follow_the_model_of_the_round(tiny_task, tmp_path):
    experiment = start(tiny_task, tmp_path, RatioLoss())
    method, server = experiment.method, experiment.server
    assert method.weights(server).tolist() == [1.0] * 4
    server.round = 2
    before = method.weights(server)
    assert (before > 1).all()
    with torch.no_grad():
        server.model.classifier.weight += torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    assert not torch.equal(method.weights(server), before)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("fields", [{"alpha": 0.7}, {"beta": 0.5}, {"clip": 0.3}, {"rival": 0.4}], ids=str)
def test_every_field_changes_the_model(tiny_task, tmp_path, fields):
    ends = [flat(run(tiny_task, tmp_path, RatioLoss(**given), rounds=2)) for given in ({}, fields)]
    assert not torch.equal(*ends)


def test_it_is_refused_without_images_at_the_server_before_anything_starts(tiny_task, tmp_path):
    import raylt

    config = load(None, ["method=ratioloss", "federation.rounds=2", "local.epochs=1", "data.clients=3"])
    with refused("config.conflict", ConfigError, key="data.auxiliary", value=0):
        raylt.run(config, out=tmp_path, name="none", fleet="local", quiet=True)
    hidden = config.model_copy(update={"privacy": config.privacy.model_copy(update={"update_epsilon": 1e3})})
    with refused("config.conflict", ConfigError, key="data.auxiliary", value=0) as caught:
        raylt.run(hidden, participation=1.0, out=tmp_path, name="none", fleet="local", quiet=True)
    assert "Set data.auxiliary" not in str(caught.value)
    config = load(
        None, ["method=ratioloss", "federation.rounds=2", "local.epochs=1", "data.clients=3", "data.auxiliary=5"]
    )
    run = raylt.run(config, out=tmp_path, name="some", fleet="local", quiet=True)
    assert run.summary["figures"]["largest_weight"] > 1
    assert len(run.task.auxiliary) == 50


class LargestTensor(TorchDispatchMode):
    """Record the bytes of the largest tensor that an operation returns; views count with their own size."""

    def __init__(self):
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        tensors = [
            value for value in (out if isinstance(out, tuple | list) else [out]) if isinstance(value, torch.Tensor)
        ]
        self.nbytes = max([self.nbytes, *(value.nbytes for value in tensors)])
        return out


def test_ratios_make_no_tensor_as_large_as_the_pulls():
    """With 1,000 classes and 2,048 features, the pulls take 8 GiB, and a copy in float64 would take 16."""
    pulls = torch.randn(12, 12, 20, generator=torch.Generator().manual_seed(0))
    with LargestTensor() as largest:
        ratios(pulls, 0.8)
    assert 0 < largest.nbytes < pulls.nbytes
