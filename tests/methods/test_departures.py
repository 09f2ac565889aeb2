"""Departures of the four papers' methods from the text, which their docstrings number and the code marks."""

import ast
import re
from pathlib import Path

import pytest

METHODS = Path(__file__).parents[2] / "raylt" / "methods"


@pytest.mark.parametrize("paper", ["sfd", "fedsm", "mupfl", "bpfed"])
def test_each_departure_is_marked_at_its_line(paper):
    text = (METHODS / paper / "method.py").read_text()
    docstring = ast.get_docstring(ast.parse(text), clean=False)
    numbers = re.findall(r"^\[(\d+)\]", docstring, re.MULTILINE)
    code = "".join(file.read_text() for file in sorted((METHODS / paper).glob("*.py"))).replace(docstring, "")
    assert len(numbers) > 3
    assert [number for number in numbers if f"[{number}]" not in code] == []
