import re
from pathlib import Path

import pytest

import raylt
from raylt.config import load
from raylt.methods import make_method
from raylt.models import MODELS
from raylt.studies.definition import read_definition

FOLDER = Path(raylt.__path__[0]) / "recipes"
RECIPES = sorted(FOLDER.rglob("*.yaml"))
NAMES = [str(path.relative_to(FOLDER)) for path in RECIPES]


def test_every_cell_of_sfds_tables_1_and_4_has_a_recipe():
    # 10 cells in Table 1 and 8 in Table 4, of which 2 are in both
    assert sum(name.startswith("sfd/") for name in NAMES) == 16


def test_every_cell_of_bpfeds_tables_2_to_4_has_a_recipe():
    files = {path.name: path.read_text() for path in RECIPES if path.parent.name == "bpfed"}
    assert set(files) == {
        f"{data}_if{imbalance}_alpha{alpha}_k20.yaml"
        for data in ("cifar10", "cifar100")
        for imbalance in (50, 100)
        for alpha in (0.5, 0.2)
    }
    runs = [line for text in files.values() for line in text.splitlines() if line.startswith("#   ")]
    assert len(runs) == 8 * 7 + 5 + 1  # Tables 2 and 3; Table 4; alpha = 0 in the text


def test_every_cell_of_mupfls_tables_2_5_and_6_that_a_method_here_has_is_in_a_recipe():
    files = {path.name: path.read_text() for path in RECIPES if path.parent.name == "mupfl"}
    assert set(files) == {
        f"{data}_if{imbalance}_alpha{alpha}_k{clients}.yaml"
        for data, clients in (("fashion_mnist", 50), ("cifar10", 50), ("cifar100", 19))
        for imbalance in (10, 100)
        for alpha in (0.5, 1.0)
    }
    runs = [line for text in files.values() for line in text.splitlines() if line.startswith("#   ")]
    assert len(runs) == 12 * 7 + 6 * 5 + 3 * 6  # Table 2: seven methods; Table 5: fixed kappa; Table 6: subsets


def test_every_cell_of_fedsms_tables_that_a_method_here_has_is_in_a_recipe():
    files = {path.name: path.read_text() for path in RECIPES if path.parent.name == "fedsm"}
    cells = {
        f"{data}_if{imbalance}_alpha0.5_k20.yaml" for data in ("cifar10", "cifar100") for imbalance in (100, 50, 10)
    }
    assert set(files) == cells | {"imagenet_lt_alpha0.1_k20.yaml"}
    runs = [line for text in files.values() for line in text.splitlines() if line.startswith("#   ")]
    # Table I; Table V; Table III without the column that Table V has, with additions from AAAI's Table 3; Table IV;
    # Table II
    assert len(runs) == 6 * 4 + 6 * 5 + 2 * 2 * (5 + 1) + 3 + 4


def test_every_cell_of_mupfls_tables_3_and_4_that_a_method_here_has_is_in_a_recipe():
    files = {path.name: path.read_text() for path in RECIPES if path.parent.name == "segmentation"}
    assert {name for name in files if name.startswith("cityscapes")} == {
        "cityscapes_if100_beta1.yaml",
        *(f"cityscapes_if10_beta{beta}.yaml" for beta in (1, 2, 3)),
    }
    runs = [
        line
        for name, text in files.items()
        if name.startswith("cityscapes")
        for line in text.splitlines()
        if line.startswith("#   ")
    ]
    assert len(runs) == 2 * 6 + 3 * 4  # Table 3: all methods but CReFF; Table 4: local epochs
    assert "shapes.yaml" in files  # this recipe needs no data


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted((Path(raylt.__path__[0]).parent / "studies").glob("*.yaml")), ids=str)
def test_arms_of_the_studies_are_what_their_methods_take(path):
    arms = {}
    for planned in read_definition(path).runs():
        # an arm may have settings besides its method, such as all data at one client
        others = planned.config.model_dump_json(exclude={"method"})
        method = make_method(planned.config.method).model_dump_json()
        arms.setdefault((planned.cell, planned.seed), []).append((planned.config.method["name"], method, others))
    assert arms
    for settings in arms.values():
        assert len(set(settings)) == len(settings)  # no two arms are equal by mistake


@pytest.mark.parametrize("path", RECIPES, ids=NAMES)
def test_recipe_loads_and_its_method_builds(path):
    config = load(path)
    make_method(config.method)
    assert config.model in MODELS


def test_protocols_are_those_of_the_field():
    def settings(name):
        config = load(FOLDER / "protocols" / f"{name}_cifar10_if100.yaml")
        return (
            config.data.clients,
            config.federation.participation,
            config.federation.rounds,
            config.local.epochs,
            config.local.batch,
            config.local.lr,
            config.data.alpha,
            config.model,
        )

    assert settings("p1") == (20, 0.4, 200, 10, 32, 0.1, 0.5, "resnet8")
    assert settings("p2") == (40, 0.2, 500, 5, 8, 0.03, 0.5, "resnet18")
    assert settings("p3") == (100, 0.2, 2000, 2, 32, 0.1, 0.1, "resnet32")


# the paper of this protocol does not say which printed figure belongs to it
WITHOUT_FIGURE = "protocols/p3_cifar10_if100.yaml"


@pytest.mark.parametrize(
    "path",
    [path for path in RECIPES if path != FOLDER / WITHOUT_FIGURE],
    ids=[name for name in NAMES if name != WITHOUT_FIGURE],
)
def test_header_gives_command_figure_and_time_and_its_commands_load(path):
    header = [line for line in path.read_text().splitlines() if line.startswith("#")]
    cells = [match for line in header if (match := re.match(r"#   (\S+) +(\d+\.\d\d?)   raylt run (\S+) ?(.*)$", line))]
    assert cells
    assert any(line.startswith("# Time: ") for line in header)
    for cell in cells:
        method, figure, file, overrides = cell.groups()
        assert file == f"raylt/recipes/{path.relative_to(FOLDER)}"
        assert 0 < float(figure) < 100
        assert make_method(load(path, overrides.split()).method).name == method.lower()
