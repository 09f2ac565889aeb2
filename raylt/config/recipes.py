"""The configurations that come with raylt: YAML files under raylt/recipes, named by their path there."""

import difflib
from pathlib import Path

from raylt.errors import ConfigError

FOLDER = Path(__file__).parents[1] / "recipes"
DEMO = "demo"           # what `raylt run` does when nothing is named


def recipes() -> dict[str, str]:
    """What each recipe is, in one line, by its name: sfd/cifar10_if100_alpha0.05_k10."""
    return {str(file.relative_to(FOLDER).with_suffix("")): file.read_text().partition("\n")[0].lstrip("# ")
            for file in sorted(FOLDER.rglob("*.yaml"))}


def recipe(name: str) -> Path:
    """The file of a recipe.

    Raises:
        ConfigError: there is none of this name.
    """
    known = recipes()
    name = name.removesuffix(".yaml")
    if name not in known:
        close = difflib.get_close_matches(name, known, 1)
        hint = f"; did you mean recipe:{close[0]}?" if close else ";"
        raise ConfigError(f"recipe:{name}: no such recipe{hint} raylt recipes lists them")
    return FOLDER / f"{name}.yaml"
