"""The table of settings that exclude each other: planning a run refuses each pair."""

from typing import ClassVar

import pytest
import torch
from refusals import refused
from small_runs import QUICK, needs_of
from tiny import configure, make_experiment, make_setup

from raylt.core.exclusions import EXCLUSIONS
from raylt.core.method import Method
from raylt.errors import TooFewReplies
from raylt.methods import METHODS

BUDGET = {"update_epsilon": 1000.0, "noise_multiplier": 2.0}
EVERYBODY = {"participation": 1}


class SeesEach(Method):
    name: ClassVar[str] = "sees_each"
    paper: ClassVar[str] = "for tests"

    @property
    def sees_each(self) -> tuple[str, ...]:
        return ("map",)


class HasFresh(Method):
    name: ClassVar[str] = "has_fresh"
    paper: ClassVar[str] = "for tests"
    other_models: ClassVar[tuple[str, ...]] = ("fresh",)


class SharesNothing(Method):
    name: ClassVar[str] = "shares_nothing"
    paper: ClassVar[str] = "for tests"

    def shared(self, model):
        return {}


class SumsAndSees(SeesEach):
    """Method whose server sees each client's part, although its last phase could hide samples in sums."""

    sums_samples: ClassVar[bool] = True

    def finish(self, server, fleet):
        pass


PAIRS = [
    (
        "federation.sampling",
        "federation.over_select",
        {"federation": {"sampling": "poisson", "over_select": 0.5}},
        None,
    ),
    (
        "federation.sampling",
        "federation.participation",
        {"federation": {"sampling": "poisson", "participation": 0.1}},
        None,
    ),
    ("federation.secure", "federation.robust", {"federation": {"secure": True, "robust": "median"}}, None),
    ("federation.secure", "method", {"federation": {"secure": True}}, SeesEach()),
    ("federation.secure", "federation.participation", {"federation": {"secure": True, "participation": 0.01}}, None),
    ("federation.robust", "method", {"federation": {"robust": "median"}}, SharesNothing()),
    ("federation.robust", "method", {"federation": {"robust": "median"}}, SeesEach()),
    ("privacy.epsilon", "privacy.update_epsilon", {"privacy": BUDGET | {"epsilon": 1.0}}, None),
    ("privacy.epsilon", "method", {"privacy": {"epsilon": 1.0}}, None),
    ("privacy.epsilon", "method", {"privacy": {"epsilon": 1.0}}, SumsAndSees()),
    ("privacy.update_epsilon", "method", {"privacy": BUDGET, "federation": EVERYBODY}, METHODS["scaffold"]()),
    ("privacy.update_epsilon", "method", {"privacy": BUDGET, "federation": EVERYBODY}, METHODS["fednova"]()),
    ("privacy.update_epsilon", "method", {"privacy": BUDGET, "federation": EVERYBODY}, METHODS["qfedavg"]()),
    ("privacy.update_epsilon", "method", {"privacy": BUDGET, "federation": EVERYBODY}, METHODS["creff"]()),
    (
        "privacy.update_epsilon",
        "method",
        {"privacy": BUDGET, "federation": EVERYBODY},
        METHODS["la"](prior="global"),  # pyright: ignore[reportCallIssue]
    ),
    (
        "privacy.update_epsilon",
        "data.auxiliary",
        {"privacy": BUDGET, "federation": EVERYBODY, "data": {"auxiliary": 5}},
        None,
    ),
    ("privacy.update_epsilon", "federation.robust", {"privacy": BUDGET, "federation": {"robust": "median"}}, None),
    ("privacy.update_epsilon", "federation.sampling", {"privacy": BUDGET, "federation": {"participation": 0.5}}, None),
    (
        "privacy.update_epsilon",
        "federation.rounds",
        {"privacy": BUDGET | {"update_epsilon": 0.01}, "federation": EVERYBODY},
        None,
    ),
    ("privacy.clip", "privacy.epsilon", {"privacy": {"clip": 2.0}}, None),
    ("privacy.clip", "privacy.epsilon", {"privacy": BUDGET | {"clip": 2.0}, "federation": EVERYBODY}, None),
    ("privacy.delta", "privacy.epsilon", {"privacy": {"delta": 1e-3}}, None),
    ("privacy.noise_multiplier", "privacy.update_epsilon", {"privacy": {"noise_multiplier": 3.0}}, None),
    ("privacy.update_clip", "privacy.update_epsilon", {"privacy": {"update_clip": 0.1}}, None),
    ("evaluation.fresh", "method", {"evaluation": {"fresh": True}}, HasFresh()),
    ("trainable", "method", {"trainable": "classifier"}, METHODS["fedper"]()),
    ("federation.batchnorm", "model", {"trainable": "classifier", "federation": {"batchnorm": "local"}}, None),
    (
        "local.schedule",
        "data.new_clients",
        {"local": {"schedule": "cosine"}, "data": {"new_clients": 1}, "federation": {"rounds": 3}},
        METHODS["fedper"](),
    ),
    ("data.erased", "local.unlabelled", {"data": {"erased": "unlabelled"}}, None),
    (
        "federation.patience",
        "evaluation.personal",
        {"federation": {"patience": 2, "batchnorm": "local"}, "data": {"validation": 0.1}},
        None,
    ),
]


@pytest.mark.parametrize(("setting", "excludes", "settings", "method"), PAIRS)
def test_a_pair_is_refused_before_anything_starts(tiny_task, tmp_path, setting, excludes, settings, method):
    with refused("config.conflict", key=setting, excludes=excludes):
        make_experiment(configure(**settings), tiny_task, tmp_path, method)


def test_new_clients_of_a_shared_model_need_no_learning_rate(tiny_task):
    settings = {"local": {"schedule": "cosine"}, "data": {"new_clients": 1}, "federation": {"rounds": 3}}
    setup = make_setup(configure(**settings))
    setup.check(tiny_task.spec, setup.new_model(tiny_task.spec))


@pytest.mark.parametrize(
    ("settings", "method", "allowed"),
    [
        ({}, None, True),
        ({"federation": {"robust": "median"}}, None, False),
        ({"federation": {"secure": True}}, None, False),
        ({"privacy": BUDGET, "federation": EVERYBODY}, None, False),
        ({}, SeesEach(), False),
    ],
)
def test_a_divergence_names_the_robust_rule_only_where_the_run_may_set_it(
    tiny_task, tmp_path, settings, method, allowed
):
    experiment = make_experiment(configure(local={"lr": 1e6}, **settings), tiny_task, tmp_path, method)
    with pytest.raises(TooFewReplies) as caught:
        [experiment.step() for _ in range(2)]
    assert ("federation.robust" in str(caught.value)) == allowed


def test_every_row_names_its_setting_and_a_remedy_in_short_sentences():
    for row in EXCLUSIONS:
        assert row.remedy[0].isupper()
        assert not row.remedy.endswith(".")
        assert len(row.remedy.split()) <= 25


def test_the_chance_of_an_empty_round_is_at_most_one(tiny_task, tmp_path):
    # 1 - (1 - 0.9^10)^2 = 0.5758 with ten clients at 0.1 for two rounds
    config = configure(federation={"sampling": "poisson", "participation": 0.1, "rounds": 2}, data={"clients": 10})
    with refused("config.conflict", key="federation.sampling") as caught:
        make_experiment(config, tiny_task, tmp_path)
    assert "the chance that some round has no client is 0.58 (poisson)." in str(caught.value)
    sparse = configure(federation={"sampling": "poisson", "participation": 0.01, "rounds": 2}, data={"clients": 10})
    with refused("config.conflict", key="federation.sampling") as caught:
        make_experiment(sparse, tiny_task, tmp_path)
    assert "is 0.99 (poisson)." in str(caught.value)  # 1 - (1 - 0.99^10)^2; a sum over the rounds would give 1.8


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(METHODS))
def test_a_method_says_whether_clients_upload_more_than_a_model(tiny_task, tmp_path, monkeypatch, name):
    if name == "ratioloss":
        pytest.skip("needs images at the server")
    method = METHODS[name](**QUICK.get(name, {}))
    if method.uploads_more:
        return
    torch.manual_seed(0)
    config = configure(federation={"rounds": 1}, **needs_of(name))
    experiment = make_experiment(config, tiny_task, tmp_path, method)
    uploaded = set()
    ask = experiment.fleet.ask

    def listening(fn, cohort, message, weights=None, /, **parts):
        uploaded.update(parts if fn.__name__ != "_judge" else ())
        return ask(fn, cohort, message, weights, **parts)

    monkeypatch.setattr(experiment.fleet, "ask", listening)
    monkeypatch.setattr(type(experiment.evaluator), "evaluate", lambda self, *given: ({}, None))
    with pytest.raises(TypeError):  # a report needs an accuracy
        experiment.step()
    assert uploaded <= {"model", "loss"}
