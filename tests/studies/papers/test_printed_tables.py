import re
from collections import Counter

import pytest

from raylt.config import load, recipes
from raylt.config.reading import FOLDER as RECIPES
from raylt.methods import METHODS
from raylt.studies.papers.printed_tables import base_of, expectations, identity
from raylt.studies.settings import resolved


def test_every_printed_cell_is_there_with_its_source():
    assert len(expectations()) == 640
    assert Counter(e.paper for e in expectations()) == {"SFD": 180, "FedSM": 198, "MuPFL": 200, "BPFed": 62}
    assert all(0 < e.value < 1 and e.table for e in expectations())
    assert sum(bool(e.note) for e in expectations()) == 236
    assert max(e.std for e in expectations() if e.std is not None) == pytest.approx(0.055)


@pytest.mark.slow
def test_a_cell_is_run_or_says_why_not():
    for each in expectations():
        assert (each.problem is None) == (each.recipe in recipes()) or each.problem is not None
        if each.problem is None:
            assert each.config().method["name"] in METHODS


def test_methods_of_the_four_papers_have_no_gap():
    ours = ("SFD", "FedSM", "MuPFL", "BPFed")
    missing = {e.method for e in expectations() if e.problem and e.method.startswith(ours)}
    assert missing == set()


def headers():
    """Yield (recipe, method, printed percent, overrides) of every command in the first lines of recipes."""
    for path in sorted(RECIPES.rglob("*.yaml")):
        for line in path.read_text().splitlines():
            if match := re.match(r"#   (\S+) +(\d+\.\d\d?)   raylt run (\S+) ?(.*)$", line):
                yield path, match[1], float(match[2]), match[4].split()


@pytest.mark.slow
@pytest.mark.parametrize("paper", ["sfd", "fedsm", "mupfl", "bpfed"])
def test_the_commands_in_the_recipes_are_the_cells_and_their_figures(paper):
    printed = [
        e
        for e in expectations()
        if e.problem is None
        and e.paper.lower() == paper
        and e.measure in ("accuracy", "matched", "owned", "global_miou")
    ]
    # one figure of Table III's probabilistic column is not in Table V (see its note)
    printed = [e for e in printed if not (e.table == "III (IoT-J)" and round(100 * e.value, 2) == 36.7)]
    cells = {(e.identity(), e.config().federation.rounds, round(100 * e.value, 2)): e for e in printed}
    commands = set()
    for path, _, value, overrides in headers():
        if path.parent.name == paper or (paper == "mupfl" and path.name.startswith("cityscapes")):
            config = resolved(load(path, overrides).model_dump())
            commands.add((identity(config.model_dump(mode="json")), config.federation.rounds, value))
    assert commands <= cells.keys()
    named = {"sfd": ("fedavg", "fedprox", "sfd"), "fedsm": ("fedavg", "fedprox", "fedsm")}.get(paper, METHODS)
    others = {cells[key].table for key in cells.keys() - commands if METHOD_OF[key[0]] in named}
    assert others == set()


METHOD_OF = {e.identity(): e.config().method["name"] for e in expectations() if e.problem is None}


def test_headings_of_mupfls_table_2_are_swapped_back_and_say_so():
    two = [e for e in expectations() if (e.paper, e.table) == ("MuPFL", "2")]
    value = {(e.method, e.setting["dataset"], e.setting["IF"], e.setting["alpha"]): e.value for e in two}
    # printed under the heading IF 10
    assert value["FedAvg", "cifar10", "100", "0.5"] == pytest.approx(0.4041)
    assert all("most probably swapped" in e.note for e in two)
    full = {e.table: e for e in expectations() if e.paper == "MuPFL" and e.method == "MuPFL[BAVD+ACMU+PKCF]"}["6"]
    headline = next(e for e in two if e.identity() == full.identity() and e.method == "MuPFL")
    assert (full.setting["IF"], headline.value) == ("10", full.value)
    five = [e for e in expectations() if (e.paper, e.table) == ("MuPFL", "5")]
    assert {e.setting["IF"] for e in five} == {"100"}


def test_generic_classifiers_are_compared_with_fedavg():
    """Their accuracy has another name than FedAvg's, which has one classifier."""
    generic = [e for e in expectations() if e.method in ("FedRoD", "FedLoGe") and e.paper == "SFD" and not e.problem]
    assert len(generic) == 28
    assert all((base := base_of(e)) is not None and base.method == "FedAvg" for e in generic)
    assert {base_of(e).setting["alpha"] == e.setting["alpha"] for e in generic} == {True}


def test_a_row_that_fixes_a_parameter_of_the_method_is_an_ablation():
    for letter in ("lambda", "clusters"):
        cells = [e for e in expectations() if e.setting.get(letter, "").replace(".", "").isdecimal() and not e.problem]
        assert cells
        assert all(e.ablation for e in cells if not e.method.startswith("FedAvg"))


def test_baselines_of_fedsm_on_imagenet_have_its_network_without_the_projection():
    cells = [e for e in expectations() if (e.paper, e.setting["dataset"], e.problem) == ("FedSM", "imagenet_lt", None)]
    assert {e.config().model for e in cells if e.method in ("FedAvg", "FedProx", "CReFF")} == {"resnet50"}


def test_fedavg_is_no_ablation():
    assert not any(e.ablation for e in expectations() if e.method.startswith("FedAvg"))


def test_cityscapes_has_the_papers_rounds():
    cells = [e for e in expectations() if e.setting["dataset"] == "cityscapes" and e.problem is None]
    assert {e.config().federation.rounds for e in cells} == {10_000}


def test_cityscapes_is_judged_by_the_global_model():
    cells = {(e.table, e.measure) for e in expectations() if e.setting["dataset"] == "cityscapes"}
    assert cells == {(table, measure) for table in ("3", "4") for measure in ("global_miou", "global_accuracy")}


def test_identity_ignores_seed_rounds_precision_and_place_and_nothing_else():
    config = expectations()[0].config().model_dump(mode="json") if expectations()[0].problem is None else {}
    same = {
        **config,
        "seed": 7,
        "data": {**config["data"], "seed": 7, "root": "/x", "download": True, "split": "split.json"},
        "federation": {**config["federation"], "rounds": 3},
        "local": {**config["local"], "precision": "tf32"},
        "evaluation": {**config["evaluation"], "every": 10},
        "resources": {},
    }
    assert identity(same) == identity(config)
    assert identity({**config, "local": {**config["local"], "lr": 0.02}}) != identity(config)


def test_generic_classifiers_are_what_tables_of_global_models_are_of():
    measures = {
        (cell.paper, cell.method, cell.measure) for cell in expectations() if cell.method in ("FedRoD", "FedLoGe")
    }
    assert {measure for paper, _, measure in measures if paper == "SFD"} == {"global_accuracy"}


def test_clip2fl_keeps_the_projection_of_the_recipe_that_other_baselines_have_not():
    models = {
        cell.method: cell.config().model
        for cell in expectations()
        if cell.paper == "FedSM"
        and cell.method in ("CLIP2FL", "CReFF", "RUCR")
        and cell.setting["dataset"] == "cifar10"
    }
    assert models == {"CLIP2FL": "resnet8_proj", "CReFF": "resnet8", "RUCR": "resnet8"}
