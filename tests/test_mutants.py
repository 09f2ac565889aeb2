"""Mutants find their code in any layout, and the tests notice a sample of them."""

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "mutants"
SPEC = importlib.util.spec_from_file_location("mutants_rewrite", FOLDER / "rewrite.py")
assert SPEC is not None
assert SPEC.loader is not None
rewrite = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(rewrite)

SOURCE = """\
class Loss:
    def of(self, x, y):
        # é: positions count bytes
        total = (scale('sum',
                       x + y))          # a comment
        if x:
            y = 1
        elif y:
            y = 2
        return total

    def other(self, x, y):
        return x + y
"""


def replaced(function, old, new):
    return ast.unparse(ast.parse(rewrite.replace(SOURCE, function, old, new)))


def test_layout_quotes_and_comments_do_not_matter():
    assert "total = scale('sum', x - y)" in replaced("Loss.of", "(x\n + y)", "x - y")
    assert "total = x * y\n" in replaced("Loss.of", 'scale("sum", x + y,)', "x * y")


def test_statements_keep_their_depth():
    new = replaced("Loss.of", 'total = scale("sum", x + y)', "total = x\nif y:\n    total = y")
    assert "        total = x\n        if y:\n            total = y\n        if x:" in new


@pytest.mark.parametrize(
    ("function", "old", "new", "times"),
    [
        ("Loss", "x + y", "x", 2),
        ("", "x + y", "x", 2),
        ("Loss.none", "x + y", "x", 0),
        ("Loss.other", "y + x", "x", 0),
        ("Loss.of", "x + y", "pass", 0),
        ("Loss.of", "if y:\n    y = 2", "pass", 0),
    ],
)
def test_code_that_does_not_occur_once_is_refused(function, old, new, times):
    with pytest.raises(rewrite.NotFoundOnce, match=f"occurs {times} times"):
        rewrite.replace(SOURCE, function, old, new)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "sfd.labels",
        *(pytest.param(name, marks=pytest.mark.soak) for name in ("fedsm.order", "mupfl.start", "bpfed.restart")),
    ],
)
def test_a_mutant_is_noticed(name):
    done = subprocess.run([sys.executable, FOLDER / "run.py", name], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert f"{name}: noticed\n" in done.stdout


@pytest.mark.slow
def test_a_word_that_names_no_mutant_is_refused_in_a_line():
    done = subprocess.run([sys.executable, FOLDER / "run.py", "nonsense"], capture_output=True, text=True, timeout=100)
    assert done.returncode == 2
    assert done.stderr.startswith("no mutant has 'nonsense' in its name")
    assert done.stderr.count("\n") == 1
