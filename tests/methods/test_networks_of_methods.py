"""The network that every method trains with its defaults, and a second list of its own parts.

A layer of its own changes what a method computes, but a test that builds both of its sides with the method does not see
it. Change networks.yaml together with `build`.
"""

from pathlib import Path

import pytest
import yaml
from tiny import configure, make_setup

from raylt.methods import METHODS

BUILT = yaml.safe_load(Path(__file__).with_name("networks.yaml").read_text())


def entries(task, name: str) -> dict[str, list[int]]:
    """Return the shapes of the entries of a method's network, by name.

    The encoder's own layers have the same names if a method appends layers to it.
    """
    model = make_setup(configure(), METHODS[name]()).new_model(task.spec)
    return {
        entry.replace("encoder.base.", "encoder."): list(value.shape) for entry, value in model.state_dict().items()
    }


@pytest.mark.parametrize("name", [name for name in METHODS if name != "promptfl"])
def test_entries_that_a_method_adds_or_leaves_out_are_those_of_the_list(tiny_task, name):
    plain, own = entries(tiny_task, "fedavg"), entries(tiny_task, name)
    different = {
        "adds": {entry: shape for entry, shape in own.items() if plain.get(entry) != shape},
        "leaves_out": sorted(plain.keys() - own.keys()),
    }
    assert {key: value for key, value in different.items() if value} == BUILT.get(name, {})


def test_the_list_has_only_methods():
    assert BUILT.keys() <= METHODS.keys()
