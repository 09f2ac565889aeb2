"""Runs on record next to a study's file are not repeated; missing runs are done."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from made import write_run
from refusals import refused

import raylt
from raylt import registry
from raylt.cli.main import app
from raylt.errors import CheckpointError
from raylt.registry import Plugin
from raylt.runs.callbacks.base import Callback
from raylt.studies.analysis.ranking import rank
from raylt.studies.definition import define, read_definition
from raylt.studies.records import recorded_runs
from raylt.studies.records.record import failure_file
from raylt.studies.records.recorded_runs import load_planned, load_tuned, read_results, record_path, write_results
from raylt.studies.report.comparison_tables import comparison_table
from raylt.studies.running import scheduler
from raylt.studies.running.tuning import search_arms, write_tuned
from raylt.studies.study import Study

TINY = {
    "name": "tiny",
    "base": {"data": {"clients": 3}, "federation": {"rounds": 1}, "local": {"epochs": 1}},
    "arms": {"fedavg": "fedavg", "prox": {"method": "fedprox"}},
    "seeds": 2,
}


STUDIES = Path(__file__).parents[3] / "studies"


def kept(tmp_path, tree=TINY, out="first", code=None, plugin=None):
    """Return a study whose runs are all done by a version of the code and a plugin, and the file of its record."""
    study = Study.create(define(tree), tmp_path / out)
    for number, plan in enumerate(study.planned):
        write_run(
            study.folder / plan.folder, plan, [min(1.0, 0.5 + number**2 / 20)], plan.seed, code=code, plugin=plugin
        )
    record = tmp_path / "results" / "tiny.json"
    study.run(record_file=record, mix_versions=True)
    return study, record


def without(record, arm, seed):
    """Remove one run from the record."""
    definition, records, holdings, tuned = read_results(record)
    rest = [each for each in records if (each.arm, each.seed) != (arm, seed)]
    write_results(record, definition, rest, holdings, tuned)


def write_unsealed(record, content):
    """Write the content of a record in the format without seals."""
    del content["seal"]
    record.write_text(json.dumps(content | {"schema": 1}))


def test_what_is_on_record_counts_as_done_and_makes_the_same_tables(tmp_path):
    before, record = kept(tmp_path)
    taken = Study.create(define(TINY), tmp_path / "second", record)
    assert [each.state for each in taken.records] == ["done"] * 4
    assert taken.run() == []
    assert list(taken.folder.rglob("metrics.jsonl")) == []
    assert taken.compare() == before.compare()
    assert Study.open(taken.folder).compare() == before.compare()  # the folder alone is enough
    assert Study.open(taken.folder / "results.json").compare() == before.compare()


def test_a_run_that_is_taken_off_the_record_is_to_be_done_again(tmp_path):
    _, record = kept(tmp_path)
    Study.create(define(TINY), tmp_path / "second", record)
    without(record, "prox", 1)
    again = Study.create(define(TINY), tmp_path / "second", record)
    assert [(each.arm, each.seed) for each in again.records if each.state == "missing"] == [("prox", 1)]
    record.unlink()
    nothing = Study.create(define(TINY), tmp_path / "second", record)
    assert {each.state for each in nothing.records} == {"missing"}
    assert not (nothing.folder / "recorded.json").exists()


def test_a_run_folder_counts_before_the_record(tmp_path):
    _, record = kept(tmp_path)
    study = Study.create(define(TINY), tmp_path / "second")
    plan = study.planned[0]
    write_run(study.folder / plan.folder, plan, [0.25])
    taken = Study.create(define(TINY), tmp_path / "second", record)
    assert [each.summary["accuracy"]["last"] for each in taken.records] == [0.25, 0.55, 0.7, 0.95]


def test_runs_of_other_code_are_skipped_unless_allowed_and_tables_say_so(tmp_path):
    _, record = kept(tmp_path, code="0" * 64)
    study = Study.create(define(TINY), tmp_path / "second", record)
    assert {each.state for each in study.records} == {"missing"}
    (line,) = study.recorded.passed_over
    assert "4 recorded runs" in line
    assert "mix_versions=True" in line
    study = Study.create(define(TINY | {"seeds": 3}), tmp_path / "third", record, mix_versions=True)
    for plan in study.planned[4:]:
        write_run(study.folder / plan.folder, plan, [0.9], split=plan.seed)
    assert study.run(mix_versions=True) == []
    with refused("study.not-comparable", CheckpointError, condition="code") as caught:
        study.compare()
    assert "mix_versions=True" in str(caught.value)
    comparison = study.compare(mix_versions=True)
    assert [len(row.values) for row in comparison.rows] == [3, 3]
    assert comparison.versions[0] == "000000000000: 4 runs"
    assert "000000000000: 4 runs" in comparison_table(comparison).markdown()
    with refused("study.other-code", CheckpointError):
        Study.create(define(TINY), tmp_path / "third").run()


@pytest.mark.slow
def test_runs_of_another_version_of_a_plugin_are_not_mixed(tmp_path, monkeypatch):
    monkeypatch.setitem(registry._plugins, ("model", "own"), Plugin("model", "own", None, "own.py", "1" * 64))
    before, record = kept(tmp_path, plugin="0" * 64)
    with refused("study.other-code", CheckpointError, plugin="model own"):
        before.run()
    study = Study.create(define(TINY), tmp_path / "second", record)
    assert {each.state for each in study.records} == {"missing"}
    assert "4 recorded runs" in study.recorded.passed_over[0]
    study = Study.create(define(TINY | {"seeds": 3}), tmp_path / "third", record, mix_versions=True)
    for plan in study.planned[4:]:
        write_run(study.folder / plan.folder, plan, [0.9], split=plan.seed, plugin="1" * 64)
    assert study.run(mix_versions=True) == []
    with refused("study.not-comparable", CheckpointError, condition="code of model own"):
        study.compare()
    comparison = study.compare(mix_versions=True)
    assert comparison.versions == ["model own 000000000000: 4 runs", "model own 111111111111: 2 runs"]
    assert rank({"tiny": study.records}).versions == ["tiny: 2 versions of model own"]


def test_runs_with_other_settings_are_passed_over_by_name(tmp_path):
    _, record = kept(tmp_path)
    other = define(TINY | {"base": TINY["base"] | {"local": {"epochs": 2}}})
    study = Study.create(other, tmp_path / "second", record)
    assert {each.state for each in study.records} == {"missing"}
    (line,) = study.recorded.passed_over
    assert "4 recorded runs" in line
    assert "fedavg/seed-0 (local.epochs: 1 -> 2)" in line


def test_a_field_that_the_code_of_then_did_not_have_is_no_other_setting(tmp_path):
    _, record = kept(tmp_path, code="0" * 64)
    content = json.loads(record.read_text())
    for each in content["records"]:
        each["config"]["method"].pop("mu", None)
    write_unsealed(record, content)
    plans = define(TINY).runs()
    taken = load_planned(record, plans, mix_versions=True)
    assert len(taken.records) == 4
    study = Study.create(define(TINY), tmp_path / "on", record, mix_versions=True)
    assert study.records == list(taken.records.values())
    assert load_planned(record, plans, mix_versions=False).records == {}
    strong = define(TINY | {"arms": {"fedavg": "fedavg", "prox": {"method": {"name": "fedprox", "mu": 0.5}}}}).runs()
    assert "method.mu: 0.01 -> 0.5" in load_planned(record, strong, mix_versions=True).passed_over[0]
    other = define(TINY | {"arms": {"fedavg": "fedavg", "prox": {"method": {"name": "fedavg"}}}}).runs()
    assert len(load_planned(record, other, mix_versions=True).records) == 2  # another method is another setting


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ground_tuned", "ground_own"])
def test_searches_of_versions_with_fewer_settings_are_still_recognised(name, tmp_path):
    record = STUDIES / "results" / f"{name}.json"
    searched = {arm for arms in read_results(record)[3].values() for arm in arms}
    definition = read_definition(STUDIES / f"{name}.yaml")
    outcomes = load_tuned(record, definition, mix_versions=True)
    assert {arm for arms in outcomes.values() for arm in arms} == searched
    # the study continues with them, and does not take them for searches with other settings
    write_tuned(tmp_path, outcomes)
    bases = {("", arm): definition.base_of("", arm) for arm in searched}
    assert definition.tune is not None
    assert (
        search_arms(bases, definition.tune, definition.compared_to, tmp_path, Callback(), None, "local", None)
        == outcomes
    )


@pytest.mark.slow
def test_a_search_from_other_values_of_newer_settings_is_another_search():
    record = STUDIES / "results" / "ground_own.json"
    definition = read_definition(STUDIES / "ground_own.yaml")
    changed = define(definition.model_dump(mode="json") | {"base": definition.base | {"local.warm_up": 3}})
    assert load_tuned(record, changed, mix_versions=True) == {"": {}}


def test_where_a_file_lies_is_no_other_setting_of_a_recorded_run(tmp_path, monkeypatch):
    """The same study on two machines, where settings hold different absolute paths of a file."""
    monkeypatch.setattr("raylt.studies.study.check_open_runs", lambda *_: None)  # the files need not exist

    def tree(place, name="teacher.npz"):
        return TINY | {"arms": {"fedsm": {"method": {"name": "fedsm", "teacher": f"npz:{place}/{name}"}}}}

    _, record = kept(tmp_path, tree("/here"))
    taken = Study.create(define(tree("/there")), tmp_path / "second", record)
    assert [each.state for each in taken.records] == ["done"] * 2
    assert taken.run(record_file=record) == []
    assert len(json.loads(record.read_text())["records"]) == 2
    other = Study.create(define(tree("/here", "another.npz")), tmp_path / "third", record)
    assert "teacher.npz' -> 'npz:another.npz'" in other.recorded.passed_over[0]


def test_what_is_on_record_names_no_folder_of_the_machine_that_made_it(tmp_path, monkeypatch):
    """The record holds the name of a file without its folder, also where a figure quotes the setting."""
    monkeypatch.setattr("raylt.studies.study.check_open_runs", lambda *_: None)  # the files need not exist
    place = 'npz:/home/me/my "own" files/teacher.npz'
    tree = TINY | {
        "base": TINY["base"] | {"data": {"clients": 3, "root": "/home/me/sets"}},
        "arms": {"fedsm": {"method": {"name": "fedsm", "teacher": place}}},
    }
    study, path = kept(tmp_path, tree)
    made = study.records[0]
    quoting = replace(made, summary=made.summary | {"figures": {"teacher": f"fitted to texts ({place})"}})
    recorded_runs.update(path, study.definition, [quoting], {}, {})
    first, second = json.loads(path.read_text())["records"]
    assert first["summary"]["figures"]["teacher"] == "fitted to texts (npz:teacher.npz)"
    for each in (first, second):
        assert "/home/me" not in json.dumps(each)
        assert (each["config"]["method"]["teacher"], each["config"]["data"]["root"]) == ("npz:teacher.npz", "sets")
    assert made.config["data"]["root"] == "/home/me/sets"  # the run's own record is unchanged
    assert len(load_planned(path, study.planned, mix_versions=True).records) == 2


def test_what_is_on_record_says_which_runs_are_the_longest(tmp_path, monkeypatch):
    _, record = kept(tmp_path)
    content = json.loads(record.read_text())
    for each in content["records"]:
        each["curve"]["seconds"] = [100.0 if each["arm"] == "prox" else 1.0]
        each["summary"]["seconds"] = each["curve"]["seconds"][0]
    write_unsealed(record, content)
    study, begun = Study.create(define(TINY | {"seeds": 3}), tmp_path / "second", record), []
    monkeypatch.setattr(
        scheduler._Pool, "run", lambda pool: begun.extend(each.planned.arm for each in pool._waiting) or []
    )
    study.run()
    assert begun == ["prox", "fedavg"]


def test_recording_adds_and_loses_nothing(tmp_path):
    _, record = kept(tmp_path)
    one = TINY | {"arms": {"fedavg": "fedavg", "per": "fedper"}, "seeds": 1}
    study = Study.create(define(one), tmp_path / "second", record)
    plan = study.planned[1]
    write_run(study.folder / plan.folder, plan, [0.1])
    study.run(record_file=record)
    records = json.loads(record.read_text())["records"]
    assert [(each["arm"], each["seed"]) for each in records] == [
        ("fedavg", 0),
        ("per", 0),
        ("prox", 0),
        ("fedavg", 1),
        ("prox", 1),
    ]


@pytest.mark.parametrize(
    ("code", "states"),
    [("training.diverged", ["done", "failed"]), ("server.not-finite", ["done", "failed"]), ("client.failed", ["done"])],
)
def test_a_diverged_run_is_on_record_as_a_result_and_is_run_again(tmp_path, code, states):
    definition = define(TINY | {"arms": {"fedavg": "fedavg", "per": "fedper"}, "seeds": 1})
    study = Study.create(definition, tmp_path)
    whole, broken = study.planned
    write_run(study.folder / whole.folder, whole, [0.1])
    folder = study.folder / broken.folder
    write_run(folder, broken, [0.1])
    (folder / "summary.json").unlink()
    failure_file(folder).write_text(f"why\n{code}\n")
    study.read()
    record = tmp_path / "record.json"
    study.save_results(record)
    kept_runs = Study.open(record)
    assert [each.state for each in kept_runs.records] == states
    assert list(load_planned(record, study.planned, mix_versions=True).records) == [("", "fedavg", 0)]
    if code != "client.failed":
        ranked = {arm.arm: (arm.finished, arm.diverged) for arm in rank({"s": kept_runs.records}).arms}
        assert ranked == {"fedavg": (1, 0), "per": (0, 1)}


def test_the_command_says_which_recorded_runs_are_repeated(tmp_path, capsys):
    kept(tmp_path, code="0" * 64)
    file = tmp_path / "tiny.yaml"
    file.write_text(yaml.safe_dump(TINY))
    app(["study", str(file), "--out", str(tmp_path / "second"), "--dry-run"], standalone_mode=False)
    assert "another version of the code made 4 recorded runs, which are repeated" in capsys.readouterr().err


def test_a_study_is_recorded_only_if_that_is_asked_for(tmp_path):
    _, record = kept(tmp_path)
    record.unlink()
    file = tmp_path / "tiny.yaml"
    file.write_text(yaml.safe_dump(TINY))
    command = ["study", str(file), "--out", str(tmp_path / "first")]
    app(command, standalone_mode=False)
    assert not record.exists()
    app([*command, "--record"], standalone_mode=False)
    assert record.exists()


def test_runs_that_failed_are_an_error_of_the_study(tmp_path, monkeypatch):
    kept(tmp_path)
    file = tmp_path / "tiny.yaml"
    file.write_text(yaml.safe_dump(TINY))
    monkeypatch.setattr(scheduler, "run_all", lambda *_: ["prox/seed-1"])
    with refused("study.runs-failed", runs=["prox/seed-1"]):
        app(["study", str(file), "--out", str(tmp_path / "first")], standalone_mode=False)
    with refused("study.runs-failed", runs=["prox/seed-1"]):
        raylt.study(file, out=tmp_path / "first")


def test_an_interrupted_study_has_its_finished_runs_on_record(tmp_path, monkeypatch):
    study = Study.create(define(TINY), tmp_path)

    def stop(planned, *_):
        write_run(study.folder / planned[0].folder, planned[0], [0.5])
        raise KeyboardInterrupt

    monkeypatch.setattr(scheduler, "run_all", stop)
    with pytest.raises(KeyboardInterrupt):
        study.run([Recorder()], record_file=tmp_path / "record.json")
    assert [each.folder for each in Study.open(tmp_path / "record.json").records] == ["fedavg/seed-0"]


class Recorder(raylt.Callback):
    def __init__(self):
        self.lines = []

    def on_message(self, text, minor=False):
        self.lines.append(text)


def recorded_again(tmp_path, record, tree, accuracy=0.1):
    """Return the study on record after a repetition with other settings, and the lines that its callback received."""
    study, recorder = Study.create(define(tree), tmp_path / "again", record), Recorder()
    for plan, made in zip(study.planned, study.records, strict=True):
        if made.state == "missing":
            accuracies = [accuracy] * plan.config.federation.rounds
            write_run(study.folder / plan.folder, plan, accuracies, split=plan.seed)
    study.run([recorder], record_file=record)
    return Study.open(record), recorder.lines


def test_runs_that_the_study_would_not_make_as_they_are_are_taken_off_and_named(tmp_path):
    _, record = kept(tmp_path)
    slower = TINY | {"base": TINY["base"] | {"local": {"epochs": 1, "lr": 0.01}}, "seeds": [1]}
    study, lines = recorded_again(tmp_path, record, slower)
    assert {(each.seed, each.config["local"]["lr"]) for each in study.records} == {(1, 0.01)}
    (line,) = lines
    assert "2 recorded runs" in line
    assert "fedavg/seed-0 (local.lr: 0.05 -> 0.01)" in line
    assert study.compare().rows[0].values == {1: 0.1}


@pytest.mark.slow
def test_an_arm_that_the_study_had_stays_with_its_settings_as_long_as_the_ground_is_the_same(tmp_path):
    central = TINY | {"arms": TINY["arms"] | {"central": {"method": "fedavg", "data.clients": 1}}}
    _, record = kept(tmp_path, central)
    study, lines = recorded_again(tmp_path, record, TINY | {"seeds": 1})
    assert (len(study.records), lines) == (6, [])
    assert study.compare().apart == ["central: data.clients 1"]
    changed = TINY | {"base": TINY["base"] | {"data": {"clients": 4}}, "name": "tiny"}
    study, lines = recorded_again(tmp_path / "more", record, changed)
    # central sets its own number of clients
    assert [each.arm for each in study.records] == ["fedavg", "prox", "fedavg", "prox", "central", "central"]
    assert lines == []
    gone = TINY | {"base": TINY["base"] | {"federation": {"rounds": 2}}, "name": "tiny"}
    study, lines = recorded_again(tmp_path / "most", record, gone)
    assert {each.arm for each in study.records} == {"fedavg", "prox"}
    assert "2 recorded runs" in lines[0]
    assert "central/seed-0 (federation.rounds: 1 -> 2)" in lines[0]
    assert list(study.definition.arms) == ["fedavg", "prox"]


@pytest.mark.slow
def test_a_cell_that_the_study_had_stays_however_often_it_is_recorded(tmp_path):
    _, record = kept(tmp_path, TINY | {"cells": {"data.imbalance": [1, 10]}})
    one = define(TINY | {"cells": {"data.imbalance": [1]}})
    for _ in range(2):
        Study.create(one, tmp_path / "second", record).run(record_file=record)
        assert {each.cell for each in Study.open(record).records} == {"IF 1", "IF 10"}
        assert len(Study.open(record).records) == 8


def test_a_record_keeps_the_class_counts_of_its_cells(tmp_path):
    study, record = kept(tmp_path, TINY | {"cells": {"data.imbalance": [1, 10]}})
    before, now = ({"names": ["a"], "groups": ["many"], "counts": [[count]]} for count in (1, 2))
    recorded_runs.update(record, study.definition, study.records, {"IF 1": before, "IF 10": before}, {})
    of_cell = [each for each in study.records if each.cell == "IF 1"]
    recorded_runs.update(record, define(TINY | {"cells": {"data.imbalance": [1]}}), of_cell, {"IF 1": now}, {})
    assert read_results(record)[2] == {"IF 1": now, "IF 10": before}


def test_runs_of_a_cell_that_has_other_settings_now_are_taken_off(tmp_path):
    _, record = kept(tmp_path, TINY | {"cells": {"long": {"data.imbalance": 10}}})
    changed = TINY | {"cells": {"long": {"data.imbalance": 50}}, "seeds": [1]}
    study, lines = recorded_again(tmp_path, record, changed)
    assert {(each.seed, each.config["data"]["imbalance"]) for each in study.records} == {(1, 50)}
    assert study.definition.all_cells == {"long": {"data.imbalance": 50}}
    assert "2 recorded runs" in lines[0]


def test_what_the_folder_had_from_a_record_counts_as_long_as_it_is_what_is_planned(tmp_path):
    _, record = kept(tmp_path)
    Study.create(define(TINY), tmp_path / "second", record)
    assert {each.state for each in Study.create(define(TINY), tmp_path / "second").records} == {"done"}
    longer = TINY | {"base": TINY["base"] | {"federation": {"rounds": 2}}}
    assert {each.state for each in Study.create(define(longer), tmp_path / "second").records} == {"missing"}


def test_what_cannot_be_read_is_an_error_and_what_is_not_there_is_none(tmp_path):
    record = tmp_path / "tiny.json"
    assert load_planned(record, define(TINY).runs(), mix_versions=False).records == {}
    record.write_text("{")
    with pytest.raises(CheckpointError, match=re.escape(str(record))):
        Study.create(define(TINY), tmp_path, record)


def test_the_command_says_what_is_on_record(tmp_path, capsys):
    kept(tmp_path)
    file = tmp_path / "tiny.yaml"
    file.write_text(yaml.safe_dump(TINY))
    without(record_path(file, define(TINY)), "fedavg", 0)
    app(["study", str(file), "--out", str(tmp_path / "second"), "--dry-run"], standalone_mode=False)
    shown = capsys.readouterr().out
    assert shown.count("on record") == 3
    assert shown.count("missing") == 1
    assert "4 runs, 1 to do" in shown


@pytest.mark.slow
def test_a_run_taken_off_the_record_comes_out_the_same(tmp_path):
    file = tmp_path / "tiny.yaml"
    file.write_text(yaml.safe_dump(TINY))
    record = record_path(file, define(TINY))
    first = raylt.study(file, out=tmp_path / "first", parallel=1, record_file=record)
    without(record, "prox", 1)
    second = raylt.study(file, out=tmp_path / "second", parallel=1)
    assert [path.parent.name for path in second.folder.rglob("summary.json")] == ["seed-1"]
    assert [each.summary["model_sha256"] for each in second.records] == [
        each.summary["model_sha256"] for each in first.records
    ]
    assert second.holdings == first.holdings
