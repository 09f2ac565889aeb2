"""Arms that begin with the same training are trained once."""

import json
import re
from pathlib import Path

import pytest

import raylt
from raylt.cli.main import app
from raylt.runs.callbacks.base import Callback
from raylt.runs.run import Run
from raylt.studies.definition import define, read_definition
from raylt.studies.running.shared_training import stems
from raylt.studies.running.worker import do
from raylt.studies.study import Study

STUDIES = Path(raylt.__path__[0]).parent / "studies"
BASE = {"data": {"clients": 3}, "federation": {"rounds": 1}, "local": {"epochs": 1}, "output": {"keep": 2}}
SHARED = {
    "name": "shared",
    "base": BASE,
    "seeds": 2,
    "cells": {"data.imbalance": [10, 20]},
    "arms": {
        "fedavg": "fedavg",
        "prox": "fedprox",
        "ccvr": {"method": {"name": "ccvr", "retrain_epochs": 2}},
        "more": {"method": {"name": "ccvr", "retrain_epochs": 3}},
    },
}


def parent_of(folder):
    return json.loads((folder / "identity.json").read_text())["parent"]


def test_runs_that_part_late_share_the_first_of_them_within_a_cell_and_a_seed():
    planned = define(SHARED).runs()
    shared = stems(planned)
    assert len(planned) == 16
    assert shared == {
        each.folder: (each.folder.replace(each.arm, "fedavg"), 1) for each in planned if each.arm in ("ccvr", "more")
    }
    local = {"more": {"method": {"name": "ccvr", "retrain_epochs": 3}, "local.lr": 0.3}}
    assert not any("more" in folder for folder in stems(define(SHARED | {"arms": SHARED["arms"] | local}).runs()))


@pytest.mark.slow
def test_run_that_keeps_the_checkpoint_where_the_others_part_is_the_stem(tmp_path):
    fedsm = {"name": "fedsm", "teacher": "none"}
    study = {
        "name": "late",
        "base": {"data": {"clients": 3}, "federation": {"rounds": 3}, "local": {"epochs": 1}},
        "seeds": 1,
        "arms": {
            "never": {"method": fedsm | {"retrain_rounds": 0}},
            "late": {"method": fedsm | {"retrain_rounds": 1}},
            "later": {"method": fedsm | {"retrain_rounds": 1, "retrain_epochs": 2}},
        },
    }
    by_arm = {each.arm: each for each in define(study).runs()}
    assert stems(list(by_arm.values())) == {"never/seed-0": ("late/seed-0", 2), "later/seed-0": ("late/seed-0", 2)}
    for arm in ("late", "later", "never"):
        do(tmp_path / arm, by_arm[arm].config, "local", None, Callback(), Run(tmp_path / "late"))
    assert [parent_of(tmp_path / arm) is not None for arm in ("late", "later", "never")] == [False, True, True]
    do(tmp_path / "by itself", by_arm["never"].config, "local", None, Callback())
    assert Run(tmp_path / "never").summary["model_sha256"] == Run(tmp_path / "by itself").summary["model_sha256"]


@pytest.mark.slow
def test_run_of_a_study_takes_its_first_steps_from_its_stem_where_that_has_come_so_far(tmp_path):
    by_arm = {each.arm: each for each in define(SHARED).runs() if each.seed == 0 and "10" in each.cell}
    places = {arm: tmp_path / arm for arm in by_arm}
    # the other run does not exist
    do(places["ccvr"], by_arm["ccvr"].config, "local", None, Callback(), Run(places["fedavg"]))
    assert parent_of(places["ccvr"]) is None
    do(places["fedavg"], by_arm["fedavg"].config, "local", None, Callback())
    do(places["more"], by_arm["ccvr"].config, "local", None, Callback(), Run(places["fedavg"]))
    assert parent_of(places["more"])["run"] == Run(places["fedavg"]).sha256
    ends = [Run(places[arm]).summary for arm in ("ccvr", "more")]
    assert ends[0]["model_sha256"] == ends[1]["model_sha256"]
    assert ends[0]["groups"] == ends[1]["groups"]


def test_dry_run_says_what_is_trained_and_from_where_the_others_go_on(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.yaml").write_text(json.dumps(SHARED | {"cells": {}}))
    app(["study", "s.yaml", "--dry-run"], standalone_mode=False)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in lines if line.startswith(("ccvr/seed-1", "more/seed-1"))] == [
        "fedavg/seed-1"
    ] * 2
    assert re.search(r"8 runs, 4 trainings .*; 8 to do: ", " ".join(lines))


@pytest.mark.slow
def test_decisive_study_trains_two_encoders_a_seed():
    planned = read_definition(STUDIES / "sfd_decisive.yaml").runs()
    trained = [each.folder for each in planned if each.folder not in stems(planned)]
    assert trained == [f"{encoder}-none/seed-{seed}" for seed in range(3) for encoder in ("abbl", "ce")]


@pytest.mark.slow
def test_study_trains_arms_that_part_late_once(tmp_path):
    study = Study.create(define(SHARED | {"cells": {}, "seeds": 1}), tmp_path)

    assert study.run(parallel=2) == []
    parents = {record.arm: parent_of(study.folder / record.folder) for record in study.records}
    assert [arm for arm, parent in parents.items() if parent] == ["ccvr", "more"]
    assert {record.state for record in study.records} == {"done"}
