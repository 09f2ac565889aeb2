"""Parts of an epoch and numbers of local steps: `local.epochs` below one, and `local.steps`."""

import pytest
import torch
from refusals import refused
from tiny import COUNTS, configure, make_experiment, open_client
from torch import nn

from raylt.config import LocalConfig, load, settled
from raylt.core.training import sgd as training
from raylt.errors import ConfigError
from raylt.methods.fedavg import FedAvg

SIZES = COUNTS.sum(1).tolist()


def order_of(client, epochs):
    return [batch.rows.tolist() for batch in client.batches(epochs, 8)]


def client_of(tiny_task, **local):
    id = max(range(len(SIZES)), key=SIZES.__getitem__)
    return open_client(tiny_task, FedAvg(), id, configure(local=local))


def test_a_part_of_an_epoch_is_the_beginning_of_a_whole_one(tiny_task):
    whole = order_of(client_of(tiny_task), 2)
    steps_per_epoch = len(whole) // 2
    assert steps_per_epoch >= 2
    assert order_of(client_of(tiny_task), 0.5) == whole[: int(steps_per_epoch / 2 + 0.5)]
    assert order_of(client_of(tiny_task), 1.5) == whole[: int(1.5 * steps_per_epoch + 0.5)]
    assert order_of(client_of(tiny_task), 1e-6) == whole[:1]  # at least one step
    assert order_of(client_of(tiny_task, epochs=0.5), None) == order_of(client_of(tiny_task), 0.5)


@pytest.mark.parametrize("steps", [1, 3, 20])
def test_a_number_of_steps_goes_through_the_data_as_often_as_it_takes(tiny_task, steps):
    client = client_of(tiny_task, steps=steps)
    whole = order_of(client_of(tiny_task), 20)
    assert order_of(client, None) == whole[:steps]
    assert client.steps() == steps
    assert client.epochs == pytest.approx(steps / client.steps(epochs=1))


@pytest.mark.parametrize(
    ("local", "samples", "steps"),
    [
        ({"epochs": 2}, 20, 6),
        ({"epochs": 0.5}, 20, 2),  # 1.5 steps, rounded to 2
        ({"epochs": 0.01}, 20, 1),
        ({"epochs": 0.5}, 1, 0),
        ({"steps": 5}, 20, 5),
        ({"steps": 5}, 1, 0),  # a batch of one sample cannot be trained on
        ({"steps": 5, "epochs": 7}, 1000, 5),
    ],
)
def test_steps_are_counted_before_training(local, samples, steps):
    assert LocalConfig(batch=8, **local).step_count(samples) == steps


@pytest.mark.parametrize(
    ("method", "passes"),
    [
        ({"name": "fedavg"}, (1,)),
        ({"name": "scaffold"}, (1,)),
        ({"name": "ditto"}, (1, 1)),
        ({"name": "fedrep", "head_epochs": 0}, (0, 1)),
        ({"name": "balancefl"}, (1,)),
        ({"name": "flea", "warm_up": 3}, (3,)),
    ],
)
def test_methods_take_that_many_steps(tiny_task, tmp_path, monkeypatch, method, passes):
    taken = []
    real = training.make_optimiser

    def counted(*args):
        optimiser = real(*args)
        step = optimiser.step
        taken.append(0)

        def once(loss):
            taken[-1] += 1
            step(loss)

        optimiser.step = once
        return optimiser

    monkeypatch.setattr(training, "make_optimiser", counted)
    experiment = make_experiment(
        configure(method=method, local={"steps": 4}, federation={"rounds": 1}), tiny_task, tmp_path
    )
    experiment.step()
    clients = [n for n in SIZES if n > 1]
    trained = [count for count in taken if count]
    assert sorted(trained) == sorted(4 * n for n in passes if n for _ in clients)


def test_a_fraction_and_steps_are_part_of_a_run_s_identity():
    plain = settled(load(None, ["method=fedavg"]))["local"]
    assert settled(load(None, ["method=fedavg", "local.epochs=0.5"]))["local"] == plain | {"epochs": 0.5}
    assert settled(load(None, ["method=fedavg", "local.steps=5"]))["local"] == plain | {"steps": 5}
    whole = settled(load(None, ["method=fedavg", "local.epochs=2.0"]))["local"]
    assert (whole, type(whole["epochs"])) == (plain, int)


@pytest.mark.parametrize("text", ["local.epochs=0", "local.epochs=-0.5", "local.steps=0", "local.epochs=half"])
def test_no_training_is_refused(text):
    with refused("config.out-of-range" if "half" not in text else "config.wrong-type", ConfigError):
        load(None, ["method=fedavg", text])


def test_running_statistics_are_not_taken_from_a_last_batch_of_one_sample(tiny_task):
    client = open_client(tiny_task, FedAvg(), 2, configure(local={"steps": 2}))  # nine samples in batches of eight
    client.model.local_buffers = frozenset(n for n, _ in client.model.named_buffers())
    training.take_statistics(client)
    other = open_client(tiny_task, FedAvg(), 2)
    other.model.train()
    for layer in other.model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.momentum = None  # means over the batches
    with torch.no_grad():
        for _ in range(2):
            other.model(other.samples.batch(torch.arange(8)).x)
    expected = other.model.state_dict()
    assert all(torch.allclose(value, expected[name]) for name, value in client.model.state_dict().items())
    momenta = [layer.momentum for layer in client.model.modules() if isinstance(layer, nn.BatchNorm2d)]
    assert momenta
    assert set(momenta) == {0.1}


def test_momentum_of_running_statistics_comes_back_where_the_device_was_full(tiny_task, monkeypatch):
    client = open_client(tiny_task, FedAvg(), 2, configure())
    client.model.local_buffers = frozenset(n for n, _ in client.model.named_buffers())

    def full(x):
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(client.model, "forward", full)
    with pytest.raises(torch.OutOfMemoryError):
        training.take_statistics(client)
    assert {layer.momentum for layer in client.model.modules() if isinstance(layer, nn.BatchNorm2d)} == {0.1}


def test_batches_of_one_sample_are_refused_as_all_would_be_dropped():
    with pytest.raises(ValueError, match="batches of 1 sample are dropped"):
        configure().local.step_count(5, epochs=1, batch=1)


def test_running_statistics_are_taken_from_as_many_batches_as_are_trained_on(tiny_task):
    client = client_of(tiny_task, steps=7)
    client.model.local_buffers = frozenset(n for n, _ in client.model.named_buffers())
    training.take_statistics(client)
    assert {int(value) for name, value in client.model.state_dict().items() if name.endswith("tracked")} == {7}
    assert torch.isfinite(next(client.model.parameters())).all()
