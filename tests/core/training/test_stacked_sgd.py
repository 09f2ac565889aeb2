"""Clients that train in stacks: numbers as alone up to rounding, and bits that depend on no other client."""

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest
import torch
from refusals import refused
from tiny import CPU, configure, fingerprint, make_experiment, make_setup, make_task, tiny_odd
from torch import nn
from torch.nn import functional as F

from raylt import tree
from raylt.core.checkpoint import checkpoint
from raylt.core.fleet.client_host import ClientCall, ClientHost
from raylt.core.fleet.reductions import each
from raylt.core.method import Method
from raylt.core.training import stacked_sgd
from raylt.core.training.sgd import sgd
from raylt.core.training.stacked_sgd import MAX_CLIENTS, MAX_STACKED_SAMPLES, ClientStack, Workload, is_stackable
from raylt.data.augment import draw_view
from raylt.data.task import Shard, TaskSpec
from raylt.errors import TooFewReplies
from raylt.methods import METHODS
from raylt.methods.fedavg import FedAvg
from raylt.methods.fedbn import FedBN
from raylt.methods.fedprox import FedProx
from raylt.models.split import SplitModel

pytestmark = pytest.mark.usefixtures("stacks_on_any_processor")
SIZES = (1, 2, 3, 7, 8, 9, 13, 13, 16, 31, 128, 129)  # samples of a client; the last one is no small client
SPEC = TaskSpec("random", ("a", "b", "c"), (7, 7, 3), (0.5,) * 3, (0.25,) * 3)


def shard(id):
    rng = np.random.default_rng(id)
    return Shard(rng.integers(0, 256, (SIZES[id], 7, 7, 3), dtype=np.uint8), rng.integers(0, 3, SIZES[id]))


def features(id):
    """Return a client's features of a frozen encoder, of each image and of two views, [n, 3, 16]."""
    x = np.random.default_rng(id).standard_normal((SIZES[id], 3, 16), np.float32)
    return replace(shard(id), x=x)


def make_host(method=None, stacked="auto", model=tiny_odd, augment="none", **local):
    local = {"batch": 5, "stacked": stacked} | local
    config = configure(local=local, augment=augment, data={"clients": len(SIZES)})
    return ClientHost(replace(make_setup(config, method or FedAvg()), model=model), SPEC, shard(11), CPU)


def make_frozen_host(method, stacked="auto", augment=None, **local):
    """Return a host whose clients train on `features`."""
    local = {"batch": 5, "stacked": stacked, "epochs": 2} | local
    config = configure(local=local, trainable="classifier", data={"clients": len(SIZES)})
    setup = replace(make_setup(config, method), model=tiny_odd, augment=augment)
    return ClientHost(setup, SPEC, features(11), CPU)


def train_stack(host, ids, round=1, message=None, data=shard):
    """Train clients in stacks; return their reply trees and private states."""
    method = host.setup.method
    message = message or {"model": tree.snapshot(method.shared(host.model))}
    outcomes = host.run_stacks(method.train, message, round, [ClientCall(id, data(id), None) for id in ids])
    assert sorted(outcomes) == sorted(id for id in ids if SIZES[id] <= MAX_STACKED_SAMPLES)
    return {id: {"reply": reply.tree, "private": private} for id, (reply, private) in outcomes.items()}


def train_alone(host, ids, round=1, data=shard):
    method = host.setup.method
    message = {"model": tree.snapshot(method.shared(host.model))}
    trained = {}
    for id in ids:
        reply, private = host.run(method.train, message, round, id, data(id), None)
        trained[id] = tree.snapshot({"reply": reply.tree, "private": private})
    return trained


def assert_close(found, expected, tolerance=1e-5):
    found, expected = dict(tree.leaves(found)), dict(tree.leaves(expected))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            torch.as_tensor(found[name]), torch.as_tensor(value), rtol=tolerance, atol=tolerance, msg=name
        )


class Short(Method):
    """FedAvg with a loss term for the length of features, and one for the classifier's weights."""

    name: ClassVar[str] = "short"
    paper: ClassVar[str] = "for tests"
    stackable: ClassVar[bool] = True

    def objective(self, client, message):
        model = client.model
        weights = list(model.parameters())[-2]

        def loss(batch):
            z = model.encoder(batch.x)
            length = z.square().sum(1).mean() + weights.square().sum()
            return F.cross_entropy(model.classifier(z), batch.y) + 0.01 * length

        return loss


@pytest.mark.sampled(4)
@pytest.mark.parametrize("method", [FedAvg(), FedBN(), FedProx(mu=0.1), Short()], ids=lambda m: m.name)
@pytest.mark.parametrize(
    "local",
    [
        {"epochs": 1, "momentum": 0.0},
        pytest.param({"epochs": 2, "weight_decay": 0.01}, marks=pytest.mark.slow),
        {"steps": 3, "lr": 0.1, "warm_up": 3},
        pytest.param({"epochs": 0.5}, marks=pytest.mark.slow),
        {"epochs": 2, "augment": "crop_flip"},
        # Adam moves by its learning rate even where a gradient is nothing but rounding
        {"optimiser": "adam", "epochs": 2, "lr": 0.001, "weight_decay": 0.1},
        {"optimiser": "adamw", "steps": 3, "lr": 0.001, "weight_decay": 0.1},
    ],
    ids=str,
)
def test_clients_train_as_alone_whatever_the_lengths_of_their_batches(method, local):
    together = train_stack(make_host(method, **local), range(len(SIZES)))
    alone = train_alone(make_host(method, "off", **local), range(len(SIZES)))
    assert sorted(together) == [id for id, size in enumerate(SIZES) if size <= MAX_STACKED_SAMPLES]
    for id, found in together.items():
        assert_close(found, alone[id])
    # the client without a batch sends what it received
    assert together[0]["reply"]["loss"] == 0
    assert fingerprint(together[0]["reply"]) == fingerprint(alone[0]["reply"])


def test_bfloat16_rounds_as_alone():
    local = {"precision": "bfloat16", "epochs": 1}
    together, alone = train_stack(make_host(**local), range(6)), train_alone(make_host(None, "off", **local), range(6))
    for id, found in together.items():
        assert_close(found, alone[id], 5e-3)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("method", [FedAvg(), FedBN(), FedProx(), Short()], ids=lambda m: m.name)
@pytest.mark.parametrize(
    "setting",
    [
        pytest.param({"augment": "none"}, marks=pytest.mark.slow),
        {"augment": "crop_flip"},
        {"optimiser": "adam", "lr": 0.01},
        pytest.param({"optimiser": "adamw", "augment": "crop_flip"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_clients_bits_do_not_depend_on_the_others(method, setting):
    local = {"epochs": 2, "weight_decay": 0.01} | setting
    together = train_stack(make_host(method, **local), range(11))
    for some in ([10], [3, 10], [9, 1, 6], [5, 7, 6, 2, 8]):
        for id, found in train_stack(make_host(method, **local), some).items():
            assert fingerprint(found) == fingerprint(together[id]), f"client {id} in {some}"
    assert {id: fingerprint(found) for id, found in train_alone(make_host(method, **local), range(11)).items()} == {
        id: fingerprint(found) for id, found in together.items()
    }


@pytest.mark.parametrize("augment", [None, draw_view])
@pytest.mark.parametrize("method", [FedAvg(), FedProx(mu=0.1), Short()], ids=lambda m: m.name)
def test_clients_train_on_the_features_of_a_frozen_encoder_as_alone(method, augment):
    together = train_stack(make_frozen_host(method, augment=augment), range(len(SIZES)), data=features)
    alone = train_alone(make_frozen_host(method, "off", augment), range(len(SIZES)), data=features)
    some = train_stack(make_frozen_host(method, augment=augment), [7, 3, 6], data=features)
    for id, found in together.items():
        assert {name.partition(".")[0] for name in found["reply"]["model"]} == {"classifier"}
        assert_close(found, alone[id])
        assert id not in some or fingerprint(some[id]) == fingerprint(found)


def test_adam_trains_on_the_features_of_a_frozen_encoder_as_alone():
    local = {"optimiser": "adam", "lr": 0.001}
    together = train_stack(make_frozen_host(FedAvg(), **local), range(11), data=features)
    alone = train_alone(make_frozen_host(FedAvg(), "off", **local), range(11), data=features)
    some = train_stack(make_frozen_host(FedAvg(), **local), [7, 3, 6], data=features)
    for id, found in together.items():
        assert_close(found, alone[id])
        assert id not in some or fingerprint(some[id]) == fingerprint(found)


class OnlyEncoder(Method):
    """Method that trains the encoder alone, to shorter features."""

    name: ClassVar[str] = "encoder"
    paper: ClassVar[str] = "for tests"
    stackable: ClassVar[bool] = True

    def objective(self, client, message):
        return lambda batch: client.model.encoder(batch.x).square().mean()


@pytest.mark.parametrize("optimiser", ["sgd", "adam", "adamw"])
def test_parameters_without_a_gradient_stay_as_they_are(optimiser):
    local = {"optimiser": optimiser, "epochs": 2, "lr": 0.001, "weight_decay": 0.1}
    host = make_host(OnlyEncoder(), **local)
    sent = {name: value.clone() for name, value in host.model.classifier.state_dict().items()}
    together = train_stack(host, range(11))
    alone = train_alone(make_host(OnlyEncoder(), "off", **local), range(11))
    for id, found in together.items():
        assert_close(found, alone[id])
        assert all(torch.equal(found["reply"]["model"][f"classifier.{name}"], value) for name, value in sent.items())


@pytest.mark.slow
@pytest.mark.parametrize(("width", "classes"), [(512, 10), (768, 2), (1280, 10), (2048, 200)])
def test_a_clients_classifier_does_not_depend_on_the_number_of_companions(width, classes):
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(32, 20, width, generator=generator)
    weight = torch.randn(32, classes, width, generator=generator)
    y = torch.randint(classes, (32, 20), generator=generator)

    def of_client(places, place):
        own = weight[places].requires_grad_()
        logits = torch.bmm(z[places], own.transpose(1, 2))
        F.cross_entropy(logits.flatten(0, 1), y[places].flatten(), reduction="sum").backward()
        number = places.index(place)
        return fingerprint({"logits": logits[number], "gradient": own.grad[number]})

    first = of_client([4, 5], 4)
    assert {of_client(places, 4) for places in ([5, 4], [1, 2, 4], [4, *range(9)], list(range(32)))} == {first}


@pytest.mark.parametrize("optimiser", ["sgd", "adam"])
def test_a_stack_leaves_nothing_behind(optimiser):
    host = make_host(epochs=2, optimiser=optimiser)
    train_stack(host, [10, 9, 4])
    first = train_stack(host, [3, 5, 8], round=2)
    again = train_stack(make_host(epochs=2, optimiser=optimiser), [3, 5, 8], round=2)
    assert fingerprint(first) == fingerprint(again)
    assert all(client.model is host.model for client in host.clients.values())


def test_a_state_from_before_the_training_stays():
    host = make_host()
    message = {"model": tree.snapshot(host.setup.method.shared(host.model))}
    calls = [
        ClientCall(id, shard(id), {"model": {}, "state": {"joined": torch.full((2,), float(id))}}) for id in (3, 5)
    ]
    outcomes = host.run_stacks(host.setup.method.train, message, 1, calls)
    assert {id: state["state"]["joined"].tolist() for id, (_, state) in outcomes.items()} == {3: [3, 3], 5: [5, 5]}


@pytest.mark.slow
@pytest.mark.parametrize("optimiser", ["sgd", "adam"])
def test_more_clients_than_slots_train_in_several_stacks(monkeypatch, optimiser):
    whole = train_stack(make_host(optimiser=optimiser), range(11))
    monkeypatch.setattr("raylt.core.training.stacked_sgd.MAX_CLIENTS", 3)
    assert fingerprint(train_stack(make_host(optimiser=optimiser), range(11))) == fingerprint(whole)
    monkeypatch.setattr("raylt.core.training.stacked_sgd.MAX_SLOTS", 4)
    assert fingerprint(train_stack(make_host(optimiser=optimiser), range(11))) == fingerprint(whole)


def test_the_size_of_a_stack_follows_from_the_outputs_of_a_step_and_from_the_weights(monkeypatch):
    model = tiny_odd(3, (7, 7, 3))
    work = Workload.of(model, SPEC, 5)
    # 6 x 7 x 7 outputs from 27 inputs, 16 x 3 x 3 from 27, then 16 from 16, and 3 from 16
    assert work.multiplications == 5 * (6 * 49 * 27 + 16 * 9 * 27 + 16 * 16 + 3 * 16)
    # of one image: three maps of 6 x 7 x 7, one of 6 x 3 x 3, three of 16 x 3 x 3, five vectors of 16, the logits
    assert work.outputs == 5 * 4 * (3 * 6 * 49 + 6 * 9 + 3 * 16 * 9 + 5 * 16 + 3)
    assert [ClientStack(model, SPEC, batch).together for batch in (5, 500, 50_000)] == [
        MAX_CLIENTS,
        int(8 * 2**20 / (100 * work.outputs)),
        2,
    ]
    weights = 4 * sum(value.numel() for value in model.state_dict().values()) + 4  # the counter has 8 bytes
    monkeypatch.setattr("raylt.core.training.stacked_sgd.MAX_WEIGHT_BYTES", 10 * weights)
    assert ClientStack(model, SPEC, 5).slots == ClientStack(model, SPEC, 5).together == 10


# what cannot be stacked


@dataclass(frozen=True)
class Wide:
    """A network of two linear layers on an image of 8x8 pixels, with `width` features and a layer before the last."""

    width: int
    last: nn.Module | None = None

    def __call__(self, classes, shape):
        layers = [nn.Flatten(), nn.Linear(64, self.width), nn.ReLU(), nn.Linear(self.width, 64), self.last]
        return SplitModel(nn.Sequential(*(layer for layer in layers if layer is not None)), 64, classes)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({}, None),
        ({"augment": "crop_flip+color_jitter"}, None),
        ({"federation": {"secure": True}}, None),
        ({"local": {"stacked": "off"}}, "local.stacked = off"),
        ({"method": METHODS["scaffold"]()}, "method = scaffold is not stackable"),
        ({"local": {"optimiser": "adam"}}, None),
        ({"local": {"optimiser": "adamw"}}, None),
        ({"federation": {"deadline_s": 60}}, "a round does not wait for every client"),
        ({"federation": {"over_select": 0.5}}, "a round does not wait for every client"),
        ({"trainable": "last:1"}, "the model has a layer that cannot be stacked, Sequential"),
        ({"model": Wide(96)}, None),
        ({"model": Wide(1024)}, "the model has 132,420 trained weights, and stacks pay up to 100,000 with sgd"),
        (
            {"model": Wide(512), "local": {"optimiser": "adam"}},
            "the model has 66,372 trained weights, and stacks pay up to 50,000 with adam",
        ),
        (
            {"model": Wide(16, nn.GroupNorm(4, 64))},
            "a stack computes other outputs than the model, which has a layer in an unusual position",
        ),
        ({"model": "resnet8"}, "a step takes 97 million multiplications, and stacks pay up to 40"),
    ],
    ids=str,
)
def test_a_run_knows_why_its_clients_train_alone(tiny_task, settings, reason):
    settings = dict(settings)
    method = settings.pop("method", None)
    model = settings.pop("model", "small")
    named = {"model": model} if isinstance(model, str) else {}
    config = configure(local={"stacked": "auto"} | settings.pop("local", {}), **named, **settings)
    setup = make_setup(config, method)
    setup = setup if named else replace(setup, model=model)
    host = ClientHost(setup, tiny_task.spec, tiny_task.test, CPU)
    assert host.why_alone == reason
    expected = "small clients" if reason is None else f"no client, because {reason}"
    assert host.describe()["stacked"] == (None if config.local.stacked == "off" else expected)


def test_an_augmentation_of_ones_own_may_draw_from_torchs_generator_so_its_clients_train_alone(tiny_task):
    setup = replace(make_setup(configure(local={"stacked": "auto"})), augment=lambda x, y, generator: (x, y))
    host = ClientHost(setup, tiny_task.spec, tiny_task.test, CPU)
    assert host.why_alone == "augment = none is not built into raylt"


def test_clients_train_alone_where_their_bits_would_depend_on_the_others(monkeypatch):
    monkeypatch.setattr(stacked_sgd, "has_avx512", lambda: False)
    assert make_host().why_alone == (
        "the processor has no AVX-512, and a client's bits would depend on the number of clients in its stack"
    )


class Twice(FedAvg):
    """FedAvg whose clients train twice."""

    def train(self, client, message):
        sgd(client, self.objective(client, message))
        return super().train(client, message)


class Weighted(FedAvg):
    """FedAvg with another objective, which is not declared stackable."""

    def objective(self, client, message):
        return lambda batch: 2 * F.cross_entropy(client.model(batch.x), batch.y)


class Declared(Weighted):
    stackable: ClassVar[bool] = True


def test_the_declaration_does_not_cover_a_subclass_that_changes_the_training():
    assert is_stackable(FedAvg())
    assert is_stackable(Declared())
    assert is_stackable(METHODS["fedyogi"]())
    assert not is_stackable(Twice())
    assert not is_stackable(Weighted())
    assert not is_stackable(METHODS["fedntd"]())


def test_other_functions_than_train_run_alone():
    host = make_host(FedAvg())
    assert not host.stacks(host.setup.method.join)
    assert host.stacks(host.setup.method.train)


# failures


class Troubled(Method):
    """FedAvg in which one client raises from its second batch on, or leaves, or makes its model infinite."""

    name: ClassVar[str] = "troubled"
    paper: ClassVar[str] = "for tests"
    stackable: ClassVar[bool] = True
    who: int = 1
    how: str = "raises"

    def objective(self, client, message):
        batches = 0

        def loss(batch):
            nonlocal batches
            batches += 1
            if client.id == self.who and batches > 1 and self.how == "raises":
                raise ValueError("no such luck")
            if client.id == self.who and self.how == "leaves":
                raise SystemExit(3)
            scale = torch.inf if client.id == self.who and self.how == "diverges" else 1.0
            return scale * F.cross_entropy(client.model(batch.x), batch.y)

        return loss


def round_of(tmp_path, method, stacked="auto", **federation):
    """Run one round on the tiny task; return the experiment's fleet and the clients' models by id."""
    config = configure(local={"stacked": stacked, "batch": 8}, federation={"quorum": 0.5} | federation)
    fleet = make_experiment(config, make_task(), tmp_path, method).fleet
    fleet.begin(1)
    message = {"model": tree.snapshot(method.shared(fleet._host.model))}
    got = fleet.ask(method.train, fleet.ids, message, model=each, loss=each)
    return fleet, got["model"]


@pytest.mark.parametrize("how", ["raises", "leaves", "diverges"])
def test_a_client_that_fails_in_a_stack_is_named_and_harms_no_other(tmp_path, how):
    _, undisturbed = round_of(tmp_path, Troubled(who=-1))
    fleet, models = round_of(tmp_path, Troubled(how=how))
    assert list(models) == [0, 2, 3, 5]
    assert all(fingerprint(models[id]) == fingerprint(undisturbed[id]) for id in models)
    stats = fleet.round_stats
    assert (stats.lost, list(stats.rejected)) == (([], [1]) if how == "diverges" else ([1], []))
    with refused("reply.too-few", TooFewReplies, client=1) as caught:
        round_of(tmp_path, Troubled(how=how), quorum=1.0)
    assert ("ValueError: no such luck (test_stacked_sgd.py:" in str(caught.value)) == (how == "raises")


class TwiceApplied(Method):
    """Method that declares itself stackable, and applies the model to other images than its batch."""

    name: ClassVar[str] = "applied"
    paper: ClassVar[str] = "for tests"
    stackable: ClassVar[bool] = True

    def objective(self, client, message):
        return lambda batch: F.cross_entropy(client.model(batch.x.flip(3)), batch.y)


def test_an_objective_that_changes_the_message_of_its_stack_is_an_error():
    class Writes(FedAvg):
        stackable: ClassVar[bool] = True

        def objective(self, client, message):
            if client.id == 4:
                message["w"].mul_(0.5)
            return super().objective(client, message)

    host = make_host(Writes())
    message = {"model": tree.snapshot(Writes().shared(host.model)), "w": torch.ones(2)}
    calls = [ClientCall(id, shard(id), None) for id in (3, 4)]
    with pytest.warns(UserWarning, match=r"each trains alone: LateWrite: client \d: message.w was changed in place"):
        assert host.run_stacks(host.setup.method.train, message, 1, calls) == {}


def test_a_stack_that_fails_is_noticed_even_if_its_clients_have_no_error():
    class Odd(FedAvg):
        stackable: ClassVar[bool] = True

        def objective(self, client, message):
            weights = list(client.model.parameters()) if client.id % 2 else []
            return lambda batch: F.cross_entropy(client.model(batch.x), batch.y) + sum(w.sum() for w in weights)

    host = make_host(Odd())
    message = {"model": tree.snapshot(Odd().shared(host.model))}
    calls = [ClientCall(id, shard(id), None) for id in (3, 4)]
    with pytest.warns(UserWarning, match="a stack of clients failed, and each trains alone"):
        assert host.run_stacks(host.setup.method.train, message, 1, calls) == {}


def test_a_full_device_is_no_reason_to_train_without_a_stack(tmp_path, monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(ClientHost, "_run_stack", full)
    with refused("reply.too-few", TooFewReplies) as caught, pytest.warns(RuntimeWarning, match="out of memory"):
        round_of(tmp_path, FedAvg())
    assert "OutOfMemoryError" in str(caught.value)


def test_clients_of_an_objective_that_suits_no_stack_train_alone_and_a_note_says_so_once(tmp_path):
    _, alone = round_of(tmp_path / "alone", TwiceApplied(), stacked="off")
    with pytest.warns(RuntimeWarning, match="each trains alone: RuntimeError: a stackable objective") as caught:
        fleet, stacked = round_of(tmp_path / "stacked", TwiceApplied())
    assert len(caught) == 1
    fleet.on_note = pytest.fail
    message = {"model": tree.snapshot(TwiceApplied().shared(fleet._host.model))}
    fleet.ask(TwiceApplied().train, fleet.ids, message, model=each, loss=each)
    assert {*stacked} == {*fleet.ids}
    pairs = [zip(stacked[id].values(), alone[id].values(), strict=True) for id in fleet.ids]
    assert all(torch.equal(one, other) for pair in pairs for one, other in pair)


# whole runs


def test_a_resumed_run_has_the_bits_of_a_straight_one(tmp_path):
    def opened(folder):
        config = configure(local={"stacked": "auto", "batch": 8})
        return make_experiment(config, make_task(), tmp_path / folder, FedBN())

    straight, stopped, resumed = opened("straight"), opened("stopped"), opened("stopped")
    straight.step()
    stopped.save(stopped.step())
    saved, _ = checkpoint.latest(tmp_path / "stopped" / "checkpoints")
    resumed.load(saved)
    for experiment in (straight, resumed):
        experiment.step()
    ends = [
        {"server": dict(end.server.model.state_dict())}
        | {str(id): state for id, state in end.fleet.private_states(end.fleet.ids)}
        for end in (straight, resumed)
    ]
    assert fingerprint(ends[0]) == fingerprint(ends[1])


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"federation": {"secure": True}},
        {"federation": {"robust": "median"}},
        {"privacy": {"update_epsilon": 500.0}, "federation": {"sampling": "poisson", "participation": 0.95}},
        {"federation": {"batchnorm": "local"}},
        {"local": {"precision": "bfloat16"}},
    ],
    ids=str,
)
def test_stacks_go_with_every_protection(tmp_path, settings):
    local = {"batch": 8, "stacked": "auto"} | settings.get("local", {})
    experiment = make_experiment(configure(**settings | {"local": local}), make_task(), tmp_path, FedAvg())
    assert experiment.fleet._host.why_alone is None
    while not experiment.done:
        report = experiment.step()
        assert not report.lost
        assert not report.rejected
        assert not report.retried
