"""Runs and searches that were recorded under former names of methods' fields stay valid."""

import json
from pathlib import Path

import pytest
from made import write_run
from refusals import refused

from raylt.errors import CheckpointError
from raylt.methods import METHODS
from raylt.studies.definition import define, read_definition
from raylt.studies.records.former_names import (
    PREFIXED,
    PREFIXES,
    current_name,
    current_settings,
    former_name,
    former_settings,
)
from raylt.studies.records.recorded_runs import load_planned, load_tuned, read_results, write_results
from raylt.studies.running.tuning import search_settings
from raylt.studies.study import Study
from raylt.typed_json import hash_json

STUDIES = Path(__file__).parents[3] / "studies"
ARMS = {"ccvr": {"method": {"name": "ccvr", "virtual": 20, "retrain_epochs": 2}}, "fedavg": "fedavg"}
TINY = {
    "name": "tiny",
    "base": {"data": {"clients": 3}, "federation": {"rounds": 1}, "local": {"epochs": 1}},
    "arms": ARMS,
    "reference": "fedavg",
    "seeds": 1,
}


@pytest.mark.parametrize("name", METHODS)
def test_former_and_present_names_are_each_others_inverse(name):
    prefix = PREFIXES.get(name, "retrain")
    for field in METHODS[name].model_fields:
        assert current_name(name, field) == field
        assert current_name(name, former_name(name, field)) == field
    for field in PREFIXED:
        present = f"{prefix}_{field}" in METHODS[name].model_fields
        assert current_name(name, field) == (f"{prefix}_{field}" if present else field)


def test_fields_that_no_method_had_keep_their_names():
    assert current_name("fedbabu", "epochs") == "epochs"  # `tune_epochs` has always been its name
    assert current_name("a plugin", "epochs") == "epochs"
    assert former_name("sfd", "retrain_from") == "retrain_from"


def test_nested_and_dotted_settings_get_the_present_names():
    nested = {"method": {"name": "ccvr", "epochs": 5}, "local": {"epochs": 1}}
    assert current_settings(nested, "ccvr") == {"method": {"name": "ccvr", "retrain_epochs": 5}, "local": {"epochs": 1}}
    assert current_settings({"method": "ccvr", "local.lr": 1}, "ccvr") == {"method": "ccvr", "local.lr": 1}
    dotted = {"method.tune_lr": 0.1, "local.lr": 0.2}
    assert former_settings(dotted, "fedafa") == {"method.lr": 0.1, "local.lr": 0.2}
    assert current_settings({"method.lr": 0.1, "local.lr": 0.2}, "fedafa") == dotted


def test_a_run_that_was_recorded_under_a_former_name_counts(tmp_path):
    record = tmp_path / "results" / "tiny.json"
    study = Study.create(define(TINY), tmp_path / "first")
    for plan in study.planned:
        write_run(study.folder / plan.folder, plan, [0.5])
    study.run(record_file=record, mix_versions=True)
    definition, records, holdings, _ = read_results(record)
    as_then = [record_with_former_names(each) for each in records]
    changes = {"name": "ccvr", "virtual": 20, "epochs": 2}
    former = definition.model_copy(update={"arms": definition.arms | {"ccvr": {"method": changes}}})
    tuned = {"": {"ccvr": {**outcome("0" * 64), "values": {"method.lr": 0.5}}}}
    write_results(record, former, as_then, holdings, tuned)
    assert '"epochs": 2' in json.dumps(json.loads(record.read_text())["definition"])

    taken = load_planned(record, define(TINY).runs(), mix_versions=True)
    assert taken.passed_over == []
    assert len(taken.records) == 2
    definition, records, _, tuned = read_results(record)
    assert all(each.sealed for each in records)
    assert definition.arms["ccvr"] == ARMS["ccvr"]
    assert tuned[""]["ccvr"]["values"] == {"method.retrain_lr": 0.5}


def test_a_search_that_was_made_under_a_former_name_is_recognised(tmp_path):
    tune = {"runs": 2, "ranges": {"method.retrain_lr": "loguniform(0.001, 0.1)"}, "fields": {"ccvr": ["retrain_batch"]}}
    definition = define(TINY | {"tune": tune, "base": {**TINY["base"], "data.validation": 0.2}})
    base, reference = definition.base_of("", "ccvr"), definition.base_of("", "fedavg")
    now, then = (
        hash_json(search_settings(definition.tune, "ccvr", base, reference, None, former)) for former in (False, True)
    )
    assert now != then
    for asked, expected in ((now, 1), (then, 1), ("0" * 64, 0)):
        record = tmp_path / f"{asked[:8]}.json"
        write_results(record, definition, [], {}, {"": {"ccvr": outcome(asked)}})
        assert len(load_tuned(record, definition, mix_versions=True)[""]) == expected


@pytest.mark.parametrize(("name", "runs"), [("bpfed_digits", 108), ("fedsm_fashion", 39), ("sfd_aligner", 42)])
def test_recorded_runs_of_the_studies_count(name, runs):
    definition = read_definition(STUDIES / f"{name}.yaml")
    taken = load_planned(STUDIES / "results" / f"{name}.json", definition.runs(), mix_versions=True)
    assert len(taken.records) == runs


def record_with_former_names(record):
    """Return the record of a run as an earlier version would have written it."""
    method = {
        former_name(record.config["method"]["name"], key): value for key, value in record.config["method"].items()
    }
    return type(record)(**{**vars(record), "config": record.config | {"method": method}})


def outcome(asked):
    return {"asked": asked, "values": {}, "score": 0.5, "trials": 3, "client_steps": 90, "budget": 99}


@pytest.mark.parametrize(
    "settings",
    [
        {"method": {"name": "ccvr", "epochs": 3, "retrain_epochs": 5}},
        {"method": {"retrain_epochs": 5, "epochs": 3}},
        {"method.epochs": 3, "method.retrain_epochs": 5},
    ],
)
def test_a_field_with_two_values_by_two_names_is_refused(settings):
    with refused("file.malformed", CheckpointError):
        current_settings(settings, "ccvr")
