"""Every default and constant of every method, and what each preset sets, against a second list of these values.

A value that only a paper's text or its authors' code states is pinned by no equation: a changed one would alter results
and no other test. Change defaults.yaml together with the source that the field's text names.
"""

import ast
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from raylt import methods
from raylt.methods import METHODS

FOLDER = Path(methods.__file__).parent
VALUES = yaml.safe_load(Path(__file__).with_name("defaults.yaml").read_text())


def presets(name: str) -> dict[str, dict[str, Any]]:
    """Return the fields that differ from the defaults, by preset."""
    kind = METHODS[name]
    if "preset" not in kind.model_fields:
        return {}
    default = kind().model_dump(mode="json")
    changed = {
        preset: {
            field: value
            for field, value in kind(preset=preset).model_dump(mode="json").items()
            if value != default[field] and field != "preset"
        }
        for preset in get_args(kind.model_fields["preset"].annotation)
    }
    return {preset: fields for preset, fields in changed.items() if fields}


@pytest.mark.parametrize("name", METHODS)
def test_defaults_are_those_of_the_list(name):
    assert METHODS[name]().model_dump(mode="json") == VALUES["defaults"][name]


@pytest.mark.parametrize("name", METHODS)
def test_presets_are_those_of_the_list(name):
    assert presets(name) == VALUES["presets"].get(name, {})


def constants() -> dict[str, dict[str, float]]:
    """Return the numbers that modules of the methods assign to names in capitals, by module."""
    found: dict[str, dict[str, float]] = {}
    for path in sorted(FOLDER.rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if not isinstance(node, ast.Assign):
                continue
            names = [name.id for name in ast.walk(node.targets[0]) if isinstance(name, ast.Name)]
            try:
                value = ast.literal_eval(node.value)
            except ValueError:
                continue
            values = value if isinstance(value, tuple) else (value,)
            if all(name.isupper() for name in names) and all(isinstance(each, int | float) for each in values):
                place = ".".join(path.relative_to(FOLDER).with_suffix("").parts)
                found.setdefault(place, {}).update(zip(names, values, strict=True))
    return found


def test_constants_are_those_of_the_list():
    assert constants() == VALUES["constants"]


def test_the_list_has_every_method_and_no_other():
    assert VALUES["defaults"].keys() == METHODS.keys()
    assert VALUES["presets"].keys() <= METHODS.keys()
