"""Recipes agree with tests/recipes/papers.yaml: settings in the papers' texts and figures in their tables."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import raylt
from raylt.config import Config, load
from raylt.methods import make_method

FOLDER = Path(raylt.__path__[0]) / "recipes"
PAPERS = yaml.safe_load((Path(__file__).parent / "papers.yaml").read_text())
# recipes without a paper's table: small data of our own choice, and protocols that several papers share
OURS = (
    "mupfl/segmentation/shapes.yaml",
    "mupfl/segmentation/camvid_beta1.yaml",
    "ground/fashion_mnist_if100_alpha0.5_k20.yaml",
)
RECIPES = {
    name: path
    for path in sorted(FOLDER.rglob("*.yaml"))
    if (name := str(path.relative_to(FOLDER))) not in OURS and path.parent not in (FOLDER, FOLDER / "protocols")
}
OF_A_CELL = ("source", "imbalance", "alpha", "beta", "clients")  # settings in the key of a cell, see `cell`
every_recipe = pytest.mark.parametrize("name", RECIPES)


def cell(name: str) -> tuple[str, Config]:
    """Return the key of a recipe's cell in the papers' tables, and its config."""
    config = load(RECIPES[name])
    data, paper = config.data, name.partition("/")[0]
    if data.source == "cityscapes":
        return f"{paper} {data.source} {data.imbalance:g} beta{data.beta}", config
    imbalance = None if data.source == "imagenet_lt" else f"{data.imbalance:g}"
    return f"{paper} {data.source} {imbalance} {data.alpha} {data.clients}", config


def value(config: Config, key: str):
    section, _, field = key.partition(".")
    if section == "method":
        return getattr(make_method(config.method), field)
    part = getattr(config, section)
    return getattr(part, field) if field else part


def stated(place: str, config: Config, origin: str) -> dict[str, Any]:
    """Return the settings that apply to a recipe, by dotted key."""
    words = {*place.split(), f"k{config.data.clients}"}
    settings: dict[str, Any] = {}
    for key, each in PAPERS[origin].items():
        if set(key.split()) <= words:
            settings |= each
    return settings


@every_recipe
@pytest.mark.parametrize("origin", ["protocols", "choices"])
def test_settings_are_those_that_the_paper_states_or_leaves_to_its_code(name, origin):
    place, config = cell(name)
    expected = stated(place, config, origin)
    assert expected
    assert {key: value(config, key) for key in expected} == expected


def flat(tree: dict[str, Any], start: str = "") -> dict[str, Any]:
    """Return the settings of a recipe by their dotted keys."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        leaves |= flat(value, f"{start}{key}.") if isinstance(value, dict) else {f"{start}{key}": value}
    return leaves


@every_recipe
def test_a_recipe_sets_nothing_but_what_is_stated_and_its_cell(name):
    place, config = cell(name)
    known = stated(place, config, "protocols") | stated(place, config, "choices")
    own = flat(yaml.safe_load(RECIPES[name].read_text()))
    assert own.keys() - known.keys() <= {f"data.{key}" for key in OF_A_CELL} | {"method.name"}
    assert own["method.name"] == place.split()[0]


def test_settings_of_recipes_without_a_table_are_those_of_the_list():
    others = {name: yaml.safe_load((FOLDER / name).read_text()) for name in PAPERS["ours"]}
    assert others == PAPERS["ours"]
    assert others.keys() | RECIPES.keys() == {str(path.relative_to(FOLDER)) for path in FOLDER.rglob("*.yaml")}


@every_recipe
def test_figures_are_those_that_the_paper_prints(name):
    place, _ = cell(name)
    rows = PAPERS["figures"][place]
    for line in RECIPES[name].read_text().splitlines():
        if found := re.match(r"#   (\S+) +(\d+\.\d\d?)   raylt run \S+ ?(.*)$", line):
            changed = [word for word in found[3].split() if not word.startswith(("model=", "method.mu="))]
            assert float(found[2]) == rows[" ".join(changed)], line


def test_every_cell_of_the_papers_has_a_recipe():
    assert {cell(name)[0] for name in RECIPES} == set(PAPERS["figures"])
