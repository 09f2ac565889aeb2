"""Estimates of the time that is left of a study."""

import json
import re
from contextlib import nullcontext
from dataclasses import replace
from io import StringIO
from types import SimpleNamespace

import pytest
from made import GROUPS, record, report, summary

from raylt.cli.main import app
from raylt.registry import resolve
from raylt.runs.callbacks.base import Callback
from raylt.studies.definition import define
from raylt.studies.records.record import RunRecord, read_run
from raylt.studies.records.recorded_runs import record_path, write_results
from raylt.studies.running import scheduler, time_left
from raylt.studies.running.scheduler import Job, Worker, _Pool
from raylt.studies.running.time_left import Pace
from raylt.studies.running.worker import EventSender
from raylt.studies.running.worker_slots import WorkerSlot

ARMS = {"fedavg": "fedavg", "ccvr": "ccvr", "prox": "fedprox"}
STUDY = {"name": "timed", "base": {"federation": {"rounds": 4}, "local": {"epochs": 3}}, "arms": ARMS, "seeds": 2}


def timed(arm, seconds, cell="", rounds=4, **more):
    """Return a run whose steps took these seconds; steps after its rounds are a finish."""
    at = [sum(seconds[:step]) for step in range(1, len(seconds) + 1)]
    return record(arm, 0, 0.5, cell, planned_steps=rounds, steps=len(seconds), curve={"seconds": at}, **more)


def recorded(plan, seconds):
    """Return such a run with everything that a file of results has."""
    steps = len(seconds)
    curve = {
        "step": list(range(1, steps + 1)),
        **dict.fromkeys(("accuracy", *GROUPS), [0.5] * steps),
        "validation": [None] * steps,
        "up": [10 * step for step in range(1, steps + 1)],
        "down": [20 * step for step in range(1, steps + 1)],
        "seconds": [float(sum(seconds[:step])) for step in range(1, steps + 1)],
    }
    figures = summary(0.5, 4, 0.5, steps=steps) | {"method": plan.arm, "seconds": sum(seconds)}
    config = plan.config.model_dump(mode="json")
    whole = record(plan.arm, 0, 0.5, planned_steps=4, steps=steps, curve=curve, config=config, summary=figures)
    return replace(whole, folder=plan.folder)


@pytest.fixture(scope="module")
def planned():
    """Return the first run of each arm."""
    return {plan.arm: plan for plan in define(STUDY).runs() if plan.seed == 0}


def test_before_anything_ran_it_is_work_that_is_left(planned):
    pace = Pace([record("fedavg", 0, 0.5, state="missing", curve={})])
    assert not pace.measured
    assert [pace.left(planned["fedavg"], steps) for steps in (0, 3, 5)] == [12.0, 3.0, 0.0]
    base = {"federation": {"rounds": 4, "participation": 0.5}, "local": {"steps": 7}}
    assert pace.left(define(STUDY | {"base": base}).runs()[0], 1) == 3 * 0.5 * 7


def test_each_round_and_the_finish_take_what_they_took_before(planned):
    pace = Pace([timed("ccvr", [1, 2, 3, 4, 50]), timed("ccvr", [3, 4, 5, 6])])
    assert pace.measured
    assert [pace.left(planned["ccvr"], steps) for steps in range(6)] == [64, 62, 59, 55, 50, 0]


def test_a_run_that_branches_from_another_needs_only_its_finish(planned):
    pace = Pace([timed("fedavg", [10] * 4), timed("ccvr", [10] * 4 + [7])])
    assert (pace.left(planned["ccvr"], 4), pace.left(planned["fedavg"], 4)) == (7, 0)


def test_rounds_that_were_not_timed_are_estimated_like_the_others(planned):
    pace = Pace([timed("fedavg", [1, 3], state="stopped")])
    assert [pace.left(planned["fedavg"], steps) for steps in (0, 2, 3)] == [8, 4, 2]


def test_the_phase_of_a_method_without_rounds_tells_nothing_about_rounds(planned):
    once = [timed("ccvr", [900], "elsewhere", rounds=0)]
    assert not Pace(once).measured
    assert Pace(once).left(planned["fedavg"], 1) == 9  # client epochs
    beside = Pace([*once, timed("prox", [2] * 4)])
    assert beside.measured
    assert beside.left(planned["fedavg"], 1) == 6
    assert beside.left(planned["ccvr"], 1) == 3 * 2 + 900


def test_the_nearest_runs_count_its_cell_its_arm_and_then_all(planned):
    others = [timed("prox", [100] * 4), timed("ccvr", [10] * 4, "elsewhere")]
    assert Pace(others).left(planned["ccvr"], 0) == 40
    assert Pace([*others, timed("ccvr", [1] * 4)]).left(planned["ccvr"], 0) == 4
    assert Pace(others).left(planned["fedavg"], 0) == 4 * 55
    # a finish counts once, however many rounds there are
    assert Pace([timed("ccvr", [10, 10, 7], "short", rounds=2)]).left(planned["ccvr"], 0) == 47


def test_what_is_learnt_on_the_way_counts_at_once(planned):
    pace = Pace([timed("prox", [100] * 4)])
    pace.learn(planned["fedavg"], 1, 2.0)
    assert pace.left(planned["fedavg"], 1) == 6
    pace.learn(planned["fedavg"], 2, 4.0)
    assert pace.left(planned["fedavg"], 2) == 6


def test_plan_of_a_study_counts_shared_rounds_once(tmp_path, monkeypatch, capsys):
    study = {
        "name": "timed",
        "base": {"data": {"clients": 3}, "federation": {"rounds": 4}, "local": {"epochs": 1}},
        "seeds": 2,
        "arms": {"fedavg": "fedavg", "ccvr": {"method": "ccvr"}},
    }
    file = tmp_path / "timed.yaml"
    file.write_text(json.dumps(study))
    definition = define(study)
    first = [recorded(plan, [600] * 4 + [120] * (plan.arm == "ccvr")) for plan in definition.runs() if plan.seed == 0]
    record_file = record_path(file, definition)
    record_file.parent.mkdir()
    write_results(record_file, definition, first, {}, {})
    monkeypatch.chdir(tmp_path)
    app(["study", "timed.yaml", "--dry-run", "--parallel", "1", "--mix-versions"], standalone_mode=False)
    lines = capsys.readouterr().out.splitlines()
    left = {line.split()[0]: " ".join(line.split()[3:5]) for line in lines if "missing" in line}
    assert left == {"fedavg/seed-1": "40.0 min", "ccvr/seed-1": "2.0 min"}
    assert re.search(r"4 runs, 1 training .*; 2 to do: .*\b42\.0 min", " ".join(lines))


def test_a_last_phase_that_was_never_timed_is_named(planned):
    rounds_alone = Pace([timed("ccvr", [1] * 4, state="stopped")])
    assert rounds_alone.left(planned["ccvr"], 4) == 0
    assert rounds_alone.lacks_finish(planned["ccvr"], 4)
    assert not rounds_alone.lacks_finish(planned["ccvr"], 5)  # the finish is done
    assert not rounds_alone.lacks_finish(planned["fedavg"], 0)  # the method has no finish
    assert not Pace([timed("ccvr", [1] * 4 + [50])]).lacks_finish(planned["ccvr"], 4)


def test_an_expected_last_phase_counts_until_one_was_timed(planned):
    pace = Pace([timed("ccvr", [1] * 4, state="stopped"), timed("fedavg", [2] * 4)])
    pace.expect(planned["ccvr"], 400.0)
    assert not pace.lacks_finish(planned["ccvr"], 0)
    assert [pace.left(planned["ccvr"], steps) for steps in (0, 4, 5)] == [404, 400, 0]
    assert pace.left(planned["fedavg"], 0) == 8
    elsewhere = replace(planned["ccvr"], cell="elsewhere")  # the arm's in another cell is the best guess
    assert pace.left(elsewhere, 4) == 400
    pace.learn(planned["ccvr"], 5, 30.0)
    assert pace.left(planned["ccvr"], 4) == pace.left(elsewhere, 4) == 30


def test_a_study_says_how_far_the_last_phase_of_a_run_is(planned, tmp_path):
    shown = []
    plan = planned["ccvr"]
    observer = SimpleNamespace(on_study_progress=shown.append)
    pool = _Pool(
        [Job(plan, tmp_path, 0)], [WorkerSlot(frozenset(), {})], Pace([]), observer, tmp_path, "local", None, 0
    )
    worker = Worker(None, pool._waiting.pop())
    pool._workers[0] = worker
    pool._handle(worker, {"event": "last phase", "seconds": 400.0}, None)
    for step in range(1, 5):
        pool._handle(worker, {"event": "step", "step": step, "seconds": 1.0}, None)
    pool._show()
    assert (shown[-1].left_s, shown[-1].untimed_finish) == (400, False)
    pool._handle(worker, {"event": "items", "text": "class 3 of 10, step 40 of 100", "left": 380.0}, None)
    pool._show()
    assert shown[-1].left_s == 380
    assert shown[-1].running == [f"{plan.folder} (class 3 of 10, step 40 of 100)"]


def test_a_worker_reports_the_time_of_a_step_with_its_evaluation():
    channel = StringIO()
    EventSender(channel).on_step(report(3, 0.5))
    assert json.loads(channel.getvalue()) == {"event": "step", "step": 3, "seconds": 2.0}


def test_only_runs_that_nobody_does_and_that_are_not_done_are_started(planned, tmp_path, monkeypatch):
    states = ("missing", "running", "stopped", "failed", "damaged", "done")
    plans = [replace(planned["fedavg"], folder=state) for state in states]
    records = [RunRecord("", "fedavg", 0, state, state) for state in states]
    pools = []
    monkeypatch.setattr(_Pool, "run", lambda pool: pools.append(pool) or [])
    scheduler.run_all(plans, records, tmp_path, Callback(), 1, "local", None, Pace([]))
    [pool] = pools
    assert sorted(job.planned.folder for job in pool._waiting) == ["failed", "missing", "stopped"]
    assert (pool._done, pool._total) == (1, 4)


def test_a_run_waits_for_the_run_from_which_it_continues(planned, tmp_path, monkeypatch):
    sent = []
    process = SimpleNamespace(stdin=SimpleNamespace(write=sent.append, flush=lambda: None))
    monkeypatch.setattr(_Pool, "_start", lambda pool, number, log: Worker(process))
    stem = Job(planned["fedavg"], tmp_path / "stem", 0)
    branch = Job(planned["ccvr"], tmp_path / "branch", 0, stem=stem.folder, shared=4)
    slots = [WorkerSlot(frozenset(), {})] * 2
    pool = _Pool([branch, stem], slots, Pace([]), Callback(), tmp_path, "ray", "auto", 0)
    pool._assign_all(None)
    assert [json.loads(line)["folder"] for line in sent] == [str(stem.folder)]
    pool._handle(pool._workers[0], {"event": "done"}, None)
    first, second = map(json.loads, sent)
    assert (first["stem"], second["stem"]) == (None, str(stem.folder))
    assert (second["fleet"], second["address"]) == ("ray", "auto")
    assert second["config"] == planned["ccvr"].config.model_dump(mode="json")


def test_a_run_whose_process_dies_again_has_failed(planned, tmp_path):
    plan = planned["fedavg"]
    job = Job(plan, tmp_path / plan.folder, 0, attempts=scheduler.MAX_ATTEMPTS - 1)
    job.folder.parent.mkdir(parents=True)
    pool = _Pool([], [], Pace([]), Callback(), tmp_path, "local", None, 0)
    dead = SimpleNamespace(wait=lambda: -9)
    for waiting, failed in (([job], []), ([], [plan.folder])):
        pool._waiting.clear()
        pool._workers[0] = Worker(dead, job)
        pool._worker_died(0, pool._workers[0], None)
        assert (pool._waiting, pool._failed) == (waiting, failed)
        job.attempts += 1
    record = read_run(job.folder)
    assert (record.state, record.problem) == ("failed", "its process died (signal 9)")


def test_progress_is_shown_at_once_where_it_is_news_and_once_a_second_otherwise(planned, tmp_path, monkeypatch):
    shown = []
    now = 100.0
    monkeypatch.setattr(scheduler.time, "monotonic", lambda: now)
    observer = SimpleNamespace(on_study_progress=shown.append)
    pool = _Pool(
        [Job(planned["ccvr"], tmp_path, 0)],
        [WorkerSlot(frozenset(), {})],
        Pace([]),
        observer,
        tmp_path,
        "local",
        None,
        0,
    )
    pool._show()
    pool._show()
    assert len(shown) == 1
    now += scheduler.PROGRESS_INTERVAL_S
    pool._show()
    assert len(shown) == 2
    pool._workers[0] = Worker(None, pool._waiting.pop())
    pool._show()
    assert [status.running for status in shown] == [[], [], [planned["ccvr"].folder]]


def test_a_method_is_looked_up_once_for_an_arm_and_cell(planned, monkeypatch):
    looked_up = []

    def looking(config):
        looked_up.append(config.method["name"])
        return resolve(config)

    monkeypatch.setattr(time_left, "resolve", looking)
    pace = Pace([timed("ccvr", [1] * 4, state="stopped")])
    for _ in range(3):  # a study asks after each step of each run
        assert pace.lacks_finish(planned["ccvr"], 4)
        assert not pace.lacks_finish(planned["fedavg"], 0)
    assert looked_up == ["ccvr", "fedavg"]


def test_a_line_that_a_kill_cuts_off_ends_the_messages_of_a_worker(tmp_path):
    pool = _Pool([], [], Pace([]), Callback(), tmp_path, "local", None, 0)
    whole = '{"event": "starts", "steps": 0}'
    for last, read in (('{"event": "st', True), ("no json\n", False)):
        worker = Worker(SimpleNamespace(stdout=StringIO(f"{whole}\n{last}")))
        with nullcontext() if read else pytest.raises(json.JSONDecodeError):
            pool._read_messages(0, worker)
        assert pool._messages.get_nowait()[2] == {"event": "starts", "steps": 0}
        assert pool._messages.get_nowait() == (0, worker, None)
