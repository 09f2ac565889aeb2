"""Every promise in SECURITY.md names tests that exist."""

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"`((?:tests/[\w/]+\.py)?)::(\w+)`")
ROWS = [
    line
    for line in (ROOT / "SECURITY.md").read_text().splitlines()
    if line.startswith("|") and not line.startswith("|---")
]


@cache
def names_in(file: str) -> set[str]:
    tree = ast.parse((ROOT / file).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def promises():
    """Return each promise of the tables with the files and names of the tests in its last column."""
    found = []
    for row in ROWS:
        *_, promise, tests, _ = re.split(r"(?<!\\)\|", row)
        if "::" in tests:
            found.append((promise.strip(), NAMED.findall(tests)))
    return found


def test_every_promise_names_tests_that_exist():
    assert len(promises()) >= 25
    missing = []
    for promise, named in promises():
        assert named, promise
        file = ""
        for given, name in named:
            file = given or file
            if name not in names_in(file):
                missing.append(f"{promise}: {file}::{name}")
    assert missing == []


def test_no_table_of_promises_has_a_row_without_a_test():
    text = (ROOT / "SECURITY.md").read_text()
    tables = re.findall(r"\| promise \| kept by \|\n\|---\|---\|\n((?:\|.*\n)+)", text)
    assert len(tables) == 5
    assert [row for table in tables for row in table.splitlines() if not NAMED.search(row)] == []
