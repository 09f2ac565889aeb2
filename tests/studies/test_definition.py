from pathlib import Path

import pytest

from raylt.config import load
from raylt.errors import ConfigError
from raylt.methods import make_method
from raylt.studies.definition import define, read_definition
from raylt.studies.settings import label, merge, resolved, slug
from raylt.studies.study import Study

SMALL = {"name": "small", "base": {"federation": {"rounds": 2}}, "arms": {"fedavg": "fedavg", "prox": {
    "method": {"name": "fedprox", "mu": 0.1}}}, "cells": {"data.imbalance": [10, 50]}, "seeds": 2}


def test_runs_are_the_product_and_both_seeds_are_tied():
    runs = define(SMALL).runs()
    assert len(runs) == 2 * 2 * 2
    assert {(run.config.seed, run.config.data.seed) for run in runs} == {(0, 0), (1, 1)}
    assert [run.folder for run in runs[:3]] == ["if10/fedavg/seed-0", "if10/prox/seed-0", "if10/fedavg/seed-1"]
    assert {run.config.data.imbalance for run in runs if run.cell == "IF 50"} == {50.0}


def test_a_runs_configuration_is_that_of_raylt_run_with_the_same_settings():
    run = define(SMALL).runs()[1]
    config = load(None, ["method=fedprox", "method.mu=0.1", "federation.rounds=2", "data.imbalance=10"])
    method = make_method(config.method)
    assert run.config == config.model_copy(update={"method": {"name": method.name, **method.model_dump()}})


def test_merge_knows_that_a_method_is_replaced_by_name_and_changed_by_fields():
    base = {"method": {"name": "sfd", "rf_dim": 10}, "data": {"alpha": 1}}
    assert merge(base, {"method": {"aligner": False}})["method"] == {"name": "sfd", "rf_dim": 10, "aligner": False}
    assert merge(base, {"method.aligner": False})["method"] == {"name": "sfd", "rf_dim": 10, "aligner": False}
    assert merge(base, {"method": "fedavg"})["method"] == {"name": "fedavg"}
    assert merge(base, {"data.clients": 4, "seed": 1}) == base | {"data": {"alpha": 1, "clients": 4}, "seed": 1}
    assert base == {"method": {"name": "sfd", "rf_dim": 10}, "data": {"alpha": 1}}


def test_cells_as_a_list_of_mappings_and_none_at_all():
    listed = define(SMALL | {"cells": [{"data.imbalance": 10, "data.alpha": 0.5}]})
    assert list(listed.all_cells) == ["IF 10, alpha 0.5"]
    assert define(SMALL | {"cells": {}}).runs()[0].folder == "fedavg/seed-0"


def test_labels_and_folders():
    assert label({"data.source": "cifar10", "data.imbalance": 100.0, "local.epochs": 5}) == "cifar10, IF 100, epochs 5"
    assert slug("IF 100, alpha 0.5") == "if100_alpha0.5"
    assert slug("SFD w/o aligner") == "sfd-w-o-aligner"


def test_claims_read_both_ways():
    claims = define(SMALL | {"claims": ["prox > fedavg on few", "prox<fedavg"]}).parsed_claims
    assert [str(claim) for claim in claims] == ["prox > fedavg on few", "fedavg > prox on accuracy"]


def test_a_claim_may_say_how_far_a_paper_has_it():
    claims = define(SMALL | {"claims": ["prox > fedavg", {"prox > fedavg on few": 2.96}]}).parsed_claims
    assert [(str(claim), claim.printed) for claim in claims] == [("prox > fedavg on accuracy", None),
                                                                 ("prox > fedavg on few", 2.96)]


@pytest.mark.parametrize(("change", "message"), [
    ({"arms": {}}, "arms"),
    ({"claims": ["prox beats fedavg"]}, "is written ARM > ARM"),
    ({"claims": ["prox > sgd"]}, "'sgd' is no arm; there are: fedavg, prox"),
    ({"claims": [{"prox > sgd": 1}]}, "'sgd' is no arm; there are: fedavg, prox"),
    ({"claims": [{"prox > fedavg": "much"}]}, r"study\.claims"),
    ({"claims": ["prox > fedavg on fewest"]}, "no such measure"),
    ({"reference": "sgd"}, "no such arm"),
    ({"seeds": 0}, "at least 1"),
    ({"seeds": [1, 1]}, "different seeds"),
    ({"arms": {"a b": "fedavg", "a-b": "fedprox"}}, "share a folder"),
    ({"arms": {"x": {"method": {"name": "fedprox", "nu": 1}}}}, "arm 'x': method.nu"),
    ({"arms": {"x": "fedavgg"}}, "did you mean fedavg"),
    ({"cells": {"data.imbalanc": [1]}}, "did you mean data.imbalance"),
    ({"cells": {"lr low": {"local.lr": 0.01}, "lr-low": {"local.lr": 0.1}}}, "'lr low' and 'lr-low' would share"),
    ({"cells": {"alpha < 1": {"data.alpha": 0.5}, "alpha > 1": {"data.alpha": 2}}}, "would share the folder alpha-1"),
    ({"cells": {"..": {"local.epochs": 2}}}, r"'..': cannot be a folder"),
    ({"cells": {".": {"local.epochs": 2}}}, r"'.': cannot be a folder"),
    ({"cells": {"<>": {"local.epochs": 2}, "x": {}}}, "'<>': cannot be a folder"),
    ({"cells": [{"local.epochs": 2}, {"method.epochs": 2}]}, "would both be called 'epochs 2'"),
    ({"cells": {"data.imbalance": [10, 10.0]}}, "would both be called 'IF 10'"),
    ({"armes": {}}, "did you mean study.arms"),
    ({"name": "../x"}, "name"),
])
def test_what_cannot_be_run_is_refused_in_one_line(change, message):
    with pytest.raises(ConfigError, match=message) as raised:
        define(SMALL | change)
    assert "\n" not in str(raised.value)


def test_a_file_gives_its_name_and_may_start_from_a_recipe(tmp_path):
    file = tmp_path / "aligner.yaml"
    file.write_text("recipe: sfd/cifar10_if100_alpha0.05_k10.yaml\n"
                    "arms: {full: {}, plain: {method: {aligner: false}}}\n")
    definition = read_definition(file)
    assert definition.name == "aligner"
    runs = definition.runs()
    assert [run.config.method["aligner"] for run in runs[:2]] == [True, False]
    assert {run.config.data.source for run in runs} == {"cifar10"}
    with pytest.raises(ConfigError, match="give a YAML file that exists"):
        read_definition(tmp_path / "none.yaml")


def test_the_studies_at_the_root_can_be_run():
    for file in (Path(__file__).parents[2] / "studies").glob("*.yaml"):
        assert read_definition(file).runs()


def test_resolved_fills_in_the_methods_fields():
    assert resolved({"method": "fedprox"}).method == {"name": "fedprox", "mu": 0.01}


@pytest.mark.parametrize(("changes", "message"), [
    ({"base": {"data": "digits"}}, "data = 'digits': must be a mapping of settings"),
    ({"arms": {"a": {"method": None}}}, "method = None: must be a mapping of settings"),
    ({"arms": {"a": {"method": 5}}}, "method = 5: must be a mapping of settings"),
    ({"arms": {"a": {"local.lr.x": 1}}, "base": {"local": {"lr": 0.1}}},
     "local.lr = 0.1: must be a mapping of settings"),
    ({"arms": {"(..": "fedavg"}}, r"study.arms: '\(\.\.'"),
    ({"cells": {"data.imbalance": []}}, r"study.cells: .*no cell; give each setting at least one value"),
    ({"only": {"IF 10": []}}, "give at least one arm, and each once"),
    ({"only": {"IF 10": ["prox", "prox"]}}, "give at least one arm, and each once"),
    ({"measure": "matched", "at": "best"}, "study.at = best: matched is known after the last round only"),
])
def test_what_nobody_can_run_or_compare_is_one_line_before_anything_runs(changes, message):
    with pytest.raises(ConfigError, match=message):
        define(SMALL | changes)


def test_a_recipe_that_is_a_file_is_found_beside_the_study_from_anywhere(tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "mine.yaml").write_text("federation: {rounds: 7}")
    (tmp_path / "a" / "s.yaml").write_text("recipe: mine.yaml\narms: {fedavg: fedavg}\nseeds: 1")
    (tmp_path / "b").mkdir()
    monkeypatch.chdir(tmp_path / "b")
    study = Study.create(read_definition(Path("../a/s.yaml")), tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    assert Study.open(study.folder).planned[0].config.federation.rounds == 7
