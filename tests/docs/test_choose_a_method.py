"""The table of docs/choose-a-method.md names the fields that methods have."""

import re
from pathlib import Path

import pytest

from raylt.methods import METHODS

PAGE = Path(__file__).parents[2] / "docs" / "choose-a-method.md"
ROWS = {
    row[0]: row
    for line in PAGE.read_text().splitlines()
    if (row := [cell.strip().strip("`") for cell in line.split("|")[1:-1]]) and row[0] in METHODS and len(row) == 5
}


def test_every_method_has_a_row():
    assert ROWS.keys() == METHODS.keys()


@pytest.mark.parametrize("name", METHODS)
def test_fields_are_those_of_the_method(name):
    """A long list is cut, and says how many there are."""
    fields = list(METHODS[name].model_fields)
    text = ROWS[name][2]
    named = re.findall(r"\w+", text.partition("...")[0])
    assert set(named) <= set(fields)
    assert (re.search(r"\((\d+)\)", text) or [0, str(len(named))])[1] == str(len(fields))
