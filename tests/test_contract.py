"""What every registered method keeps to, on the tiny task of each kind that it claims, in one process."""

import functools
import math
import pickle
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from tiny import (
    CPU,
    Recorder,
    configure,
    fingerprint,
    make_experiment,
    make_setup,
    normed,
    open_client,
    pixels,
    private_states,
)
from torch import Tensor

from raylt import tree
from raylt.config import Config
from raylt.core import checkpoint
from raylt.core.experiment import Experiment, Report
from raylt.core.host import Host
from raylt.core.in_process import LocalFleet
from raylt.core.setup import private_entries
from raylt.errors import ConfigError
from raylt.hyper import in_range, range_of
from raylt.methods import METHODS, make_method
from raylt.models import MODELS

# fields of a method that only decide how long it computes, cut down: {"creff": {"classifier_epochs": 2}}
QUICK: dict[str, dict[str, Any]] = {
    "sfd": {"rf_dim": 60, "m_min": 80, "m_max": 120, "synthesis_steps": 3, "epochs": 2},
    "mupfl": {"m": 5, "tau": 2, "matching_steps": 3},
    "fedsm": {"teacher": "none", "rounds": 1, "size": 5, "epochs": 2}}

CASES = [(name, kind) for name, method in METHODS.items() for kind in method.problems]
every_method = pytest.mark.parametrize("name", METHODS)
every_case = pytest.mark.parametrize(("name", "kind"), CASES, ids=["-".join(case) for case in CASES])
MODEL = {"classification": "small", "segmentation": "lraspp"}
# ceil(0.3 * 6) = 2 clients in each of 2 rounds: at least one of the 5 that hold samples is never asked to train
SOME = 0.3
all_or_some = pytest.mark.parametrize("participation", [1.0, SOME])


@dataclass(frozen=True)
class Run:
    """A finished run, and the bits of all that it leaves behind."""

    experiment: Experiment
    reports: list[Report]
    bits: dict[str, str]


def settings(name: str, kind: str = "classification", participation: float = 1.0, **parts: Any) -> Config:
    federation = {"participation": participation} | parts.pop("federation", {})
    return configure(model=MODEL[kind], method={"name": name} | QUICK.get(name, {}), federation=federation, **parts)


def finish(experiment: Experiment, reports: list[Report] | None = None) -> Run:
    reports = reports or []
    while not experiment.done:
        reports.append(experiment.step())
    states = {f"client {id}": fingerprint(state) for id, state in private_states(experiment).items()}
    return Run(experiment, reports, states | experiment.conclude() | {"server": fingerprint(experiment.server.state)})


@pytest.fixture(scope="module", autouse=True)
def small_models():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(MODELS, "lraspp", pixels)
        yield


@pytest.fixture
def task(kind, tiny_task, tiny_scenes):
    return {"classification": tiny_task, "segmentation": tiny_scenes}[kind]


@pytest.fixture(scope="module")
def straight(tiny_task, tiny_scenes, tmp_path_factory):
    """`straight(name, kind, participation)`: an undisturbed run, whose host is a `Watcher`; made once."""
    tasks = {"classification": tiny_task, "segmentation": tiny_scenes}

    @functools.cache
    def run(name: str, kind: str, participation: float = 1.0) -> Run:
        folder = tmp_path_factory.mktemp(name)
        return finish(make_experiment(settings(name, kind, participation), tasks[kind], folder, host=Watcher))

    return run


class Watcher(Recorder):
    """Notes the functions that change the message they get."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.changed: set[str] = set()

    def run(self, fn, message, round, id, shard, private):
        before = fingerprint(message)
        result = super().run(fn, message, round, id, shard, private)
        if fingerprint(message) != before:
            self.changed.add(fn.__name__)
        return result


class Backwards(LocalFleet):
    """Runs the last client first and, as every fleet, answers in the order of the ids."""

    def _answers(self, fn, ids, *rest):
        yield from reversed(list(super()._answers(fn, ids[::-1], *rest)))


class OwnHosts:
    """As many hosts, so model objects, as there are clients: one actor for each."""

    def __init__(self, *args: Any):
        self.args, self.hosts = args, {}

    def run(self, fn, message, round, id, shard, private):
        if id not in self.hosts:
            self.hosts[id] = Host(*self.args)
        return self.hosts[id].run(fn, message, round, id, shard, private)


class NewHosts:
    """A new host for every call: the actor was lost in between, and all caches with it."""

    def __init__(self, *args: Any):
        self.args = args

    def run(self, *call):
        return Host(*self.args).run(*call)


class FailsFirst(Host):
    """Each client's first call of a function in a round raises, after it has trained."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.failed: set[tuple[str, int, int]] = set()

    def run(self, fn, message, round, id, shard, private):
        result = super().run(fn, message, round, id, shard, private)
        if (call := (fn.__name__, round, id)) not in self.failed:
            self.failed.add(call)
            raise RuntimeError("the first attempt is lost")
        return result


@every_method
def test_method_is_registered_under_its_own_name_and_names_its_paper(name):
    assert METHODS[name].name == name
    assert METHODS[name].paper


@every_method
def test_method_has_defaults_and_is_frozen(name):
    method = METHODS[name]()
    assert METHODS[name].model_config["extra"] == "forbid"
    for field in ["unknown", *METHODS[name].model_fields]:
        with pytest.raises(ValidationError, match="frozen"):
            setattr(method, field, 0)


@every_method
def test_every_field_has_a_search_range_that_holds_its_default_and_a_source(name):
    for field, declared in METHODS[name].model_fields.items():
        assert in_range(declared.default, range_of(declared)), field
        assert declared.description, field


@all_or_some
@every_case
def test_run_ends_with_a_judged_model(straight, name, kind, participation):
    run = straight(name, kind, participation)
    assert [report.phase for report in run.reports[:2]] == ["round", "round"]
    assert run.reports[-1].accuracy is not None
    assert 0 <= run.reports[-1].accuracy <= 1
    assert not any(report.lost or report.retried or report.rejected for report in run.reports)


@every_case
def test_run_leaves_the_method_as_it_was(straight, name, kind):
    assert straight(name, kind).experiment.method == make_method(settings(name, kind).method)


@all_or_some
@every_case
def test_same_seed_gives_same_bits(straight, task, tmp_path, name, kind, participation):
    again = finish(make_experiment(settings(name, kind, participation), task, tmp_path))
    assert again.bits == straight(name, kind, participation).bits


@every_case
def test_another_seed_gives_other_bits(straight, task, tmp_path, name, kind):
    other = finish(make_experiment(settings(name, kind, seed=1), task, tmp_path))
    assert other.bits["model_sha256"] != straight(name, kind).bits["model_sha256"]


@every_case
def test_order_of_clients_does_not_change_a_bit(straight, task, tmp_path, name, kind):
    backwards = finish(make_experiment(settings(name, kind), task, tmp_path, fleet=Backwards))
    assert backwards.bits == straight(name, kind).bits


@pytest.mark.parametrize("hosts", [OwnHosts, NewHosts])
@every_case
def test_spread_of_clients_over_hosts_does_not_change_a_bit(straight, task, tmp_path, name, kind, hosts):
    spread = finish(make_experiment(settings(name, kind), task, tmp_path, host=hosts))
    assert spread.bits == straight(name, kind).bits


@every_case
def test_retried_calls_do_not_change_a_bit(straight, task, tmp_path, name, kind):
    retried = finish(make_experiment(settings(name, kind), task, tmp_path, host=FailsFirst))
    assert set(retried.reports[0].retried) == set(retried.experiment.fleet.ids)
    assert retried.bits == straight(name, kind).bits


@every_case
def test_judging_personal_models_in_between_does_not_change_a_bit(straight, task, tmp_path, name, kind):
    judged = finish(make_experiment(settings(name, kind, evaluation={"personal": 1}), task, tmp_path))
    assert judged.bits == straight(name, kind).bits


@all_or_some
@every_case
def test_run_resumed_after_every_step_equals_a_straight_run(straight, task, tmp_path, name, kind, participation):
    config = settings(name, kind, participation)
    experiment = make_experiment(config, task, tmp_path)
    reports = []
    while True:
        reports.append(experiment.step())
        if experiment.done:
            break
        experiment.save(reports[-1])
        saved, faults = checkpoint.latest(tmp_path / "checkpoints")
        assert saved is not None
        assert not faults
        experiment = make_experiment(config, task, tmp_path)
        experiment.load(saved)
    resumed = finish(experiment, reports)
    assert resumed.bits == straight(name, kind, participation).bits
    assert [r.accuracy for r in resumed.reports] == [r.accuracy for r in straight(name, kind, participation).reports]


@every_case
def test_messages_and_replies_are_trees_that_can_be_sent(straight, name, kind):
    host = straight(name, kind).experiment.fleet._host
    assert {function for function, *_ in host.replies} >= {"join", "train"}
    for sent in [*host.messages, *(reply for *_, reply in host.replies)]:
        for path, leaf in tree.leaves(sent):
            if isinstance(leaf, Tensor):
                assert leaf.device == CPU, path
                assert not leaf.requires_grad, path
                assert torch.isfinite(leaf).all(), path
            else:
                assert leaf is None or isinstance(leaf, str | int | float), path
                assert not isinstance(leaf, float) or math.isfinite(leaf), path
        assert fingerprint(pickle.loads(pickle.dumps(sent))) == fingerprint(sent)


@every_case
def test_client_functions_do_not_change_their_message(straight, name, kind):
    assert straight(name, kind).experiment.fleet._host.changed == set()


@pytest.mark.parametrize("batchnorm", ["average", "local"])
@every_case
def test_receive_takes_the_shared_entries_and_leaves_the_private_ones(task, name, kind, batchnorm):
    config = settings(name, kind, federation={"batchnorm": batchnorm})
    setup, other_setup = make_setup(config), make_setup(config.model_copy(update={"seed": 1}))
    client, method = open_client(task, setup.method, config=config), setup.method
    other = other_setup.new_model(task.facts)
    with torch.no_grad():
        for value in other.state_dict().values():
            value.add_(1)
    before = fingerprint(private_entries(method, client.model))
    client.receive(tree.snapshot(method.shared(other)))
    assert fingerprint(private_entries(method, client.model)) == before
    assert fingerprint(method.shared(client.model)) == fingerprint(method.shared(other))
    names = method.shared(client.model).keys() | private_entries(method, client.model).keys()
    assert names == client.model.state_dict().keys()


@every_case
def test_predict_gives_one_logit_per_class_and_pixel_where_labels_are_maps(straight, task, name, kind):
    experiment = straight(name, kind).experiment
    height, width, channels = task.shape
    x = torch.zeros(3, channels, height, width)
    with torch.no_grad():
        logits = experiment.method.predict(experiment.method.global_model(experiment.server).eval(), x)
    assert logits.shape == (3, task.classes, *{"classification": (), "segmentation": (height, width)}[kind])
    assert torch.isfinite(logits).all()


@every_case
def test_run_with_local_running_statistics_judges_each_client_with_its_own(task, tmp_path, name, kind):
    config = settings(name, kind, federation={"batchnorm": "local"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(MODELS, "small", normed)      # which has running statistics
        run = finish(make_experiment(config, task, tmp_path))
    assert run.reports[-1].by_client is not None
    assert run.reports[-1].global_accuracy is None
    assert run.experiment.server.model.stays


@every_case
def test_over_selection_ends_with_a_judged_model(task, tmp_path, name, kind):
    run = finish(make_experiment(settings(name, kind, SOME, federation={"over_select": 0.5}), task, tmp_path))
    assert run.reports[-1].accuracy is not None
    assert {len(report.participants) for report in run.reports if report.phase == "round"} == {2}


@every_case
def test_sample_may_return_a_plain_list(straight, task, tmp_path, name, kind):
    config = settings(name, kind, SOME)
    with pytest.MonkeyPatch.context() as patch:
        whole = METHODS[name].sample
        patch.setattr(METHODS[name], "sample", lambda *call: list(whole(*call)))
        run = finish(make_experiment(config, task, tmp_path))
    assert run.bits == straight(name, kind, SOME).bits
    assert [r.participants for r in run.reports] == [r.participants for r in straight(name, kind, SOME).reports]


@every_case
def test_there_is_a_last_phase_if_and_only_if_the_method_says_so(straight, name, kind):
    run = straight(name, kind)
    assert [r.phase for r in run.reports] == ["round", "round"] + ["finish"] * run.experiment.method.finishes
    if run.experiment.method.finishes:
        assert run.reports[-1].traffic


@every_method
def test_problems_that_a_method_does_not_claim_are_refused_before_anything_starts(tiny_task, tiny_scenes, tmp_path, name):
    for task in (tiny_task, tiny_scenes):
        experiment = functools.partial(make_experiment, settings(name, task.kind), task, tmp_path)
        if task.kind in METHODS[name].problems:
            experiment()
        else:
            said = f"method = {name}: is for .*, and scenes is a problem of segmentation"
            with pytest.raises(ConfigError, match=said):
                experiment()


def test_some_client_is_never_sampled_at_low_participation(straight, tiny_task):
    run = straight("fedavg", "classification", SOME)
    asked = {id for function, _, id, _ in run.experiment.fleet._host.replies if function == "train"}
    assert asked < set(run.experiment.fleet.ids) == {0, 1, 2, 3, 5}
