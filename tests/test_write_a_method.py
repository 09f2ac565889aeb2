"""docs/write-a-method.md: its blocks up to "Bring it in" are a file, my_method.py; those after it use that file."""

import ast
from pathlib import Path

import pytest
import tiny

from raylt.registry import TABLES, load_plugin

PAGE = Path(__file__).parents[1] / "docs" / "write-a-method.md"
NAMES = ("mine", "mine_means", "mine_memory", "mine_own", "mine_tuned", "mine_nearest", "mine_momentum")


def blocks(text: str) -> str:
    """The Python blocks of a page as one source whose lines have the numbers that they have in the page."""
    inside, source = False, []
    for line in text.splitlines():
        if line.startswith("```"):
            inside, line = line == "```python", ""
        source.append(line if inside else "")
    return "\n".join(source)


WRITTEN, _, USED = PAGE.read_text().partition("\n## Bring it in\n")


@pytest.fixture
def my_method(tmp_path, monkeypatch):
    """The page's file; the names of its methods are forgotten after the test."""
    monkeypatch.setitem(TABLES, "method", TABLES["method"])
    for name in NAMES:
        monkeypatch.delitem(TABLES["method"], name, raising=False)
    file = tmp_path / "my_method.py"
    file.write_text(blocks(WRITTEN))
    return file


def test_the_file_brings_its_methods(my_method):
    assert [guest.name for guest in load_plugin(my_method)] == list(NAMES)
