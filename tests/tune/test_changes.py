"""The settings that may change when a trial continues from another trial's checkpoint."""

import pytest
from refusals import refused

from raylt.config import load
from raylt.core.method import Method
from raylt.errors import ConfigError
from raylt.hyper import Uniform, hp
from raylt.methods import METHODS
from raylt.registry import register
from tune.changes import check_changes, check_exchangeable, fields_before_rounds, may_change
from tune.space import configure


@pytest.mark.parametrize(
    ("key", "method", "may"),
    [
        ("local.lr", "fedprox", True),
        ("local.batch", "sfd", True),
        ("method.mu", "fedprox", True),
        ("method.tau", "sfd", True),
        ("method.projection", "sfd", False),  # the field shapes the model
        ("method.projection", "moon", False),
        ("method.prior", "la", False),  # clients upload their counts for this field when they join
        ("method.initial", "bpfed", False),
        ("method.nothing", "fedprox", False),
        ("federation.rounds", "fedprox", False),
        ("data.alpha", "fedprox", False),
        ("model", "fedprox", False),
        ("seed", "fedprox", False),
    ],
)
def test_a_setting_may_change_where_it_acts_in_every_round(key, method, may):
    assert may_change(key, method) is may


@pytest.mark.parametrize("method", METHODS)
def test_the_source_of_every_method_can_be_read_for_its_fields(method):
    assert fields_before_rounds(method) <= set(METHODS[method].model_fields)


def test_a_method_that_hands_itself_on_before_rounds_keeps_all_its_fields(no_guests):
    class HandsItselfOn(Method):
        name = "hands_itself_on"
        paper = "none"
        a: float = hp(0.5, Uniform(0, 1), "a")

        def start(self, server, fleet):
            print(self)

    register(HandsItselfOn)
    assert fields_before_rounds("hands_itself_on") == {"a"}


def test_fields_that_act_before_rounds_are_found_in_every_function_and_base_class(no_guests):
    class Early(Method):
        name = "early"
        paper = "none"
        built: float = hp(0.5, Uniform(0, 1), "a")
        sent: float = hp(0.5, Uniform(0, 1), "a")
        prepared: float = hp(0.5, Uniform(0, 1), "a")
        joined: float = hp(0.5, Uniform(0, 1), "a")
        started: float = hp(0.5, Uniform(0, 1), "a")
        trained: float = hp(0.5, Uniform(0, 1), "a")

        def build(self, model, spec, config):
            return super().build(model, spec, config) if self.built else model

        def shared(self, model):
            return self._entries(model)

        def _entries(self, model):
            return super().shared(model) if self.sent else {}

        def prepare(self, task, config, model):
            assert self.prepared

        def join(self, client, message):
            return client.reply(joined=self.joined)

        def start(self, server, fleet):
            server.state["started"] = self.started

        def train(self, client, message):
            return client.reply(trained=self.trained)

    class Later(Early):
        name = "later"
        checked: float = hp(0.5, Uniform(0, 1), "a")

        def prepare(self, task, config, model):
            super().prepare(task, config, model)
            assert self.checked

    for method in (Early, Later):
        register(method)
    early = {"built", "sent", "prepared", "joined", "started"}
    assert fields_before_rounds("early") == early
    assert fields_before_rounds("later") == early | {"checked"}
    assert may_change("method.trained", "later")


def test_a_method_without_source_keeps_all_its_fields(no_guests):
    space = {"Method": Method, "hp": hp, "Uniform": Uniform, "__name__": "typed"}
    exec(
        "class Typed(Method):\n name = 'typed'\n paper = 'none'\n a: float = hp(0.5, Uniform(0, 1), 'a')",
        space,
    )
    register(space["Typed"])
    assert fields_before_rounds("typed") == {"a"}


def test_continuing_with_other_fixed_settings_is_refused():
    base = load(None, ["method=sfd"])
    before = configure(base, "sfd", {"local.lr": 0.1})
    check_changes(before, configure(base, "sfd", {"local.lr": 0.2, "method.tau": 0.2}))
    with refused("search.fixed-setting", ConfigError, key="method.hidden"):
        check_changes(before, configure(base, "sfd", {"method.hidden": 64}))
    with refused("search.fixed-setting", ConfigError, key="data.alpha"):
        check_changes(before, configure(base, "sfd", {"data.alpha": 0.1}))


def test_ranges_that_population_based_training_cannot_use_are_refused():
    check_exchangeable(["local.lr", "method.mu"], "fedprox")
    with refused("search.fixed-setting", ConfigError, key="seed", method="fedprox"):
        check_exchangeable(["local.lr", "seed"], "fedprox")
