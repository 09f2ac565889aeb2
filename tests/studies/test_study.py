"""Small studies that are run: missing runs are done, finished runs stay, and a kill loses nothing."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import replace

import jsonschema
import pytest
from made import write_run
from refusals import refused

import raylt
from raylt.data.fingerprint import hash_data
from raylt.data.task import build_task
from raylt.errors import CheckpointError, DataError, FolderHeld
from raylt.runs.callbacks.base import Callback
from raylt.runs.folder import provenance
from raylt.runs.folder.metrics_log import MetricsLine
from raylt.runs.folder.summary import Summary
from raylt.runs.folder.writer import Journal
from raylt.studies.definition import define
from raylt.studies.records.record import failure_file, read_run
from raylt.studies.report import comparison_tables
from raylt.studies.running import scheduler
from raylt.studies.running.scheduler import makespan
from raylt.studies.running.worker import do
from raylt.studies.study import Study, check_open_runs, of_runs

TINY = {
    "name": "tiny",
    "base": {"data": {"clients": 3}, "federation": {"rounds": 1}, "local": {"epochs": 1}},
    "arms": {"fedavg": "fedavg", "prox": {"method": "fedprox"}},
    "seeds": 1,
}


class Recorder(raylt.Callback):
    """Records the lines and figures of a study."""

    def __init__(self):
        self.lines, self.shares, self.left = [], [], []

    def on_message(self, text, minor=False):
        self.lines.append(text)

    def on_study_progress(self, status):
        self.shares.append(status.share)
        self.left.append(status.left_s)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Run a study of two runs in this process, one after the other; return it and its recorder."""
    study, recorder = Study.create(define(TINY), tmp_path_factory.mktemp("out")), Recorder()
    assert study.run([recorder], parallel=1) == []
    return study, recorder


@pytest.mark.slow
def test_all_runs_are_done_on_one_split_and_shown_as_they_end(made):
    study, recorder = made
    assert [record.state for record in study.records] == ["done", "done"]
    assert len({record.summary["split_sha256"] for record in study.records}) == 1
    assert recorder.lines[-1].startswith("2/2  prox/seed-0")
    assert sum("are left out" in line for line in recorder.lines) == 1  # the note is true for both runs but shown once
    assert recorder.shares == sorted(recorder.shares)
    assert recorder.shares[-1] == 1.0
    assert recorder.left[0] is None  # no run was timed yet
    assert recorder.left[-1] == 0.0


def test_records_fit_the_json_schemas(made):
    study, _ = made
    summary, line = Summary.model_json_schema(), MetricsLine.model_json_schema()
    for record in study.records:
        folder = study.folder / record.folder
        jsonschema.validate(json.loads((folder / "summary.json").read_text()), summary)
        for text in (folder / "metrics.jsonl").read_text().splitlines():
            jsonschema.validate(json.loads(text), line)
        assert record.made["code"] == provenance.code_sha256()
        assert record.summary["made"]["sessions"] == 1


def test_a_finished_study_runs_nothing_again(made):
    study, _ = made
    before = {path: path.stat().st_mtime_ns for path in study.folder.rglob("summary.json")}
    recorder = Recorder()
    assert Study.create(define(TINY), study.folder.parent).run([recorder]) == []
    assert {path: path.stat().st_mtime_ns for path in study.folder.rglob("summary.json")} == before
    assert recorder.lines == []


def test_results_file_tells_the_same_as_the_folder(made):
    study, _ = made
    read = Study.open(study.folder / "results.json")
    assert read.compare() == Study.open(study.folder).compare()
    assert read.holdings[""]["counts"] == study.holdings[""]["counts"]


def test_single_runs_make_the_same_comparison(made):
    study, _ = made
    alone = of_runs([study.folder / record.folder for record in study.records])
    assert [(row.arm, row.values) for row in alone.compare().rows] == [
        ("fedavg", study.compare().rows[0].values),
        ("fedprox", study.compare().rows[1].values),
    ]
    with refused("study.duplicate-run", CheckpointError, differences=[]):
        of_runs([study.folder / "fedavg/seed-0", study.folder / "." / "fedavg/seed-0/../seed-0"])


def test_single_runs_that_differ_in_more_than_their_names_say_are_refused_by_what_differs(tmp_path):
    fast = TINY | {"name": "fast", "base": TINY["base"] | {"local": {"epochs": 1, "lr": 0.5}}}
    folders = []
    for study in (Study.create(define(tree), tmp_path) for tree in (TINY, fast)):
        for plan in study.planned:
            write_run(study.folder / plan.folder, plan, [0.5])
            folders.append(study.folder / plan.folder)
    with refused("study.duplicate-run", CheckpointError, differences=["local.lr 0.05, 0.5"]):
        of_runs([folders[0], folders[2]])
    with refused("study.not-comparable", CheckpointError, condition="optimiser") as caught:
        of_runs([folders[0], folders[3]]).compare()
    assert "(local.lr 0.5; local.lr 0.05)" in str(caught.value)


def written(folder, name: str, **changes) -> list:
    """Write the runs of a study with changed settings, and return their folders."""
    tree = TINY | {"name": name, "base": TINY["base"] | changes, "seeds": 2}
    study = Study.create(define(tree), folder)
    for plan in study.planned:
        write_run(study.folder / plan.folder, plan, [0.5])
    return [study.folder / plan.folder for plan in study.planned]


def test_single_runs_of_one_arm_that_differ_in_more_than_their_seed_are_refused(tmp_path):
    plain, augmented = written(tmp_path, "plain"), written(tmp_path, "augmented", augment="crop_flip")
    with refused("study.not-comparable", CheckpointError, differences=["augment 'none', 'crop_flip'"]):
        of_runs([plain[0], augmented[2]])  # fedavg with seeds 0 and 1


@pytest.mark.parametrize(
    ("figures", "measure"),
    [
        (["local", "local"], "local"),
        (["matched", "matched"], "matched"),
        (["local", "matched"], "accuracy"),
        (["local", "accuracy"], "accuracy"),
    ],
)
def test_single_runs_are_compared_by_the_figure_that_all_of_them_show(tmp_path, monkeypatch, figures, measure):
    shown = dict(zip(written(tmp_path, "plain"), figures, strict=False))

    def read_shown(folder):
        record = read_run(folder)
        return replace(record, summary=record.summary | {"shown": {"figure": shown[folder]}})

    monkeypatch.setattr("raylt.studies.study.read_run", read_shown)
    assert of_runs(list(shown)).definition.measure == measure


def test_settings_in_which_arms_of_single_runs_differ_are_listed(tmp_path):
    plain = written(tmp_path, "plain")
    robust = written(tmp_path, "robust", federation={"rounds": 1, "robust": "median"})
    compared = of_runs([plain[0], robust[1]]).compare()
    assert compared.apart == ["fedavg: federation.robust None", "fedprox: federation.robust median"]


def test_arms_and_seeds_may_be_added_but_settings_not_changed(tmp_path):
    study = Study.create(define(TINY), tmp_path)
    plan = study.definition.runs()[0]
    write_run(study.folder / plan.folder, plan, [0.5])
    more = define(TINY | {"arms": TINY["arms"] | {"per": "fedper"}, "seeds": 2})
    states = [record.state for record in Study.create(more, tmp_path).records]
    assert states == ["done", *["missing"] * 5]
    with refused("study.changed", CheckpointError, differences=["local.epochs: 1 -> 2"]):
        Study.create(define(TINY | {"base": TINY["base"] | {"local": {"epochs": 2}}}), tmp_path)


def test_a_folder_that_is_no_study_is_left_alone(tmp_path):
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "thesis.tex").write_text("")
    with refused("study.not-a-study", CheckpointError, path=str(tmp_path / "tiny")):
        Study.create(define(TINY), tmp_path)
    with refused("study.not-a-study", CheckpointError, path=str(tmp_path)):
        Study.open(tmp_path)
    with refused("file.not-found", CheckpointError, path=str(tmp_path / "elsewhere")):
        Study.open(tmp_path / "elsewhere")


def test_runs_of_another_version_of_the_code_stop_a_study_unless_allowed(tmp_path):
    study = Study.create(define(TINY), tmp_path)
    for plan in study.definition.runs():
        write_run(study.folder / plan.folder, plan, [0.5], code="0" * 64)
    with refused("study.other-code", CheckpointError, codes=["0" * 64]):
        study.run()
    assert study.run(mix_versions=True) == []  # all runs are done


@pytest.mark.slow
def test_a_run_that_cannot_be_done_fails_by_name_and_the_others_go_on(tmp_path):
    arms = {"bad": {"local.lr": 1e6, "method": "fedavg"}, "fedavg": "fedavg"}  # it diverges
    study, recorder = Study.create(define(TINY | {"arms": arms}), tmp_path), Recorder()
    assert study.run([recorder], parallel=1) == ["bad/seed-0"]
    states = {record.arm: (record.state, record.problem) for record in study.records}
    assert states["fedavg"][0] == "done"
    assert states["bad"][0] == "failed"
    assert "local.lr" in states["bad"][1]
    assert any("bad/seed-0 failed" in text for text in recorder.lines)
    assert study.compare(reference="fedavg").diverged[0].startswith("bad/seed-0: failed: ")


def test_a_study_none_of_whose_runs_has_its_files_ends_before_it_makes_a_folder(tmp_path):
    base = {**TINY["base"], "data": {"source": f"npz:{tmp_path / 'absent.npz'}", "clients": 3}}
    definition = define({**TINY, "base": base})
    with refused("data.not-found", DataError, path=str(tmp_path / "absent.npz")):
        Study.create(definition, tmp_path)
    assert not any(tmp_path.iterdir())
    assert len(Study.preview(definition, tmp_path).records) == 2  # it can be planned without the files


@pytest.mark.slow
def test_a_reason_for_which_several_runs_fail_is_said_once(tmp_path):
    absent = {"method": "fedprox", "data.source": "npz:absent.npz"}
    arms = {"fedavg": "fedavg", "one": absent, "two": absent}
    study, recorder = Study.create(define({**TINY, "arms": arms}), tmp_path), Recorder()
    assert study.run([recorder], parallel=1) == ["one/seed-0", "two/seed-0"]
    assert len([line for line in recorder.lines if "absent.npz" in line]) == 1


@pytest.mark.slow
def test_files_of_the_current_folder_are_no_packages_to_a_worker(tmp_path, monkeypatch):
    (tmp_path / "queue.py").write_text("raise SystemExit('a file of the user')\n")
    monkeypatch.chdir(tmp_path)
    study = Study.create(define({**TINY, "arms": {"fedavg": "fedavg"}}), tmp_path / "out")
    assert study.run([Recorder()], parallel=1) == []


def test_makespan_by_hand():
    assert makespan([3, 1, 2], 2) == 3  # 3 | 2 + 1
    assert makespan([5, 4, 3, 3], 2) == 8  # 5 + 3 | 4 + 3
    assert makespan([], 2) == 0


@pytest.mark.slow
def test_a_study_that_is_killed_twice_ends_with_the_same_tables(tmp_path):
    sfd = {"name": "sfd", "rf_dim": 50, "retrain_epochs": 5, "synthesis_steps": 10}
    tree = TINY | {
        "arms": {"fedavg": "fedavg", "sfd": {"method": sfd}},
        "seeds": 2,
        "base": {"data": {"clients": 4}, "federation": {"rounds": 5}},
        "claims": ["sfd > fedavg on few"],
    }
    straight = Study.create(define(tree), tmp_path / "straight")
    assert straight.run() == []
    file = tmp_path / "tiny.yaml"
    file.write_text(json.dumps(tree))
    command = [sys.executable, "-m", "raylt", "study", str(file), "--out", str(tmp_path / "killed"), "--parallel", "1"]
    for how, enough in ((signal.SIGKILL, 1), (signal.SIGINT, 3)):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        # rglob would walk into checkpoints that the current run deletes meanwhile
        while len(list((tmp_path / "killed").glob("tiny/*/*/metrics.jsonl"))) <= enough and process.poll() is None:
            time.sleep(0.01)  # until the next run has begun
        os.kill(process.pid, how)
        process.wait()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    killed = Study.open(tmp_path / "killed" / "tiny")
    straight.read()
    for write in (
        lambda made: comparison_tables.comparison_table(made).markdown(),
        lambda made: comparison_tables.comparison_table(made).latex(),
        lambda made: json.dumps(made.to_json()),
    ):
        assert write(killed.compare()) == write(straight.compare())
    models = [[record.summary["model_sha256"] for record in study.records] for study in (straight, killed)]
    assert models[0] == models[1]
    assert any(record.summary["made"]["sessions"] > 1 for record in killed.records)


@pytest.mark.slow
def test_a_worker_that_dies_is_replaced_and_its_run_taken_up(tmp_path, monkeypatch):
    # the first attempt kills its own process and leaves a mark, which the second attempt finds
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\n"
        f"mark = {str(tmp_path / 'mark')!r}\n"
        "if 'raylt.studies.running.worker' in ' '.join(sys.orig_argv) and not os.path.exists(mark):\n"
        "    open(mark, 'w').close()\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)  # workers have the import path of this process
    study, recorder = Study.create(define(TINY | {"arms": {"fedavg": "fedavg"}}), tmp_path / "out"), Recorder()
    assert study.run([recorder], parallel=1) == []
    assert any(text.startswith("fedavg/seed-0: ") and "signal 9" in text for text in recorder.lines)


def test_a_study_from_python_is_taken_up_by_its_name(made):
    study, _ = made
    again = raylt.study(TINY, out=study.folder.parent)
    assert isinstance(again, raylt.Study)
    assert [record.state for record in again.records] == ["done", "done"]
    assert raylt.Run.open(again.folder / again.records[0].folder).state == "done"


def test_a_run_that_another_process_makes_is_left_to_it(tmp_path):
    folder, config = tmp_path / "run", define(TINY).runs()[0].config
    folder.mkdir()
    with Journal(folder):  # the folder has a lock but no config.yaml yet
        (folder / "split.json").write_text("{}")
        with pytest.raises(FolderHeld):
            do(folder, config, "local", None, Callback())
        with pytest.raises(FolderHeld):
            raylt.run(config, out=tmp_path, name="run", fleet="local", quiet=True)
    assert (folder / "split.json").exists()
    failure_file(folder).write_text("out of memory\n")  # of an earlier attempt
    do(folder, config, "local", None, Callback())  # the remains of a process that died
    assert not failure_file(folder).exists()
    assert raylt.Run.open(folder).state == "done"


def test_claims_on_groups_are_judged_over_the_cells_of_finished_runs_too(tmp_path):
    """With groups of at least 100 training images, only the balanced cell has no few-shot class."""
    cells = {"balanced": {"data.imbalance": 1}, "long": {"data.imbalance": 50}}
    base = {**TINY["base"], "data": {"clients": 3, "groups": [100, 130]}}
    definition = define({**TINY, "base": base, "cells": cells, "claims": ["prox > fedavg on few"]})
    study = Study.create(definition, tmp_path)
    for plan in study.planned:
        if plan.cell == "long":
            write_run(study.folder / plan.folder, plan, [0.5])
    assert [record.state for record in Study.preview(definition, tmp_path).records] == ["missing"] * 2 + ["done"] * 2
    for groups, code in (({"few": 90}, None), ({"few": 0}, "study.empty-group")):
        tests = {"images": 300, "groups": groups, "thresholds": [100, 130], "own": None, "one_class": []}
        ended = [replace(each, summary=each.summary | {"tests": tests}) for each in study.read() if each.summary]
        plans = [plan for plan in study.planned if plan.cell == "balanced"]
        with refused(code, key="study.claims", group="few") if code else nullcontext():
            check_open_runs(definition, plans, ended)


def test_the_error_of_the_runs_is_kept_where_the_results_cannot_be_written(tmp_path, monkeypatch):
    study, recorder = Study.create(define(TINY), tmp_path), Recorder()

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(scheduler, "run_all", stop)
    (study.folder / "results.json").mkdir()
    with pytest.raises(KeyboardInterrupt):
        study.run([recorder])
    assert "results.json" in recorder.lines[-1]


def test_an_address_is_refused_where_the_runs_are_not_on_ray(tmp_path):
    study = Study.create(define(TINY), tmp_path)
    with refused("config.conflict", key="address", value="auto"):
        study.run([Recorder()], address="auto")


@pytest.mark.parametrize(
    ("argument", "code"),
    [({"fleet": "processes"}, "config.unknown-name"), ({"parallel": 0}, "config.out-of-range")],
)
def test_a_fleet_or_number_of_runs_that_a_study_cannot_use_is_refused(tmp_path, argument, code):
    study = Study.create(define(TINY), tmp_path)
    with refused(code, key=next(iter(argument))):
        study.run([Recorder()], **argument)


@pytest.mark.slow
@pytest.mark.parametrize("others", [[], ["done"]])
def test_a_run_that_another_process_has_begun_is_no_failure(tmp_path, monkeypatch, others):
    arms = dict([*TINY["arms"].items()][: 1 + len(others)])
    study, recorder = Study.create(define(TINY | {"arms": arms}), tmp_path), Recorder()
    plan = study.planned[0]
    employ, held = scheduler._Pool._assign, []

    def begun_by_another_first(pool, number, log):
        if not held:
            task = build_task(plan.config.data)
            held.append(Journal.create(study.folder / plan.folder, plan.config, task.split, hash_data(task)))
        employ(pool, number, log)

    monkeypatch.setattr(scheduler._Pool, "_assign", begun_by_another_first)
    assert study.run([recorder], parallel=1) == []
    with held[0]:
        assert any(text.startswith(f"{plan.folder}: another process") for text in recorder.lines)
        assert [record.state for record in study.records] == ["running", *others]
        assert recorder.shares[-1] == len(others)  # only this process's own runs count
        assert not list(study.folder.rglob("*.failed"))
