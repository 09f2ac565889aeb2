"""Every default of every method, and what each preset sets, against a second list of these values.

A value that only a paper's text or its authors' code states is pinned by no equation: a changed one would alter results
and no other test. Change defaults.yaml together with the source that the field's text names.
"""

from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from raylt.methods import METHODS

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


def test_the_list_has_every_method_and_no_other():
    assert VALUES["defaults"].keys() == METHODS.keys()
    assert VALUES["presets"].keys() <= METHODS.keys()
