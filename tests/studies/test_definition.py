import re
from pathlib import Path

import pytest
from refusals import refused

from raylt.config import load
from raylt.errors import ConfigError
from raylt.methods import make_method
from raylt.studies import definition
from raylt.studies.cells import label, slug
from raylt.studies.definition import define, read_definition
from raylt.studies.settings import merge, read_recipe, resolved
from raylt.studies.study import Study

SMALL = {
    "name": "small",
    "base": {"federation": {"rounds": 2}},
    "arms": {"fedavg": "fedavg", "prox": {"method": {"name": "fedprox", "mu": 0.1}}},
    "cells": {"data.imbalance": [10, 50]},
    "seeds": 2,
}


def test_runs_are_the_product_and_both_seeds_are_tied():
    runs = define(SMALL).runs()
    assert len(runs) == 2 * 2 * 2
    assert {(run.config.seed, run.config.data.seed) for run in runs} == {(0, 0), (1, 1)}
    assert [run.folder for run in runs[:3]] == ["if10/fedavg/seed-0", "if10/prox/seed-0", "if10/fedavg/seed-1"]
    assert {run.config.data.imbalance for run in runs if run.cell == "IF 50"} == {50.0}


def test_tuning_starts_from_the_first_seed():
    bases = define(SMALL | {"seeds": [5, 6]}).bases().values()
    assert {(base.seed, base.data.seed) for base in bases} == {(5, 5)}


def test_a_runs_configuration_is_that_of_raylt_run_with_the_same_settings():
    run = define(SMALL).runs()[1]
    config = load(None, ["method=fedprox", "method.mu=0.1", "federation.rounds=2", "data.imbalance=10"])
    method = make_method(config.method)
    assert run.config == config.model_copy(update={"method": {"name": method.name, **method.model_dump()}})


def test_a_mistyped_key_is_named_before_a_missing_one():
    with refused("config.unknown-key", ConfigError, key="study.armz"):
        define({"name": "small", "armz": {"fedavg": "fedavg"}})


def test_merge_knows_that_a_method_is_replaced_by_name_and_changed_by_fields():
    base = {"method": {"name": "sfd", "rf_dim": 10}, "data": {"alpha": 1}}
    assert merge(base, {"method": {"aligner": False}})["method"] == {"name": "sfd", "rf_dim": 10, "aligner": False}
    assert merge(base, {"method.aligner": False})["method"] == {"name": "sfd", "rf_dim": 10, "aligner": False}
    assert merge(base, {"method": "fedavg"})["method"] == {"name": "fedavg"}
    assert merge(base, {"method.mu": 3, "method": "fedprox"})["method"] == {"name": "fedprox", "mu": 3}
    assert merge(base, {"data.clients": 4, "seed": 1}) == base | {"data": {"alpha": 1, "clients": 4}, "seed": 1}
    assert base == {"method": {"name": "sfd", "rf_dim": 10}, "data": {"alpha": 1}}


@pytest.mark.parametrize("base", [{"method": {"mu": 3}}, {"method.mu": 3}])
@pytest.mark.parametrize("arm", [{"method": "fedprox"}, {"method": {"name": "fedprox"}}, {"method.name": "fedprox"}])
def test_fields_without_a_method_are_those_of_the_method_that_an_arm_names(base, arm):
    assert merge(merge({}, base), arm)["method"] == {"name": "fedprox", "mu": 3}


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
    assert [(str(claim), claim.printed) for claim in claims] == [
        ("prox > fedavg on accuracy", None),
        ("prox > fedavg on few", 2.96),
    ]


@pytest.mark.parametrize(
    ("change", "code", "details"),
    [
        ({"claims": ["prox beats fedavg"]}, "study.bad-claim", {"value": "prox beats fedavg"}),
        ({"claims": ["prox > prox on few"]}, "study.bad-claim", {"value": "prox > prox on few"}),
        ({"tune": {"runs": 2, "ranges": {"seed": "choice(7, 8)"}}}, "config.conflict", {"value": "seed"}),
        ({"tune": {"runs": 2, "ranges": {"data.seed": "choice(7, 8)"}}}, "config.conflict", {"value": "data.seed"}),
        (
            {"tune": {"runs": 2, "ranges": {"federation.rounds": "choice(1, 3)"}}},
            "config.conflict",
            {"key": "study.tune.ranges", "value": "federation.rounds"},
        ),
        ({"claims": ["prox > sgd"]}, "config.unknown-name", {"key": "study.claims", "name": "sgd"}),
        ({"claims": [{"prox > sgd": 1}]}, "config.unknown-name", {"key": "study.claims", "name": "sgd"}),
        ({"claims": ["prox > fedavg on fewest"]}, "config.unknown-name", {"key": "study.claims", "name": "fewest"}),
        ({"measure": "fewest"}, "config.unknown-name", {"key": "study.measure", "name": "fewest"}),
        *(
            ({"claims": [{"prox > fedavg": value}]}, "config.wrong-type", {"key": "study.claims"})
            for value in (float("nan"), 10**400, "large", True, [1])
        ),
        ({"claims": [["prox > fedavg"]]}, "config.wrong-type", {"key": "study.claims"}),
        ({"reference": "sgd"}, "config.unknown-name", {"key": "study.reference", "name": "sgd"}),
        ({"only": {"IF 20": ["prox"]}}, "config.unknown-name", {"key": "study.only", "name": "IF 20"}),
        ({"only": {"IF 10": ["sgd"]}}, "config.unknown-name", {"key": "study.only", "name": "sgd"}),
        ({"only": {"IF 10": []}}, "config.out-of-range", {"key": "study.only", "value": []}),
        ({"only": {"IF 10": ["prox", "prox"]}}, "config.out-of-range", {"key": "study.only", "cell": "IF 10"}),
        ({"measure": "matched", "at": "best"}, "config.conflict", {"key": "study.at", "measure": "matched"}),
        ({"arms": {"a b": "fedavg", "a-b": "fedprox"}}, "study.duplicate-name", {"names": ["a b", "a-b"]}),
        ({"arms": {"(..": "fedavg"}}, "study.bad-name", {"name": "(.."}),
        (
            {"cells": {"lr low": {"local.lr": 0.01}, "lr-low": {"local.lr": 0.1}}},
            "study.duplicate-name",
            {"names": ["lr low", "lr-low"]},
        ),
        (
            {"cells": {"alpha < 1": {"data.alpha": 0.5}, "alpha > 1": {"data.alpha": 2}}},
            "study.duplicate-name",
            {"folder": "alpha-1"},
        ),
        ({"cells": [{"local.steps": 2}, {"method.steps": 2}]}, "study.duplicate-name", {"name": "steps 2"}),
        ({"cells": {"data.imbalance": [10, 10.0]}}, "study.duplicate-name", {"name": "IF 10"}),
        ({"cells": {"..": {"local.epochs": 2}}}, "study.bad-name", {"name": ".."}),
        ({"cells": {".": {"local.epochs": 2}}}, "study.bad-name", {"name": "."}),
        ({"cells": {"<>": {"local.epochs": 2}, "x": {}}}, "study.bad-name", {"name": "<>"}),
        ({"cells": {"data.imbalance": []}}, "config.out-of-range", {"key": "study.cells"}),
        ({"base": {"data": "digits"}}, "config.wrong-type", {"key": "data", "value": "digits"}),
        ({"arms": {"a": {"method": None}}}, "config.wrong-type", {"key": "method", "value": None}),
        ({"arms": {"a": {"method": 5}}}, "config.wrong-type", {"key": "method", "value": 5}),
        (
            {"arms": {"a": {"local.lr.x": 1}}, "base": {"local": {"lr": 0.1}}},
            "config.wrong-type",
            {"key": "local.lr", "value": 0.1},
        ),
    ],
)
def test_a_study_that_cannot_be_run_or_compared_is_refused_before_anything_runs(change, code, details):
    with refused(code, ConfigError, **details) as caught:
        define(SMALL | change)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "setting"),
    [
        ({"arms": {}}, "study.arms"),
        ({"claims": [{"prox > fedavg": "much"}]}, "study.claims"),
        ({"seeds": 0}, "study.seeds"),
        ({"seeds": 10**20}, "study.seeds"),
        ({"seeds": [2**63]}, "study.seeds"),
        ({"name": "x" * 300}, "study.name"),
        ({"cells": {"data.alpha": list(range(1, 200)), "data.imbalance": list(range(1, 200))}}, "study.cells"),
        ({"seeds": [1, 1]}, "study.seeds"),
        ({"arms": {"x": {"method": {"name": "fedprox", "nu": 1}}}}, "arm 'x': method.nu"),
        ({"arms": {"x": "fedavgg"}}, "fedavgg"),
        ({"cells": {"data.imbalanc": [1]}}, "data.imbalanc"),
        ({"armes": {}}, "study.armes"),
        ({"name": "../x"}, "study.name"),
    ],
)
def test_a_setting_that_is_wrong_is_named(change, setting):
    with pytest.raises(ConfigError, match=re.escape(setting)) as caught:
        define(SMALL | change)
    assert "\n" not in str(caught.value)


def test_the_number_of_planned_runs_is_bounded_before_they_are_made(monkeypatch):
    monkeypatch.setattr(definition.Definition, "runs", lambda *_: pytest.fail("runs are planned"))
    cells = {"data.alpha": list(range(1, 51)), "data.imbalance": list(range(1, 51))}
    with refused("config.out-of-range", ConfigError, key="study", value=2 * 2500 * 10_000):
        define(SMALL | {"cells": cells, "seeds": 10_000})
    monkeypatch.setattr(definition, "MAX_RUNS", 6)
    with refused("config.out-of-range", ConfigError, key="study", value=8):
        define(SMALL)
    monkeypatch.undo()
    monkeypatch.setattr(definition, "MAX_RUNS", 6)
    assert len(define(SMALL | {"only": {"IF 10": ["prox"]}}).runs()) == 6


def test_a_file_gives_its_name_and_may_start_from_a_recipe(tmp_path):
    file = tmp_path / "aligner.yaml"
    file.write_text(
        "recipe: sfd/cifar10_if100_alpha0.05_k10.yaml\narms: {full: {}, plain: {method: {aligner: false}}}\n"
    )
    definition = read_definition(file)
    assert definition.name == "aligner"
    runs = definition.runs()
    assert [run.config.method["aligner"] for run in runs[:2]] == [True, False]
    assert {run.config.data.source for run in runs} == {"cifar10"}
    with pytest.raises(ConfigError, match=r"none\.yaml"):
        read_definition(tmp_path / "none.yaml")


@pytest.mark.slow
def test_the_studies_at_the_root_can_be_run():
    for file in (Path(__file__).parents[2] / "studies").glob("*.yaml"):
        assert read_definition(file).runs()


def test_resolved_fills_in_the_methods_fields():
    assert resolved({"method": "fedprox"}).method == {"name": "fedprox", "mu": 0.01}


def test_a_recipe_that_is_a_file_is_found_beside_the_study_from_anywhere(tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "mine.yaml").write_text("federation: {rounds: 7}")
    (tmp_path / "a" / "s.yaml").write_text("recipe: mine.yaml\narms: {fedavg: fedavg}\nseeds: 1")
    (tmp_path / "b").mkdir()
    monkeypatch.chdir(tmp_path / "b")
    study = Study.create(read_definition(Path("../a/s.yaml")), tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    assert Study.open(study.folder).planned[0].config.federation.rounds == 7


def test_a_recipe_is_read_once_for_all_runs(monkeypatch):
    read = []
    monkeypatch.setattr(definition, "read_recipe", lambda name: read.append(name) or read_recipe(name))
    made = define({"name": "two", "recipe": "demo", "arms": {"a": "fedavg", "b": "fedprox"}, "seeds": 3})
    read.clear()
    assert len(made.runs()) == 6
    assert read == ["demo"]


@pytest.mark.parametrize(
    ("part", "setting"),
    [
        ({"arms": {"a": "fedavg", "b": {"method": "fedavg", "seed": 3}}}, "seed"),
        ({"arms": {"a": {"method": "fedavg", "data": {"seed": 3}}}}, "data.seed"),
        ({"base": {"data.seed": 3}}, "data.seed"),
        ({"cells": {"seed": [3, 4]}}, "seed"),
    ],
)
def test_seeds_are_those_of_the_study_alone(part, setting):
    with refused("config.conflict", ConfigError, setting=setting, value=3):
        define({"name": "s", "arms": {"a": "fedavg"}} | part).check_new()


def test_a_round_is_chosen_on_validation_samples_only_where_they_are_held_out():
    tree = {"name": "s", "arms": {"a": "fedavg", "b": {"method": "fedavg", "data.validation": 0.1}}, "at": "validation"}
    with refused("config.conflict", ConfigError, key="study.at", arm="a"):
        define(tree).check_new()
    define(tree | {"base": {"data.validation": 0.2}}).check_new()


@pytest.mark.parametrize("second", ["a > b", "b > a", "a < b", "a > b on accuracy"])
def test_claims_with_the_same_test_are_refused(second):
    tree = {"name": "s", "arms": {"a": "fedavg", "b": "fedprox"}}
    with refused("study.bad-claim", ConfigError, key="study.claims"):
        define(tree | {"claims": ["a > b", second]})
    assert define(tree | {"claims": ["a > b", "a > b on few"]}).claims


@pytest.mark.parametrize("name", ["results.json", "study.yaml", "x" * 241])
def test_arms_and_cells_whose_folders_cannot_be_made_are_refused(name):
    tree = {"name": "s", "arms": {name: "fedavg"}}
    with refused("study.bad-name", ConfigError, key="study.arms", name=name):
        define(tree)
    with refused("study.bad-name", ConfigError, key="study.cells", name=name):
        define({"name": "s", "arms": {"a": "fedavg"}, "cells": {name: {"data.imbalance": 10}}})


def test_truth_values_are_no_seeds():
    with pytest.raises(ConfigError, match="not true or false"):
        define({"name": "s", "arms": {"a": "fedavg"}, "seeds": [True, False]})


def test_a_kind_of_value_is_named_once():
    with pytest.raises(ConfigError, match=r"Give a mapping or a list\."):
        define({"name": "s", "arms": {"a": "fedavg"}, "cells": 3})
