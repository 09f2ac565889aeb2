"""Every error that raylt raises on purpose has a code, and the table of codes lists each code once."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from raylt import errors
from raylt.errors import CODES, DataError, RayltError, as_cause, first_names, without_remedy

ROOT = Path(__file__).parents[1]
# the constructors of these classes set the code
OWN = {"ClientError", "ClientLost", "LateWrite", "ServerLost", "DiskFull"}
NAMES = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, RayltError)} - OWN


def sources() -> Iterator[tuple[Path, ast.Module]]:
    for package in ("raylt", "actors", "tune"):
        for file in sorted((ROOT / package).rglob("*.py")):
            yield file, ast.parse(file.read_text())


def test_every_error_is_raised_with_a_code():
    without = [
        f"{file.relative_to(ROOT)}:{node.lineno}"
        for file, tree in sources()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and getattr(node.func, "id", None) in NAMES
        and not any(keyword.arg in ("code", None) for keyword in node.keywords)
    ]
    assert without == []


def test_every_code_is_in_the_table_and_every_row_is_used():
    texts = {
        node.value
        for file, tree in sources()
        if file.name != "errors.py"
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    own = set(re.findall(r'code(?:: str)?\s*=\s*"([a-z.-]+)"', (ROOT / "raylt/errors.py").read_text()))
    used = {
        keyword.value.value
        for _, tree in sources()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        for keyword in node.keywords
        if keyword.arg == "code" and isinstance(keyword.value, ast.Constant)
    }
    assert used - CODES.keys() == set()
    assert CODES.keys() - texts - own == set()


def test_the_table_is_sorted_and_its_sentences_are_short():
    assert list(CODES) == sorted(CODES)
    for code, sentence in CODES.items():
        assert re.fullmatch(r"[a-z]+\.[a-z-]+", code), code
        assert sentence.endswith("."), code
        assert len(sentence.split()) <= 25, code


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (ValueError("no file.\nGive one."), "no file. Give one"),
        (DataError("f: no such file. Check the path.", code="data.not-found"), "f: no such file"),
        (OSError("offline. " + "Connect again. " * 20), "offline"),
        (RuntimeError("x" * 300), "x" * 197 + "..."),
        (KeyError(), "KeyError"),
    ],
)
def test_a_cause_has_no_remedy_of_its_own_and_does_not_end_in_a_sentence(error, cause):
    assert as_cause(error) == cause


def test_of_many_names_the_first_are_listed():
    assert first_names(["a", "b"], 2) == "a, b"
    assert first_names(["a", "b", "c"], 2) == "a, b, .."
    assert first_names([str(number) for number in range(11)]) == "0, 1, 2, 3, 4, 5, 6, 7, 8, 9, .."


@pytest.mark.parametrize(
    ("error", "problem"),
    [
        (DataError("f: no such file. Check the path.", code="data.not-found"), "f: no such file"),
        (DataError("f: no such file.", code="data.not-found"), "f: no such file"),
        (ValueError("bad header. Byte 3 is 0."), "bad header. Byte 3 is 0"),
    ],
)
def test_only_raylts_own_errors_end_with_a_remedy_to_leave_out(error, problem):
    assert without_remedy(error) == problem
