"""The table of trials of a search with one of Ray's schedulers."""

import json
import os
import signal
from dataclasses import asdict
from types import SimpleNamespace

import pytest
from ray import cloudpickle
from ray import tune as ray_tune
from refusals import refused

from raylt.config import load
from raylt.errors import CheckpointError, ConfigError, RayltError
from raylt.registry import load_plugin
from raylt.signals import STOPS
from tune.ray_tune import waiting
from tune.ray_tune.search import (
    RaySearchPlan,
    _conclude,
    _fit,
    _opened,
    _print,
    _searcher,
    ray_search,
    resume_ray_search,
)
from tune.ray_tune.space import param_space


class Results(list):
    """The results of Ray's trials, none of which raised an error."""

    errors = ()


def result(trial, accuracy, rate=0.1, error=None):
    metrics = {} if trial is None else {"trial_id": trial, "round": 2, "accuracy": accuracy}
    return SimpleNamespace(metrics=metrics, config={"local.lr": rate}, error=error)


def plan_of(**changes):
    fields = {
        "config": load(None, ["method=fedavg"]).model_dump(mode="json"),
        "space": {"local.lr": "loguniform(0.01, 1.0)"},
        "samples": 4,
        "metric": "accuracy",
        "searcher": "random",
        "scheduler": "median",
        "grace": None,
        "seed": 0,
        "parallel": 1,
        "retries": 0,
    }
    return RaySearchPlan(**{**fields, **changes})


def test_a_trial_without_results_ranks_below_one_with_no_right_prediction(tmp_path):
    plan = plan_of()
    results = Results([result(None, None), result("b", 0.0), result(None, None), result("a", 0.0)])
    assert [row["trial"] for row in _conclude(tmp_path, plan, results).rows] == ["a", "b", None, None]


def test_a_failed_trial_is_never_the_best(tmp_path):
    error = RuntimeError("no room")
    results = Results([result("a", 0.9, rate=0.5, error=error), result("b", 0.4, rate=0.2), result("c", 0.3)])
    ended = _conclude(tmp_path, plan_of(), results)
    assert [row["trial"] for row in ended.rows] == ["b", "c", "a"]
    assert load(tmp_path / "best.yaml").local.lr == 0.2


def test_trials_that_all_failed_have_no_best(tmp_path):
    results = Results([result("a", 0.9, error=RuntimeError("no room")), result(None, None, error=RuntimeError("boom"))])
    with refused("search.no-result", RayltError, trials=2, cause="no room"):
        _conclude(tmp_path, plan_of(), results)
    assert not (tmp_path / "best.yaml").exists()


class Clock:
    now = 0.0

    def monotonic(self):
        return self.now


def noticed(monkeypatch, steps):
    """Return the times at which a search notes that it waits, for steps of (time, running, waits for room)."""
    clock, state, times = Clock(), {}, []
    monkeypatch.setattr(waiting, "time", clock)
    monkeypatch.setattr(waiting, "_waits_for_room", lambda: state["waits"])
    notice = waiting.WaitingNotice(lambda text: times.append(clock.now))
    for clock.now, running, state["waits"] in steps:
        notice.on_step_end(0, [SimpleNamespace(status="PENDING"), SimpleNamespace(status="RUNNING")][: 1 + running])
    return times


@pytest.mark.parametrize(
    ("steps", "times"),
    [
        ([(0, False, True), (9, False, True), (10, False, True), (30, False, True)], [10]),
        ([(0, False, True), (9, True, True), (12, False, True), (21, False, True), (22, False, True)], [22]),
        ([(0, False, False), (10, False, False), (19, False, True), (20, False, True)], [20]),
        ([(0, False, True), (10, False, True), (11, True, False), (12, False, True), (22, False, True)], [10, 22]),
        ([(0, True, True), (50, True, True)], []),
    ],
)
def test_a_search_without_room_says_so_once_after_ten_seconds_without_a_trial(monkeypatch, steps, times):
    assert noticed(monkeypatch, steps) == times


@pytest.mark.parametrize(
    ("state", "owner", "waits"),
    [("PENDING", "02000000", True), ("CREATED", "02000000", False), ("PENDING", "03000000", False)],
)
def test_a_search_waits_for_room_while_a_group_of_its_own_job_is_pending(monkeypatch, state, owner, waits):
    job = SimpleNamespace(get_job_id=lambda: "02000000")
    monkeypatch.setattr(waiting.ray, "get_runtime_context", lambda: job)
    groups = {"first": {"state": state, "placement_group_id": f"97f5bb42000000{owner}"}}
    monkeypatch.setattr(waiting, "placement_group_table", lambda: groups)
    assert waiting._waits_for_room() is waits


def test_notices_of_searches_are_pickled_with_tunes_settings():
    from tune.ray_tune.backend import RaySearchAdapter

    assert cloudpickle.loads(cloudpickle.dumps(waiting.WaitingNotice(RaySearchAdapter(object(), 1).note)))
    assert cloudpickle.loads(cloudpickle.dumps(waiting.WaitingNotice(_print)))


@pytest.mark.parametrize("choices", [{"searcher": "random"}, {"searcher": "tpe", "scheduler": "pbt"}])
def test_random_values_follow_from_the_seed(choices):
    def values(seed):
        plan = plan_of(seed=seed, **choices)
        searcher = _searcher(plan)
        spec = {
            "run": lambda config: None,
            "config": param_space(_opened(plan)[1], grid=False),
            "num_samples": plan.samples,
        }
        searcher.add_configurations({"it": spec})
        rates = []
        for _ in range(plan.samples):
            trial = searcher.next_trial()
            rates.append(trial.config["local.lr"])
            searcher.on_trial_complete(trial.trial_id)  # one at a time, as the plan says
        return rates

    assert values(3) == values(3)
    assert len({*values(3), *values(4)}) == 8


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"samples": "4"}, "samples"),
        ({"scheduler": "bohb"}, "scheduler"),
        ({"more": 1}, "more"),
        ({"seed": None}, "seed"),
        ({"space": []}, "space"),
    ],
)
def test_a_plan_that_is_malformed_is_refused(tmp_path, change, key):
    (tmp_path / "ray_search.json").write_text(json.dumps(asdict(plan_of()) | change))
    with refused("file.malformed", CheckpointError, key=key):
        resume_ray_search(tmp_path)


def test_a_plan_without_a_field_or_with_another_text_than_a_range_is_refused(tmp_path):
    tree = asdict(plan_of())
    del tree["metric"]
    (tmp_path / "ray_search.json").write_text(json.dumps(tree))
    with refused("file.malformed", CheckpointError, key="metric"):
        resume_ray_search(tmp_path)
    (tmp_path / "ray_search.json").write_text(json.dumps(asdict(plan_of(space={"local.lr": "0.1"}))))
    with refused("search.changed", CheckpointError, key="local.lr"):
        resume_ray_search(tmp_path)


def test_a_search_does_not_continue_with_another_version_of_a_plugin(tmp_path, monkeypatch, no_guests):
    text = "import raylt\nclass Own(raylt.Method):\n    name = 'own'\n    paper = 'none'\n"
    file = tmp_path / "own.py"
    file.write_text(text)
    load_plugin(file)
    monkeypatch.setattr("tune.ray_tune.search.trainable", lambda *_: ray_tune.Trainable)
    monkeypatch.setattr("tune.ray_tune.search._fit", lambda _: Results([result("a", 0.5)]))
    monkeypatch.setattr(ray_tune.Tuner, "restore", lambda *_, **__: None)
    config = load(None, ["method=own"]).model_dump(mode="json")
    ray_search(tmp_path / "s", plan_of(config=config))
    assert len(resume_ray_search(tmp_path / "s").rows) == 1
    file.write_text(text + "# another\n")
    load_plugin(file)
    with refused("plugin.changed", ConfigError, name="own"):
        resume_ray_search(tmp_path / "s")


def test_one_process_at_a_time_runs_a_search(tmp_path, monkeypatch):
    folder = tmp_path / "s"
    locked = []

    def fit(tuner):
        with refused("search.busy", CheckpointError, path=str(folder)):
            resume_ray_search(folder)
        locked.append(folder)
        return Results([result("a", 0.5)])

    monkeypatch.setattr("tune.ray_tune.search.trainable", lambda *_: ray_tune.Trainable)
    monkeypatch.setattr("tune.ray_tune.search._fit", fit)
    monkeypatch.setattr(ray_tune.Tuner, "restore", lambda *_, **__: None)
    config = load(None, ["method=fedavg"]).model_dump(mode="json")
    ray_search(folder, plan_of(config=config))
    resume_ray_search(folder)
    assert locked == [folder, folder]


def test_the_folder_of_another_search_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.setattr("tune.ray_tune.search.trainable", lambda *_: None)
    with refused("search.exists", CheckpointError, path=str(tmp_path)):
        ray_search(tmp_path, plan_of())
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def handlers():
    """Return the handlers of the signals that stop a command, and restore all signals that Tune handles."""
    before = {number: signal.getsignal(number) for number in (*STOPS, signal.SIGUSR1)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield lambda: [signal.getsignal(number) for number in STOPS]
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_a_search_after_tune_saved_it(ray_session, tmp_path, monkeypatch, handlers, number):
    class Stopping(ray_tune.Callback):
        def on_trial_result(self, iteration, trials, trial, result, **info):
            os.kill(os.getpid(), number)

    def endless(config):
        while True:
            ray_tune.report({"accuracy": 0.5})

    monkeypatch.setenv("TUNE_DISABLE_SIGINT_HANDLER", "1")
    before = handlers()
    run_config = ray_tune.RunConfig(name="s", storage_path=str(tmp_path), verbose=0, callbacks=[Stopping()])
    with pytest.raises(KeyboardInterrupt):
        _fit(ray_tune.Tuner(endless, run_config=run_config))
    assert handlers() == before
    assert "RUNNING" in next((tmp_path / "s").glob("experiment_state-*.json")).read_text()


def test_a_signal_stops_a_search_that_tune_has_not_begun(handlers):
    def fit():
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("not stopped")

    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    with pytest.raises(KeyboardInterrupt):
        _fit(SimpleNamespace(fit=fit))
