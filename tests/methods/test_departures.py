"""Departures of the methods from their papers and code, which docstrings number and the code marks."""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

METHODS = Path(__file__).parents[2] / "raylt" / "methods"


def docstring_of(file):
    return ast.get_docstring(ast.parse(file.read_text()), clean=False) or ""


def departures(file):
    return re.findall(r"^\[(\d+)\]", docstring_of(file), re.MULTILINE)


FILES = [file for file in sorted(METHODS.rglob("*.py")) if departures(file)]


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(METHODS)))
def test_each_departure_is_marked_at_its_line(file):
    files = sorted(file.parent.glob("*.py")) if file.name == "method.py" else [file]
    code = "".join(each.read_text() for each in files).replace(docstring_of(file), "")
    tokens = tokenize.generate_tokens(io.StringIO(code).readline)
    prose = " ".join(token.string for token in tokens if token.type in (tokenize.COMMENT, tokenize.STRING))
    assert [number for number in departures(file) if f"[{number}]" not in prose] == []


@pytest.mark.parametrize("paper", ["sfd", "fedsm", "mupfl", "bpfed"])
def test_the_methods_of_the_four_papers_number_their_departures(paper):
    assert len(departures(METHODS / paper / "method.py")) > 3
