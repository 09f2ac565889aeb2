"""Arms that are tuned with equal budgets before their seeds run."""

import json
import time
from pathlib import Path

import pytest
from made import record as finished
from made import write_run
from refusals import refused

import raylt
from raylt import registry
from raylt.cli.main import app
from raylt.config import load, settings
from raylt.errors import CheckpointError, ConfigError
from raylt.hyper import LogUniform
from raylt.registry import Plugin
from raylt.studies import study as study_module
from raylt.studies.analysis.comparison import compare
from raylt.studies.definition import define, read_definition, reread_definition
from raylt.studies.records.record import read_run
from raylt.studies.records.recorded_runs import load_tuned, write_results
from raylt.studies.report import comparison_tables
from raylt.studies.running import tuning
from raylt.studies.running.tuning import FILE, Tuning, describe, joined, search_arms, search_settings, write_tuned
from raylt.studies.running.worker_slots import WorkerSlot
from raylt.studies.study import Study
from raylt.typed_json import hash_json
from tune.arm import check_searches, tune_arm
from tune.loop import size_of
from tune.plan import client_steps
from tune.search import search

TUNED = {
    "name": "tuned",
    "base": {"data": {"clients": 3}, "federation": {"rounds": 2}, "local": {"epochs": 1}},
    "arms": {"fedavg": "fedavg", "prox": "fedprox", "prox 1": {"method": {"name": "fedprox", "mu": 1.0}}},
    "seeds": 2,
    "tune": {"runs": 3, "searcher": "random"},
}


class Recorder(raylt.Callback):
    """Records the messages of a study."""

    def __init__(self, messages):
        self.messages = messages

    def on_message(self, text, minor=False):
        self.messages.append(text)


def outcome(definition, arm, cell="", **values):
    bases = definition.bases()
    wanted = hash_json(search_settings(definition.tune, arm, bases[cell, arm], bases[cell, definition.compared_to]))
    return {"asked": wanted, "values": values, "score": 0.5, "trials": 3, "client_steps": 90, "budget": 99}


@pytest.mark.parametrize(
    ("parts", "metric"),
    [
        ({}, "accuracy"),
        ({"measure": "matched"}, "matched"),
        ({"measure": "matched", "tune": TUNED["tune"] | {"metric": "accuracy"}}, "accuracy"),
        ({"measure": "global_miou"}, "accuracy"),
    ],
)
def test_arms_are_tuned_by_the_figure_by_which_they_are_compared(parts, metric, tmp_path):
    study = Study.create(define(TUNED | parts), tmp_path)
    assert study.definition.tune.metric == metric
    assert read_definition(study.folder / "study.yaml").tune.metric == metric


def test_a_folder_of_an_earlier_version_was_tuned_by_accuracy(tmp_path):
    file = tmp_path / "study.yaml"
    written = {key: value for key, value in (TUNED | {"measure": "matched"}).items() if key != "name"}
    file.write_text(json.dumps(written))
    assert reread_definition(file).tune.metric == "accuracy"
    file.write_text(json.dumps(written | {"tune": TUNED["tune"] | {"metric": "few"}}))
    assert reread_definition(file).tune.metric == "few"


def test_a_setting_that_searches_of_earlier_versions_did_not_have_counts_where_it_is_set():
    definition = define(TUNED)
    base = definition.base_of("", "prox")
    asked = search_settings(definition.tune, "prox", base, base)
    earlier = frozenset(key for key, _ in settings() if key != "evaluation.fresh")
    assert search_settings(definition.tune, "prox", base, base, earlier) == asked
    fresh = base.model_copy(update={"evaluation": base.evaluation.model_copy(update={"fresh": True})})
    assert search_settings(definition.tune, "prox", fresh, fresh) != asked


def test_runs_have_what_their_arm_was_tuned_to_in_that_cell():
    definition = define(TUNED | {"cells": {"data.imbalance": [5, 10]}})
    first, second = definition.all_cells
    tuning = {first: {"prox": outcome(definition, "prox", first, **{"method.mu": 0.5, "local.lr": 0.3})}}
    by = {(p.cell, p.arm, p.seed): p.config for p in definition.runs(tuning)}
    assert [by[first, "prox", seed].method["mu"] for seed in (0, 1)] == [0.5, 0.5]
    assert by[first, "prox", 1].local.lr == 0.3
    assert by[second, "prox", 0].method["mu"] == 0.01
    assert by[first, "prox 1", 0].method["mu"] == 1.0


def test_a_search_starts_from_the_fields_that_the_study_gives_alone():
    bases = define(TUNED).bases()
    assert bases["", "prox"].method == {"name": "fedprox"}
    assert bases["", "prox 1"].method == {"name": "fedprox", "mu": 1.0}
    assert bases["", "prox"].data.seed == 0


def test_fields_of_an_unknown_arm_cannot_be_tuned():
    with refused("config.unknown-name", ConfigError, key="study.tune.fields", name="sfd"):
        define(TUNED | {"tune": TUNED["tune"] | {"fields": {"sfd": ["tau"]}}})


@pytest.mark.slow
def test_the_studies_search_fields_that_their_methods_have():
    studies = [read_definition(file) for file in (Path(__file__).parents[3] / "studies").glob("*.yaml")]
    tuned = [study for study in studies if study.tune is not None]
    assert len(tuned) > 1
    for study in tuned:
        check_searches(study)


def test_a_range_that_acts_in_one_of_the_cells_is_taken():
    cells = [{"federation.rounds": 0}, {"federation.rounds": 2}]
    arms = {"fedavg": "fedncm"}  # which takes no rounds too
    ranges = {"local.lr": "loguniform(0.01, 0.1)"}
    frozen = TUNED["base"] | {"trainable": "classifier"}
    check_searches(
        define(
            TUNED
            | {"arms": arms, "base": frozen, "tune": {"runs": 3, "ranges": ranges}}
            | {"cells": {"none": cells[0], "two": cells[1]}}
        )
    )


def test_a_range_for_one_of_several_methods_is_taken():
    check_searches(define(TUNED | {"tune": {"runs": 3, "ranges": {"method.mu": "uniform(0, 1)"}}}))


@pytest.mark.parametrize(
    ("tune", "code", "key"),
    [
        # one run of the reference, with one epoch, pays for no trial of three
        ({"runs": 1, "ranges": {"local.epochs": "choice(3)"}}, "search.budget-too-small", "study.tune.runs"),
        (
            {"runs": 1, "ranges": {"local.lr": "uniform(0.1, 0.2)"}, "metric": "few"},
            "search.no-class",
            "study.tune.metric",
        ),
    ],
)
def test_an_error_of_a_search_names_the_key_of_the_study(tmp_path, tune, code, key):
    tree = TUNED | {"base": TUNED["base"] | {"data.groups": [0, 1]}, "tune": tune}
    base = define(tree).bases()["", "fedavg"]
    with refused(code, ConfigError, key=key) as caught:
        tune_arm(tmp_path, base, base, define(tree).tune, "fedavg")
    assert str(caught.value).startswith(f"{key}: ")


@pytest.mark.parametrize("runs", [0.001, 0.5])
def test_a_budget_that_is_too_small_is_refused_with_one_that_is_large_enough(tmp_path, runs):
    definition = define(TUNED | {"tune": {"runs": runs, "splits": 2, "searcher": "random"}})
    base = definition.bases()["", "prox"]
    with refused("search.budget-too-small", ConfigError, key="study.tune.runs", value=runs) as caught:
        tune_arm(tmp_path, base, base, definition.tune, "prox")
    assert str(caught.value).endswith("Raise it to at least 2.")


@pytest.mark.slow
def test_arms_without_rounds_are_searched_and_are_no_unit_of_a_budget(tmp_path):
    exchange = {"method": "fed3r", "federation.rounds": 0}
    base = TUNED["base"] | {"trainable": "classifier"}
    arms = {"exchange": exchange, "fedprox": "fedprox"}
    definition = define(TUNED | {"base": base, "arms": arms, "tune": {"runs": 2, "searcher": "random"}})
    bases = definition.bases()
    tuned = tune_arm(tmp_path, bases["", "exchange"], bases["", "exchange"], definition.tune, "exchange")
    assert tuned["trials"] == 2
    with refused("search.budget-too-small", ConfigError, key="study.reference", value=0):
        tune_arm(tmp_path, bases["", "fedprox"], bases["", "exchange"], definition.tune, "fedprox")
    with refused("search.budget-too-small", ConfigError, key="study.reference", arm="fedprox"):
        check_searches(definition)


@pytest.mark.parametrize(("changes", "key"), [({"runs": 0}, "study.tune.runs"), ({"trials": 3}, "study.tune.trials")])
def test_a_wrong_setting_of_tuning_is_named(changes, key):
    with pytest.raises(ConfigError, match=key):
        define(TUNED | {"tune": TUNED["tune"] | changes})


def test_the_reference_must_be_in_every_cell():
    with refused("config.conflict", ConfigError, key="study.tune", cell="10"):
        define(TUNED | {"cells": {"5": {}, "10": {}}, "only": {"10": ["prox"]}})


@pytest.mark.slow
def test_an_arm_is_searched_within_the_budget_and_resumes_after_an_interruption(tmp_path):
    definition = define(TUNED)
    base, reference = (definition.bases()["", arm] for arm in ("prox", "fedavg"))
    tuned = tune_arm(tmp_path, base, reference, definition.tune, "prox")
    one = client_steps(
        reference.model_copy(update={"data": reference.data.model_copy(update={"validation": 0.2})}),
        size_of(reference.model_copy(update={"data": reference.data.model_copy(update={"validation": 0.2})})).clients,
    )
    assert tuned["budget"] == 3 * one
    assert 0 < tuned["client_steps"] <= tuned["budget"]
    assert tuned["trials"] >= 3
    assert list(tuned["values"]) == ["method.mu"]
    assert tune_arm(tmp_path, base, reference, definition.tune, "prox") == tuned  # the search is not repeated
    with pytest.raises(CheckpointError):
        tune_arm(tmp_path, base, reference, definition.tune.model_copy(update={"runs": 4}), "prox")


@pytest.mark.slow
def test_a_budget_in_passes_counts_what_an_arm_computes(tmp_path):
    definition = define(TUNED | {"arms": {"fedavg": "fedavg", "ditto": "ditto"}})
    bases = definition.bases()
    tuned = {
        count: tune_arm(
            tmp_path / count,
            bases["", "ditto"],
            bases["", "fedavg"],
            definition.tune.model_copy(update={"count": count}),
            "ditto",
        )
        for count in ("steps", "passes")
    }
    assert tuned["steps"]["budget"] == tuned["passes"]["budget"]
    assert (tuned["steps"]["trials"], tuned["passes"]["trials"]) == (3, 1)
    assert tuned["passes"]["client_steps"] * 3 == tuned["passes"]["budget"] * 2
    assert "client-steps of FedAvg, " in describe("", "ditto", tuned["passes"], "accuracy")
    assert "client-steps, " in describe("", "ditto", tuned["steps"], "accuracy")


@pytest.mark.slow
def test_arms_without_rounds_are_searched_by_trials_as_a_budget_does_not_limit_them(tmp_path):
    arms = {"fedavg": "fedavg"} | {
        f"{name} once": {"method": name, "federation.rounds": 0} for name in ("fed3r", "fedncm")
    }
    base = TUNED["base"] | {"trainable": "classifier"}
    tune = TUNED["tune"] | {"ranges": {"local.lr": "loguniform(0.01, 0.1)"}, "fields": {"fedncm once": []}}
    definition = define(TUNED | {"base": base, "arms": arms, "tune": tune})
    once, nothing = (
        tune_arm(tmp_path / name, definition.bases()["", name], definition.bases()["", "fedavg"], definition.tune, name)
        for name in ("fed3r once", "fedncm once")
    )
    assert (once["trials"], once["client_steps"]) == (3, 0)
    assert "local.lr" not in once["values"]
    assert "method.ridge" in once["values"]
    assert once["score"] is not None
    assert nothing["trials"] == 0


def test_a_budget_alone_does_not_start_a_search_without_rounds(tmp_path):
    config = load(None, ["method=fed3r", "data.clients=3", "trainable=classifier", "federation.rounds=0"])
    with refused("search.not-searchable", ConfigError, key="--budget", value=500):
        search(
            config, {"method.ridge": LogUniform(0.01, 1.0)}, scheduler="none", budget=500, out=tmp_path, fleet="local"
        )


def test_ranges_of_other_methods_fields_and_given_fields_are_not_searched(tmp_path):
    definition = define(TUNED)
    tuning = Tuning(runs=3, ranges={"method.mu": "loguniform(0.1, 1)"}, fields={"prox 1": []})
    assert (
        tune_arm(tmp_path, definition.bases()["", "fedavg"], definition.bases()["", "fedavg"], tuning, "fedavg")[
            "trials"
        ]
        == 0
    )
    with pytest.raises(ConfigError, match=r"tune\.runs"):
        tune_arm(tmp_path, definition.bases()["", "prox"], definition.bases()["", "fedavg"], Tuning(runs=0.5), "prox")


def test_what_was_tuned_for_something_else_is_refused(tmp_path):
    definition = define(TUNED)
    bases = {key: base for key, base in definition.bases().items() if key[1] != "prox"}
    done = {"": {arm: outcome(definition, arm) for _, arm in bases}}
    write_tuned(tmp_path, done)
    assert search_arms(bases, definition.tune, "fedavg", tmp_path, None, 1, "local", None) == done
    with refused("study.changed", CheckpointError, path=str(tmp_path / FILE)):
        search_arms(bases, Tuning(runs=9), "fedavg", tmp_path, None, 1, "local", None)


def test_a_search_is_the_same_wherever_its_files_lie_and_whatever_other_arms_have():
    def hashed(changes, arm="prox", **fields):
        definition = define({**TUNED, **fields, "base": TUNED["base"] | changes})
        return outcome(definition, arm)["asked"]

    first = hashed({})
    assert hashed({"resources": {"device": "cpu"}, "data": {"clients": 3, "root": "/elsewhere"}}) == first
    assert hashed({}, tune=TUNED["tune"] | {"fields": {"prox 1": []}}) == first
    assert hashed({}, tune=TUNED["tune"] | {"fields": {"prox": []}}) != first
    # FedProx has no such field
    assert hashed({}, tune=TUNED["tune"] | {"ranges": {"method.q": "uniform(0, 1)"}}) == first
    assert hashed({}, tune=TUNED["tune"] | {"ranges": {"method.mu": "uniform(0, 1)"}}) != first
    assert hashed({}, reference="prox 1") != first  # the budget is counted in runs of the reference
    assert hashed({"local": {"epochs": 2}}) != first
    assert hashed({}, tune=TUNED["tune"] | {"searcher": "tpe"}) != first
    assert hashed({}, tune=TUNED["tune"] | {"count": "steps"}) == first
    assert hashed({}, tune=TUNED["tune"] | {"count": "passes"}) != first
    assert hashed({}, tune=TUNED["tune"] | {"splits": 1}) == first
    assert hashed({}, tune=TUNED["tune"] | {"splits": 2}) != first


def test_nothing_is_searched_while_a_run_is_of_another_version_of_the_code(tmp_path, monkeypatch):
    study = Study.create(define(TUNED), tmp_path)
    plan = study.planned[0]
    write_run(study.folder / plan.folder, plan, [0.1, 0.5], code="f" * 64)
    monkeypatch.setattr(study_module, "search_arms", pytest.fail)
    with refused("study.other-code", CheckpointError):
        study.run()


def test_what_was_tuned_with_another_version_of_a_plugin_is_searched_again(tmp_path, monkeypatch):
    definition = define(TUNED)
    tuned = {"": {arm: outcome(definition, arm, **{"local.lr": 0.5}) for arm in definition.arms}}
    records = []
    for plan in definition.runs(tuned):
        write_run(tmp_path / plan.folder, plan, [0.1, 0.5], plugin="0" * 64 if plan.arm == "prox" else None)
        records.append(read_run(tmp_path / plan.folder, plan.cell, plan.arm, plan.seed, plan.folder))
    file = tmp_path / "results.json"
    write_results(file, definition, records, {}, tuned)
    assert load_tuned(file, definition, mix_versions=False) == tuned
    monkeypatch.setitem(registry._plugins, ("model", "own"), Plugin("model", "own", None, "own.py", "1" * 64))
    assert load_tuned(file, definition, mix_versions=True) == tuned
    del tuned[""]["prox"]
    assert load_tuned(file, definition, mix_versions=False) == tuned


def test_what_was_tuned_with_another_version_of_the_code_is_searched_again(tmp_path):
    definition = define(TUNED)
    tuned = {"": {arm: outcome(definition, arm, **{"local.lr": 0.5}) for arm in definition.arms}}
    plan = definition.runs(tuned)[0]
    write_run(tmp_path / plan.folder, plan, [0.1, 0.5], code="0" * 64)
    file = tmp_path / "results.json"
    record = read_run(tmp_path / plan.folder, plan.cell, plan.arm, plan.seed, plan.folder)
    write_results(file, definition, [record], {}, tuned)
    assert load_tuned(file, definition, mix_versions=True) == tuned
    assert load_tuned(file, definition, mix_versions=False) == {}


def test_a_changed_file_is_refused_and_one_that_the_study_does_not_ask_for_is_not_used(tmp_path):
    definition = define(TUNED)
    folder = tmp_path / "tuned"
    folder.mkdir()
    write_tuned(folder, {"": {"prox": outcome(definition, "prox", **{"method.mu": 0.5})}})
    mu = {p.config.method["mu"] for p in Study.preview(definition, tmp_path).planned if p.arm == "prox"}
    assert mu == {0.5}
    without = define({key: value for key, value in TUNED.items() if key != "tune"})
    mu = {p.config.method["mu"] for p in Study.preview(without, tmp_path).planned if p.arm == "prox"}
    assert mu == {0.01}
    (folder / FILE).write_text((folder / FILE).read_text().replace("0.5", "0.7"))
    with refused("record.changed", CheckpointError, path=str(folder / FILE)):
        Study.preview(definition, tmp_path)


@pytest.mark.slow
def test_runs_of_a_study_without_its_tuned_file_are_checked_after_the_searches_are_read(tmp_path, monkeypatch):
    definition = define(TUNED)
    study = Study.create(definition, tmp_path)
    tuned = {"": {arm: outcome(definition, arm, **{"local.lr": 0.5}) for arm in definition.arms}}
    for plan in definition.runs(tuned):
        write_run(study.folder / plan.folder, plan, [0.1, 0.5], split=plan.seed)
    with refused("study.changed", CheckpointError) as caught:
        Study.open(study.folder)
    assert "tuned.json has no values of its arm: run the study's file again" in str(caught.value)
    again = Study.create(definition, tmp_path)
    monkeypatch.setattr(study_module, "search_arms", lambda *arguments: tuned)
    assert again.run([], mix_versions=True) == []
    other = {"": {arm: outcome(definition, arm, **{"local.lr": 0.1}) for arm in definition.arms}}
    monkeypatch.setattr(study_module, "search_arms", lambda *arguments: other)
    with refused("study.changed", CheckpointError, differences=["local.lr: 0.5 -> 0.1"]):
        Study.create(definition, tmp_path).run([], mix_versions=True)


def test_a_study_that_was_tuned_otherwise_is_refused_before_its_file_changes(tmp_path):
    definition = define(TUNED)
    study = Study.create(definition, tmp_path)
    write_tuned(study.folder, {"": {"prox": outcome(definition, "prox", **{"method.mu": 0.5})}})
    before = {file.name: file.read_bytes() for file in study.folder.iterdir()}
    other = define(TUNED | {"tune": TUNED["tune"] | {"runs": 4}})
    for prepare in (Study.preview, Study.create):
        with refused("study.changed", CheckpointError, arm="prox", differences=["runs: 3.0 -> 4.0"]):
            prepare(other, tmp_path)
    assert {file.name: file.read_bytes() for file in study.folder.iterdir()} == before


@pytest.mark.slow
def test_searches_of_earlier_versions_count_with_the_settings_of_their_runs():
    results = Path(__file__).parents[3] / "studies/results/ground_own.json"
    study = Study.open(results)
    study.check_tuned()
    assert study.definition.tune is not None
    changed = study.definition.tune.model_copy(update={"runs": study.definition.tune.runs + 1})
    study.definition = study.definition.model_copy(update={"tune": changed})
    with refused("study.changed", CheckpointError):
        study.check_tuned()


def test_a_dry_run_names_the_open_searches_and_counts_their_time(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    arms = {"fedavg": "fedavg", "prox": "fedprox", "prox 1": {"method": {"name": "fedprox", "mu": 1.0}}}
    tree = TUNED | {"arms": arms, "seeds": 1, "cells": {"data.imbalance": [5, 10]}}
    definition = define(tree)
    (tmp_path / "s.yaml").write_text(json.dumps(tree))
    study = Study.create(definition, tmp_path / "runs")
    for plan in definition.runs():
        write_run(study.folder / plan.folder, plan, [0.1, 0.5], split=plan.seed)
    write_tuned(study.folder, {"IF 5": {"prox": outcome(definition, "prox", "IF 5")}})
    arguments = ["study", "s.yaml", "--dry-run", "--parallel", "1", "--mix-versions"]
    app(arguments, standalone_mode=False)
    # only FedProx has a field to search; runs of two rounds of 2 s each, and a budget of three runs
    out = capsys.readouterr().out
    assert "6 runs, 0 to do: about 12 s, 1 at once" in out
    assert out.endswith("1 search before these runs, each with the budget of 3 runs of fedavg: prox in IF 10\n")
    app([*arguments, "--format", "json"], standalone_mode=False)
    content = json.loads(capsys.readouterr().out)
    assert (content["searches"], content["left_s"]) == ([{"cell": "IF 10", "arm": "prox"}], 12)


def test_searches_run_where_and_as_many_at_once_as_the_study_says(tmp_path, monkeypatch):
    definition = define(TUNED)
    jobs, places = [], []

    def run_searches(given, slots, folder):
        jobs.extend(given)
        places.append(len(slots))
        return []

    monkeypatch.setattr(tuning, "_run_searches", run_searches)
    search_arms(definition.bases(), definition.tune, "fedavg", tmp_path, raylt.Callback(), 2, "ray", "auto")
    assert [job["arm"] for job in jobs] == list(TUNED["arms"])
    assert {(job["fleet"], job["address"]) for job in jobs} == {("ray", "auto")}
    assert places == [2]


def test_a_setting_that_was_tuned_is_not_called_the_arms_own(tmp_path):
    arms = TUNED["arms"] | {"prox": {"method": "fedprox", "local.lr": 0.5}}
    definition = define(TUNED | {"arms": arms, "seeds": 1})
    (tmp_path / "tuned").mkdir()
    write_tuned(tmp_path / "tuned", {"": {"prox": outcome(definition, "prox", **{"local.lr": 0.3})}})
    study = Study.preview(definition, tmp_path)
    for plan in study.planned:
        write_run(study.folder / plan.folder, plan, [0.1, 0.5], split=plan.seed)
    study.read()
    assert study.compare().apart == []


@pytest.mark.slow
def test_a_tuned_study_is_taken_up_from_its_record_where_it_asks_the_same(tmp_path):
    definition = define(TUNED)
    values = {"fedavg": {}, "prox": {"method.mu": 0.5, "local.lr": 0.3}, "prox 1": {}}
    (tmp_path / "first" / "tuned").mkdir(parents=True)
    write_tuned(
        tmp_path / "first" / "tuned", {"": {arm: outcome(definition, arm, **each) for arm, each in values.items()}}
    )
    first, record = Study.preview(definition, tmp_path / "first"), tmp_path / "results" / "tuned.json"
    for plan in first.planned:
        write_run(first.folder / plan.folder, plan, [0.1, 0.5], split=plan.seed)
    first.run(record_file=record)
    fresh = Study.create(definition, tmp_path / "second", record)
    assert {each.state for each in fresh.records} == {"done"}
    assert (fresh.tuned, fresh.recorded.passed_over) == (first.tuned, [])
    assert fresh.run() == []  # nothing is searched and no run is done
    assert Study.open(fresh.folder).compare() == first.compare()
    assert first.compare().apart == []  # a searched rate may differ between arms; `tuned` has it
    other = Study.preview(define(TUNED | {"tune": TUNED["tune"] | {"runs": 4}}), tmp_path / "third", record)
    assert other.tuned == {"": {}}
    assert {each.state for each in other.records if each.arm == "prox"} == {"missing"}


@pytest.mark.slow
def test_recorded_runs_of_an_arm_that_was_tuned_with_another_budget_are_taken_off_by_name(tmp_path):
    def done(tree, place):
        definition, lines = define(tree), []
        (tmp_path / place / "tuned").mkdir(parents=True)
        write_tuned(tmp_path / place / "tuned", {"": {arm: outcome(definition, arm) for arm in definition.arms}})
        study = Study.preview(definition, tmp_path / place)
        for plan in study.planned:
            write_run(study.folder / plan.folder, plan, [0.1, 0.5], split=plan.seed)
        study.run([Recorder(lines)], record_file=tmp_path / "tuned.json")
        return lines

    assert done(TUNED, "first") == []
    fewer = {arm: each for arm, each in TUNED["arms"].items() if arm != "prox 1"}
    assert done(TUNED | {"arms": fewer}, "second") == []
    recorded = Study.open(tmp_path / "tuned.json")
    assert len(recorded.records) == 6  # the arm's runs stay, because its search was the same
    assert recorded.tuned[""].keys() == TUNED["arms"].keys()
    (line,) = done(TUNED | {"arms": fewer, "tune": TUNED["tune"] | {"runs": 4}}, "third")
    assert "prox1/seed-0 (its arm was tuned with other settings)" in line
    assert {each.arm for each in Study.open(tmp_path / "tuned.json").records} == {"fedavg", "prox"}


def test_tables_say_what_was_tuned():
    line = describe("IF 10", "prox", outcome(define(TUNED), "prox", **{"method.mu": 0.5}), "matched")
    cost = "3 trials, 90 of 99 client-steps"
    assert line == f"prox in IF 10: method.mu 0.5 ({cost}, matched 50.00 % on validation samples)"
    passes = outcome(define(TUNED), "prox", **{"method.mu": 0.5}) | {"count": "passes"}
    assert "90 of 99 client-steps of FedAvg" in describe("", "prox", passes, "accuracy")
    comparison = compare([finished("a", 0, 0.5)], "a", tuned=[line])
    assert f"- {line}" in comparison_tables.comparison_table(comparison).markdown()
    assert f"% tuned on validation samples: {line}" in comparison_tables.comparison_table(comparison).latex()


def test_the_newer_of_two_outcomes_of_an_arm_counts():
    earlier, later = (outcome(define(TUNED), "prox", **{"method.mu": mu}) for mu in (0.1, 0.5))
    both = joined({"x": {"prox": earlier, "prox 1": earlier}}, {"x": {"prox": later}, "y": {"prox": later}})
    assert both == {"x": {"prox": later, "prox 1": earlier}, "y": {"prox": later}}


def test_tables_leave_out_what_a_removed_arm_was_tuned_to():
    definition = define(TUNED | {"arms": {"prox": "fedprox"}, "seeds": 1})
    tuned = {"": {arm: outcome(define(TUNED), arm, **{"method.mu": 0.5}) for arm in ("prox", "prox 1")}}
    study = Study(definition, None, [finished("prox", 0, 0.5)], {}, tuned)
    assert [line.partition(":")[0] for line in study.compare().tuned] == ["prox"]


@pytest.mark.slow
def test_a_range_that_is_none_is_the_users_mistake_in_one_line(tmp_path):
    study = Study.create(define(TUNED | {"tune": {"runs": 3, "ranges": {"local.lr": "banana"}}}), tmp_path)
    with pytest.raises(ConfigError, match=r"tuning of arm 'fedavg': study\.tune\.ranges\.local\.lr.*banana") as caught:
        study.run()
    assert caught.value.details["arm"] == "fedavg"
    assert not (study.folder / FILE).exists()


@pytest.mark.slow
def test_a_study_tunes_its_arms_then_runs_its_seeds_and_does_neither_again(tmp_path):
    lines = []
    study = Study.create(define(TUNED), tmp_path)
    assert study.run([Recorder(lines)]) == []
    mu = study.tuned[""]["prox"]["values"]["method.mu"]
    assert {r.config["method"]["mu"] for r in study.records if r.arm == "prox"} == {mu}
    assert study.tuned[""]["fedavg"]["trials"] == study.tuned[""]["prox 1"]["trials"] == 0
    assert all(record.state == "done" and record.config["data"]["validation"] == 0 for record in study.records)
    again = Study.create(define(TUNED), tmp_path)
    lines.clear()
    assert again.run([Recorder(lines)]) == []
    assert lines == []
    results = Study.open(study.folder / "results.json")
    assert results.tuned == study.tuned
    assert [line[:4] for line in results.compare().tuned] == ["feda", "prox", "prox"]
    with refused("study.changed", CheckpointError):
        Study.create(define(TUNED | {"tune": {"runs": 4}}), tmp_path).run()


# an arm's process that fails at once, or ends with its standard input and at most 30 s later
PROCESS = """
import json, select, sys
if json.loads(sys.stdin.readline())["arm"] == "fails":
    print(json.dumps({"problem": "out of memory"}))
else:
    select.select([sys.stdin], [], [], 30)
"""


def test_a_search_that_fails_ends_the_searches_that_wait_for_its_place(tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "SEARCH_CODE", PROCESS)
    start = time.monotonic()
    jobs = [{"arm": "fails"}, {"arm": "waits"}, {"arm": "waits, too"}]
    with refused("study.tuning-failed", arm="fails"):
        list(tuning._run_searches(jobs, [WorkerSlot(frozenset(), {})], tmp_path))
    assert time.monotonic() - start < 20


@pytest.mark.slow
def test_files_of_the_current_folder_are_no_packages_to_a_search(tmp_path, monkeypatch):
    (tmp_path / "random.py").write_text("raise SystemExit('a file of the user')\n")
    monkeypatch.chdir(tmp_path)
    definition = define(TUNED)
    configs = {which: definition.base_of("", "fedavg").model_dump(mode="json") for which in ("base", "reference")}
    tune = definition.tune.model_dump(mode="json")
    job = {"arm": "fedavg", "folder": str(tmp_path / "out"), "fleet": "local", "address": None, "plugins": []}
    ((_, outcome),) = tuning._run_searches([job | configs | {"tune": tune}], [WorkerSlot(frozenset(), {})], tmp_path)
    assert outcome["trials"] == 0  # nothing to tune


def test_a_search_whose_process_dies_before_it_reads_its_job_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "SEARCH_CODE", "raise SystemExit")
    with refused("study.tuning-failed", arm="large"):
        list(tuning._run_searches([{"arm": "large", "tune": "x" * 2**20}], [WorkerSlot(frozenset(), {})], tmp_path))
