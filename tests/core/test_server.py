"""Figures and states that a method gives to the server."""

import numpy as np
import pytest
import torch
from refusals import refused
from tiny import CPU, configure, make_experiment, make_setup, tiny_pretrained

from raylt.core.server import ENDED_EARLY, Server, ServerMomentum
from raylt.errors import ConfigError
from raylt.methods.fedavg import FedAvg


@pytest.fixture
def server(tiny_task):
    config = configure()
    return Server(config, tiny_task.spec, make_setup(config).new_model(tiny_task.spec), CPU)


@pytest.mark.parametrize(("epsilon", "longest"), [(None, None), (1.0, 3.0)])
def test_the_longest_feature_is_that_to_which_features_are_clipped(server, tiny_task, epsilon, longest):
    config = configure(privacy={"epsilon": epsilon, "clip": 3.0})
    assert Server(config, tiny_task.spec, server.model, CPU).feature_limits == {"longest": longest, "negative": False}


def test_features_of_an_encoder_that_does_not_end_in_a_relu_may_be_negative(tiny_task):
    model = tiny_pretrained(tiny_task.classes, tiny_task.shape)
    assert Server(configure(), tiny_task.spec, model, CPU).feature_limits == {"longest": None, "negative": True}


def test_seeds_differ_by_purpose_round_and_run(server, tiny_task):
    other = configure(seed=1)
    others = Server(other, tiny_task.spec, server.model, CPU)
    seeds = {}
    for each in (server, others):
        for each.round in (1, 2):
            seeds |= {(each.config.seed, each.round, purpose): each.seed(purpose) for purpose in ("sample", "bank")}
    assert len(set(seeds.values())) == len(seeds) == 8
    server.round = 1
    assert server.seed("bank") == seeds[0, 1, "bank"]


def test_numbers_of_torch_and_numpy_are_logged_as_plain_numbers(server):
    server.log(
        a=torch.tensor(2.5),
        b=np.int64(3),
        c=np.float64(0.5),
        d=[torch.tensor([1]), (np.float32(2), "text")],
        e={"inner": {1: torch.tensor(True)}, 0.5: 1},
        f=None,
    )
    plain = {"a": 2.5, "b": 3, "c": 0.5, "d": [1, [2.0, "text"]], "e": {"inner": {1: True}, 0.5: 1}, "f": None}
    assert server.figures == plain
    assert type(server.figures["b"]) is int
    assert type(server.figures["e"]["inner"][1]) is bool


def test_figures_that_are_logged_one_after_another_stay(server):
    server.log(a=1, b=2)
    server.log(b=3)
    assert server.figures == {"a": 1, "b": 3}


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (torch.ones(2), "figure"),
        (np.ones(2), "figure"),
        (1j, "figure"),
        ({1, 2}, "figure"),
        ({(1, 2): 3}, "figure"),
        ([1, object()], "figure[1]"),
        ({"a": {"b": torch.zeros(0)}}, "figure.a.b"),
    ],
)
def test_a_figure_that_json_does_not_have_is_named(server, value, name):
    with refused("method.wrong-argument", ConfigError, key="server.log", value=name):
        server.log(figure=value)


@pytest.mark.parametrize("name", ["validation", "new_clients", "predictions", "zero_shot", "privacy", ENDED_EARLY])
def test_a_figure_of_raylts_own_is_not_logged_by_a_method(server, name):
    with refused("method.wrong-argument", ConfigError, key="server.log", value=name):
        server.log(**{name: 0.5})


@pytest.mark.parametrize("value", [[1], (1,), np.ones(1), {"a": {1: 2}}, {"a": {"b": [1]}}, {0: 1}])
def test_a_state_that_cannot_be_saved_ends_the_round(value, tiny_task, tmp_path):
    class Keeps(FedAvg):
        def round(self, server, fleet):
            server.state["v"] = value

    with refused("method.wrong-argument", ConfigError, key="server.state") as caught:
        make_experiment(configure(), tiny_task, tmp_path, Keeps()).step()
    assert "server.state: " in str(caught.value)
    assert "v" in str(caught.value)


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        (lambda mean: None, "None"),
        (list, "a list"),
        (lambda mean: mean | {"head.weight": torch.ones(2)}, "'head.weight', which the model does not have"),
        (lambda mean: mean | {"classifier.bias": 0.0}, "a float as classifier.bias"),
        (lambda mean: mean | {"classifier.bias": torch.ones(2)}, "classifier.bias of shape [2], which is ["),
    ],
)
@pytest.mark.parametrize("optimiser", [None, ServerMomentum()])
@pytest.mark.parametrize("function", ["step", "receive"])
def test_what_is_no_entry_of_the_model_is_named(tiny_task, tmp_path, function, optimiser, changed, fault):
    class Returns(FedAvg):
        def server_optimiser(self):
            return optimiser

        def round(self, server, fleet):
            averaged = dict(server.model.state_dict())
            getattr(server, function)(changed(averaged))

    with refused("method.wrong-argument", ConfigError, round=1, function=f"server.{function}") as caught:
        make_experiment(configure(), tiny_task, tmp_path, Returns()).step()
    assert f"round 1: server.{function} got {fault}" in str(caught.value)


def test_a_global_model_that_is_none_is_named(tiny_task, tmp_path):
    class Forgets(FedAvg):
        def global_model(self, server):
            return None

    with refused("model.wrong-type", ConfigError, key="method") as caught:
        make_experiment(configure(), tiny_task, tmp_path, Forgets()).step()
    assert "global_model of fedavg returned None" in str(caught.value)


@pytest.mark.parametrize("steps", [None, {}, {"encoder.absent": torch.zeros(1)}])
def test_a_server_optimiser_that_leaves_entries_out_is_named(tiny_task, tmp_path, steps):
    class Forgetful:
        def step(self, state, delta):
            return steps

    class Own(FedAvg):
        def server_optimiser(self):
            return Forgetful()

    with refused("method.wrong-argument", ConfigError, key="server_optimiser"):
        make_experiment(configure(), tiny_task, tmp_path, Own()).step()


@pytest.mark.parametrize("message", [None, [1], {}, {"weights": {}}, {"model": 1}])
def test_a_message_without_the_entries_of_a_model_is_named(tiny_task, tmp_path, message):
    class Own(FedAvg):
        def message(self, server):
            return message

    with refused("method.wrong-argument", ConfigError, key="method", value="fedavg"):
        make_experiment(configure(), tiny_task, tmp_path, Own()).step()
