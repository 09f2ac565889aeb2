import copy
from dataclasses import replace

import naive
import numpy as np
import pytest
import torch
from refusals import refused
from tiny import COUNTS, CPU, configure, fingerprint, make_experiment, make_setup, open_client
from torch import nn, tensor
from torch.nn import functional as F

from raylt.core.client import Client
from raylt.core.evaluation.counts import confusion_of
from raylt.core.fleet.reductions import each
from raylt.core.training.features import features
from raylt.core.training.optimisers import SGD, Adam
from raylt.core.training.sgd import learning_rate, sgd
from raylt.data.augment import normalise
from raylt.data.samples import Samples
from raylt.errors import ConfigError
from raylt.methods.fedavg import FedAvg
from raylt.models import build_model
from raylt.seeds import seed_for, seeded


def make_client(task, id: int, config=None) -> Client:
    return open_client(task, FedAvg(), id, config)


def order_of(client: Client, epochs: float | None = 1, size: int = 8) -> list[int]:
    return torch.cat([batch.rows for batch in client.batches(epochs, size)]).tolist()


class Net(nn.Module):
    """A convolution, BatchNorm, a linear layer, and a parameter that the loss does not depend on."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 3)
        )
        self.unused = nn.Parameter(torch.ones(5))

    def forward(self, x):
        return self.body(x)


@pytest.mark.parametrize("weight_decay", [0.0, 1e-4])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_step_equals_that_of_torch_bit_for_bit(momentum, weight_decay):
    with seeded(0, "net"):
        ours, x, y = Net(), torch.randn(20, 6, 1, 8, 8), torch.randint(0, 3, (20, 6))
    torch_net = copy.deepcopy(ours)
    optimiser = SGD(ours.parameters(), 0.05, momentum, weight_decay)
    reference = torch.optim.SGD(torch_net.parameters(), 0.05, momentum, weight_decay=weight_decay)
    for step in range(20):
        optimiser.step(F.cross_entropy(ours(x[step]), y[step]))
        reference.zero_grad()
        F.cross_entropy(torch_net(x[step]), y[step]).backward()
        reference.step()
        assert fingerprint(ours.state_dict()) == fingerprint(torch_net.state_dict()), step
    assert torch.equal(ours.unused, torch.ones(5))


def test_sgd_step_starts_the_momentum_of_a_parameter_when_the_loss_first_depends_on_it():
    ours = [nn.Parameter(tensor([1.0, -2.0])), nn.Parameter(tensor([0.5, 3.0]))]
    torch_net = copy.deepcopy(ours)
    optimiser, reference = SGD(ours, 0.1, 0.9, 0.01), torch.optim.SGD(torch_net, 0.1, 0.9, weight_decay=0.01)
    for step in range(6):
        for params, take in [(ours, optimiser.step), (torch_net, None)]:
            loss = params[0].square().sum() + (params[1].pow(3).sum() if step % 3 == 2 else 0)
            if take:
                take(loss)
                continue
            reference.zero_grad()
            loss.backward()
            reference.step()
        assert all(torch.equal(a, b) for a, b in zip(ours, torch_net, strict=True)), step


@pytest.mark.parametrize("loss", [lambda a, b: (a + b).sum(), lambda a, b: (a + b).square().sum()])
def test_sgd_step_decays_parameters_whose_gradients_are_one_tensor(loss):
    # autograd gives both terms of a sum the same gradient tensor; for a plain sum it is one expanded number
    ours = [nn.Parameter(tensor([1.0, -2.0])), nn.Parameter(tensor([0.5, 3.0]))]
    torch_net = copy.deepcopy(ours)
    SGD(ours, 0.1, weight_decay=0.5).step(loss(*ours))
    loss(*torch_net).backward()
    torch.optim.SGD(torch_net, 0.1, weight_decay=0.5).step()
    assert all(torch.equal(a, b) for a, b in zip(ours, torch_net, strict=True))


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize(("decoupled", "torch_kind"), [(False, torch.optim.Adam), (True, torch.optim.AdamW)])
def test_adam_steps_equal_those_of_torch_also_of_a_parameter_that_rests(decoupled, torch_kind, weight_decay):
    with seeded(0, "net"):
        ours, x, y = Net(), torch.randn(20, 6, 1, 8, 8), torch.randint(0, 3, (20, 6))
    other = copy.deepcopy(ours)
    optimiser = Adam(ours.parameters(), 0.01, weight_decay, decoupled)
    reference = torch_kind(other.parameters(), 0.01, weight_decay=weight_decay)
    for step in range(20):
        used = step % 3 == 2  # the loss depends on `unused` in every third step only
        optimiser.step(
            F.cross_entropy(ours(x[step]), y[step]) + used * ours.unused.square().sum()
            if used
            else F.cross_entropy(ours(x[step]), y[step])
        )
        reference.zero_grad()
        loss = F.cross_entropy(other(x[step]), y[step])
        (loss + other.unused.square().sum() if used else loss).backward()
        reference.step()
    assert not torch.equal(ours.unused, torch.ones(5))
    for name, value in ours.state_dict().items():
        assert torch.allclose(value, other.state_dict()[name], rtol=1e-5, atol=1e-6), name


@pytest.mark.parametrize("optimiser", ["adam", "adamw"])
def test_clients_train_by_the_optimiser_that_is_asked_for(tiny_task, optimiser):
    moved = {}
    for name in ("sgd", optimiser):
        client = make_client(tiny_task, 0, configure(local={"batch": 24, "epochs": 1, "lr": 0.01, "optimiser": name}))
        before = copy.deepcopy(client.model.classifier.weight)
        sgd(client, lambda batch, client=client: F.cross_entropy(client.model(batch.x), batch.y))
        moved[name] = (client.model.classifier.weight - before).detach()
    # each weight moves by the learning rate in the first step
    assert torch.allclose(moved[optimiser].abs(), torch.full_like(moved[optimiser], 0.01), rtol=0.01)
    assert not torch.allclose(moved["sgd"].abs(), moved[optimiser].abs(), rtol=0.01)


@pytest.mark.parametrize("method", ["fednova", "scaffold", "qfedavg"])
@pytest.mark.parametrize("optimiser", ["adam", "adamw"])
def test_methods_that_count_gradients_refuse_other_optimisers(tiny_task, method, optimiser):
    setup = make_setup(configure(method={"name": method}, local={"optimiser": optimiser}))
    model = setup.new_model(tiny_task.spec)
    with pytest.raises(ConfigError, match=f"local.optimiser.*{method}.*{optimiser}"):
        setup.method.prepare(tiny_task, setup.config, model)


def test_sgd_leaves_frozen_and_unnamed_parameters_alone(tiny_task):
    client = make_client(tiny_task, 0)
    client.model.encoder.requires_grad_(False)
    before = copy.deepcopy(client.model)
    sgd(client, lambda batch: F.cross_entropy(client.model(batch.x), batch.y), client.model.classifier.parameters())
    changed = {name for name, p in client.model.named_parameters() if not torch.equal(p, before.get_parameter(name))}
    assert changed == {"classifier.weight", "classifier.bias"}


def test_sgd_returns_the_mean_loss_per_sample(tiny_task):
    client = make_client(tiny_task, 1)  # 14 samples in batches of 8 and 6, twice
    seen = []

    def objective(batch):
        loss = F.cross_entropy(client.model(batch.x), batch.y)
        seen.append((len(batch.y), loss.item()))
        return loss

    returned = sgd(client, objective)
    assert [n for n, _ in seen] == [8, 6, 8, 6]
    assert returned == pytest.approx(sum(n * loss for n, loss in seen) / 28, rel=1e-6)


@pytest.mark.parametrize(("given", "steps"), [({}, 4), ({"epochs": 3}, 6)])
def test_sgd_trains_in_training_mode_for_the_configured_epochs_or_those_given(tiny_task, given, steps):
    client, modes = make_client(tiny_task, 1), []

    def objective(batch):
        modes.append(client.model.training)
        return F.cross_entropy(client.model(batch.x), batch.y)

    client.model.eval()
    sgd(client, objective, **given)
    assert modes == [True] * steps


def test_sgd_at_a_given_rate_of_zero_changes_no_parameter(tiny_task):
    client = make_client(tiny_task, 1)
    before = fingerprint(dict(client.model.named_parameters()))
    sgd(client, lambda batch: F.cross_entropy(client.model(batch.x), batch.y), lr=0.0)
    assert fingerprint(dict(client.model.named_parameters())) == before


@pytest.mark.parametrize("id", [0, 1, 5])
def test_batches_hold_every_sample_once_per_epoch(tiny_task, id):
    n = int(COUNTS[id].sum())
    rows = order_of(make_client(tiny_task, id), epochs=2)
    assert sorted(rows[:n]) == sorted(rows[n:]) == list(range(n))
    assert rows[:n] != rows[n:]


def test_batches_drop_a_last_batch_of_one(tiny_task):
    # clients 2, 5 and 3 hold 9, 12 and 1 samples
    assert [len(b.y) for b in make_client(tiny_task, 2).batches(2, 8)] == [8, 8]
    assert [len(b.y) for b in make_client(tiny_task, 5).batches(1, 11)] == [11]
    assert [len(b.y) for b in make_client(tiny_task, 3).batches(2, 8)] == []


def test_batches_hold_the_images_and_labels_of_their_rows(tiny_task):
    for batch in make_client(tiny_task, 0).batches(1, 8):
        images = tiny_task.shards[0].x[batch.rows.numpy()].transpose(0, 3, 1, 2)
        assert np.allclose(batch.x.numpy(), (images / 255 - 0.5) / 0.25, atol=1e-5)
        assert np.array_equal(batch.y.numpy(), tiny_task.shards[0].y[batch.rows.numpy()])


def test_batch_order_depends_on_seed_function_round_and_client_only(tiny_task):
    shards = (tiny_task.shards[0],) * 6  # clients that differ only in their id
    task = replace(tiny_task, shards=shards)

    def order(seed=0, function="train", round=1, id=0):
        client = make_client(task, id, configure(seed=seed))
        client.begin(function, round)
        return order_of(client)

    first = order()
    torch.randperm(100)  # torch's global generator has no effect
    used = make_client(task, 0)
    order_of(used)
    used.begin("train", 1)  # nor have the client's earlier calls
    assert order() == order_of(used) == first
    others = [order(seed=1), order(function="statistics"), order(round=2), order(id=1)]
    assert len({tuple(rows) for rows in [first, *others]}) == 5


def test_augmentation_noise_depends_on_seed_function_round_and_client_only(tiny_task):
    task = replace(tiny_task, shards=(tiny_task.shards[0],) * 6)

    def noise(seed=0, function="train", round=1, id=0):
        client = make_client(task, id, configure(seed=seed))
        client.begin(function, round)
        return torch.rand(4, generator=client.noise).tolist()

    first = noise()
    torch.rand(100)  # torch's global generator has no effect
    assert noise() == first
    others = [noise(seed=1), noise(function="statistics"), noise(round=2), noise(id=1)]
    assert len({tuple(numbers) for numbers in [first, *others]}) == 5


def test_augmented_batches_are_drawn_from_the_clients_own_noise(tiny_task):
    def batches(round=1):
        client = make_client(tiny_task, 0, configure(augment="crop_flip"))
        client.begin("train", round)
        return [batch.x for batch in client.batches(1, 24)]

    plain = [batch.x for batch in make_client(tiny_task, 0).batches(1, 24)]
    first = batches()
    torch.rand(100)
    assert torch.equal(batches()[0], first[0])
    assert not torch.equal(first[0], plain[0])
    sums = [x.sum((1, 2, 3)).sort().values for x in (first[0], batches(round=2)[0])]
    assert not torch.allclose(*sums)  # other crops, whatever the order of the samples


def test_a_further_augmentation_follows_the_configured_one(tiny_task):
    client, rows = make_client(tiny_task, 0), torch.arange(6)
    client._augment = lambda x, y, generator: (x // 2, y)
    made = client.batch(rows, lambda x, y, generator: (x // 2 + 100, y)).x
    assert torch.allclose(made, naive.pixels(client.samples.x[rows] // 4 + 100), atol=1e-5)


def test_client_with_one_sample_returns_the_model_it_got(tiny_task, tmp_path):
    experiment = make_experiment(configure(), tiny_task, tmp_path)
    method, fleet = experiment.method, experiment.fleet
    message = method.message(experiment.server)
    got = fleet.ask(method.train, [3], message, model=each, loss=each)
    assert fingerprint(got["model"][3]) == fingerprint(message["model"])
    assert got["loss"][3] == 0


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_fedavg_with_one_client_equals_centralised_training_bit_for_bit(tiny_task, tmp_path, momentum):
    # The mean of one client is (24 w) / 24. The product has at most 24 + 5 bits, so it and the mean are exact in
    # float64.
    config = configure(
        seed=3, data={"clients": 1}, federation={"rounds": 3}, local={"momentum": momentum, "weight_decay": 1e-4}
    )
    shard = tiny_task.shards[0]
    alone = replace(tiny_task, shards=(shard,), client_counts=COUNTS[:1])
    experiment = make_experiment(config, alone, tmp_path)
    while not experiment.done:
        experiment.step()

    with seeded(3, "model"):
        model = build_model("small", 4, (8, 8, 1)).to(memory_format=torch.channels_last)
    model.train()
    x, y = torch.from_numpy(shard.x), torch.from_numpy(shard.y)
    for round in (1, 2, 3):
        optimiser = torch.optim.SGD(model.parameters(), 0.05, momentum, weight_decay=1e-4)
        order = torch.Generator().manual_seed(seed_for(3, "order", "train", round, 0))
        for _ in range(config.local.epochs):
            for rows in torch.randperm(24, generator=order).split(8):
                optimiser.zero_grad()
                F.cross_entropy(model(normalise(x[rows], tensor([0.5]), tensor([0.25]))), y[rows]).backward()
                optimiser.step()
    assert fingerprint(experiment.server.model.state_dict()) == fingerprint(model.state_dict())
    assert model.state_dict()["encoder.stage1.1.num_batches_tracked"] == 18  # 3 rounds, 2 epochs, 3 batches


@pytest.mark.parametrize("size", [7, 40, 500])
def test_confusion_of_equals_a_loop_over_samples(tiny_task, size):
    model = make_setup(configure()).new_model(tiny_task.spec).eval()
    samples = Samples(tiny_task.test, tiny_task.spec, CPU)
    found = confusion_of(model, samples, 4, size)
    expected = torch.zeros(4, 4, dtype=torch.int64)
    with torch.no_grad():
        for i in range(40):
            expected[samples.y[i], model(samples.batch(tensor([i])).x)[0].argmax()] += 1
    assert torch.equal(found, expected)
    assert found.sum(1).tolist() == [10] * 4


def test_learning_rate_falls_by_its_share_every_few_rounds(tiny_task):
    # 0.01 (1 - 0.005)^floor(t / 3) for rounds t = 0, 1, ...: MuPFL, 4.1
    client = make_client(
        tiny_task, 0, configure(local={"lr": 0.01, "lr_decay": 0.005, "lr_decay_every": 3}, federation={"rounds": 7})
    )
    found = {}
    for client.round in range(8):
        found[client.round] = learning_rate(client)
    assert found[0] == found[1] == found[3] == 0.01
    assert found[4] == found[6] == pytest.approx(0.01 * 0.995)
    assert found[7] == pytest.approx(0.01 * 0.995**2)


def test_learning_rate_falls_along_a_cosine_and_stays_for_what_follows(tiny_task):
    client = make_client(tiny_task, 0, configure(local={"lr": 0.1, "schedule": "cosine"}, federation={"rounds": 4}))
    found = []
    for client.round in range(6):
        found.append(learning_rate(client))
    assert found[0] == found[1] == 0.1
    assert found[3] == pytest.approx(0.05)
    assert found[5] == found[4] == pytest.approx(0.05 * (1 - 0.5**0.5))


@pytest.mark.parametrize("schedule", ["step", "cosine"])
def test_learning_rate_rises_over_the_rounds_of_the_warm_up(tiny_task, schedule):
    rounds = {"rounds": 8}
    plain = make_client(tiny_task, 0, configure(local={"lr": 0.1, "schedule": schedule}, federation=rounds))
    warm = make_client(
        tiny_task, 0, configure(local={"lr": 0.1, "schedule": schedule, "warm_up": 3}, federation=rounds)
    )
    for round, share in enumerate((0.25, 0.25, 0.5, 0.75, 1, 1, 1)):
        plain.round = warm.round = round
        assert learning_rate(warm) == pytest.approx(share * learning_rate(plain))


@pytest.mark.parametrize(
    "local",
    [{"lr_decay": 0.5, "lr_decay_every": 4}, {"schedule": "cosine"}, {"warm_up": 6}],
    ids=["step", "cosine", "up"],
)
def test_training_after_the_last_round_has_the_rate_of_the_last_round(tiny_task, local):
    client = make_client(tiny_task, 0, configure(local={"lr": 0.1, **local}, federation={"rounds": 4}))
    rates = []
    for client.round in (3, 4, 5):
        rates.append(learning_rate(client))
    assert rates[1] == rates[2]
    assert rates[0] != rates[1] or "lr_decay" in local


def test_training_steps_are_as_large_as_the_learning_rate_of_the_round(tiny_task):
    moved = {}
    for round, decay in [(1, 0.5), (2, 0.5), (2, 0.0)]:
        client = make_client(
            tiny_task, 0, configure(local={"batch": 24, "epochs": 1, "momentum": 0, "lr": 0.1, "lr_decay": decay})
        )
        client.round = round
        before = copy.deepcopy(client.model.classifier.weight)
        sgd(client, lambda batch, client=client: F.cross_entropy(client.model(batch.x), batch.y))
        moved[round, decay] = client.model.classifier.weight - before
    assert torch.allclose(moved[2, 0.5], moved[1, 0.5] / 2, atol=1e-6)
    assert torch.equal(moved[2, 0.0], moved[1, 0.5])


def test_only_the_encoder_of_features_follows_the_precision_of_training(tiny_task):
    cropped = []

    def crop(x, y, generator):
        cropped.append(torch.is_autocast_enabled("cpu"))
        return x, y

    whole, half = (
        make_client(tiny_task, 0, configure(local={"precision": precision})) for precision in ("float32", "bfloat16")
    )
    (z, y), (rounded, labels) = features(whole, crop), features(half, crop)
    assert z.dtype == rounded.dtype == torch.float32
    assert torch.equal(y, labels)
    assert not torch.equal(z, rounded)
    assert torch.allclose(z, rounded, atol=0.03 * z.abs().max().item())
    assert not any(cropped)


@pytest.mark.parametrize(
    "objective",
    [
        None,
        lambda batch: None,
        lambda batch: 1.5,
        lambda batch: torch.ones(len(batch.y), requires_grad=True),
        lambda batch: torch.ones(()),
    ],
    ids=["no function", "None", "a number", "a loss of each sample", "no gradient"],
)
def test_an_objective_that_gives_no_loss_is_named(objective, tiny_task):
    with refused("method.wrong-argument", ConfigError, key="objective"):
        sgd(make_client(tiny_task, 0), objective)
