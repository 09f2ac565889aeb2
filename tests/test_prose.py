"""Rules for prose and names that a test can check: docstrings, comments, help texts, errors and variables."""

import ast
import inspect
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer

import raylt.errors
from raylt.cli.main import app
from raylt.config import settings
from raylt.errors import CODES
from raylt.methods import METHODS

ROOT = Path(__file__).parents[1]
PACKAGES = ("raylt", "actors", "tune")
LONGEST = 25  # words of a sentence
QUESTION = re.compile(r"(What|Of|Whose|How|Whether|Who)\b")
HEADLESS = re.compile(r"(of|what|whose|how|when|whether|with)\b", re.IGNORECASE)
NAMES = {"told", "said", "found", "its", "mine", "theirs", "held", "here", "known", "whose"}
NAMES_IN_TESTS = {"told", "said", "its", "mine", "here", "there"}
PHRASES = (
    "Nobody here can be",
    "does late again",
    "is not believed",
    "came to nothing",
    "truths",
    "holds what",
    "anew",
    "goes on",
    "so many",
    "of which there",
    "stands beside",
    "nobody",
    "whoever",
)
BANNED = re.compile(rf"\b({'|'.join(PHRASES)})\b", re.IGNORECASE)
OWN_ERRORS = {
    name
    for name, value in vars(raylt.errors).items()
    if isinstance(value, type) and issubclass(value, raylt.errors.RayltError)
} - {"ServerLost"}  # the code that catches it appends to its text
ERRORS = re.compile(r"(Error|UnknownMethod|BudgetSpent|Overflow|TooFewReplies|ServerLost|FolderHeld)$")


@cache
def sources() -> dict[str, ast.Module]:
    """Return the syntax tree of every module by its path from the root."""
    return {
        file.relative_to(ROOT).as_posix(): ast.parse(file.read_text())
        for package in PACKAGES
        for file in sorted((ROOT / package).rglob("*.py"))
    }


def nodes() -> Iterator[tuple[str, Any]]:
    for file, tree in sources().items():
        yield from ((file, node) for node in ast.walk(tree))


def docstrings() -> Iterator[tuple[str, str]]:
    """Yield every docstring with its place."""
    for file, tree in sources().items():
        yield from docstrings_in(file, tree)


def docstrings_in(file: str, tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield f"{file}:{getattr(node, 'lineno', 1)}", text


def comments_in(file: str, source: str) -> Iterator[tuple[str, str]]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield f"{file}:{token.start[0]}", token.string


@cache
def prose_of_tests() -> tuple[tuple[str, str], ...]:
    """Return the docstrings and comments of tests, and the comments of mutants and studies, with their places."""
    return tuple(_prose_of_tests())


def _prose_of_tests() -> Iterator[tuple[str, str]]:
    for path in sorted((ROOT / "tests").rglob("*.py")):
        file, source = path.relative_to(ROOT).as_posix(), path.read_text()
        yield from docstrings_in(file, ast.parse(source))
        yield from comments_in(file, source)
    for path in sorted([*(ROOT / "tests").rglob("*.toml"), *(ROOT / "studies").glob("*.yaml")]):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if line.startswith("#"):
                yield f"{path.relative_to(ROOT)}:{number}", line


def assigned_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield names of variables, parameters, attributes, functions and imports where the tree gives them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id if isinstance(node, ast.Name) else node.attr
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.alias):
            yield 0, node.asname or node.name
        elif isinstance(node, ast.ExceptHandler) and node.name:
            yield node.lineno, node.name


def text_of(node: ast.AST) -> str | None:
    """Return a text in the source; a value in it counts as one word."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "VALUE" for part in node.values)
    return None


def messages() -> Iterator[tuple[str, str]]:
    """Yield the message of every error that the code constructs, with its place."""
    for file, node in nodes():
        if isinstance(node, ast.Call) and node.args:
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            text = text_of(node.args[0])
            if text and ERRORS.search(name):
                yield f"{file}:{node.lineno}", text


def pages() -> Iterator[tuple[str, str]]:
    """Yield the lines of every page and example, with their places."""
    files = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.*")]
    for file in sorted(file for file in files if file.suffix in (".md", ".py") and "_build" not in file.parts):
        for number, line in enumerate(file.read_text().splitlines(), 1):
            yield f"{file.relative_to(ROOT)}:{number}", line


def sentences(text: str) -> list[str]:
    """Return the sentences of a text; a semicolon or a colon also ends one."""
    return re.split(r"(?<=[.;:?!])\s+", " ".join(text.split()))


def helps() -> Iterator[tuple[str, str]]:
    """Yield the help of every command, argument, option, setting, field and code, with its name."""
    root: Any = typer.main.get_command(app)
    yield from _helps(root, "raylt")
    yield from ((key, field.description or "") for key, field in settings())
    yield from CODES.items()
    for name, method in METHODS.items():
        yield from ((f"{name}.{field}", info.description or "") for field, info in method.model_fields.items())


def _helps(command: Any, path: str) -> Iterator[tuple[str, str]]:
    yield path, inspect.cleandoc(command.help or "").split("\f")[0]
    for parameter in command.params:
        yield f"{path} {parameter.name}", getattr(parameter, "help", None) or ""
    for name, inner in getattr(command, "commands", {}).items():
        yield from _helps(inner, f"{path} {name}")


def long_sentences(texts: Iterator[tuple[str, str]]) -> list[str]:
    return [f"{place}: {part}" for place, text in texts for part in sentences(text) if len(part.split()) > LONGEST]


@pytest.mark.slow
@pytest.mark.parametrize("texts", [docstrings, pytest.param(prose_of_tests, marks=pytest.mark.slow)])
def test_first_lines_of_docstrings_are_no_headless_clauses(texts):
    assert [f"{place}: {text.splitlines()[0]}" for place, text in texts() if QUESTION.match(text)] == []


def test_no_argument_is_described_by_a_letter_alone():
    """`classes: C.` is the third item of a list in reStructuredText, and the API page shows it as one."""
    assert [place for place, text in docstrings() if re.search(r"^\s*\w+: \w\.$", text, re.M)] == []


def described_items(docstring: str) -> Iterator[str]:
    """Yield the descriptions of a docstring's arguments, attributes and errors."""
    for section in re.findall(r"^ *(?:Args|Attributes|Raises):\n((?:(?: +\S.*)?\n?)*)", docstring, re.MULTILINE):
        indent = min(len(line) - len(line.lstrip()) for line in section.splitlines() if line.strip())
        yield from re.findall(rf"^ {{{indent}}}(?=\S)[\w`*, ]+: (\S.*)$", section, re.MULTILINE)


def test_descriptions_of_arguments_begin_with_a_capital_or_a_name_of_code():
    """A name of code has a digit, a dot or an underscore, or is one of a few."""
    code = {"lambda", "mu", "onnxruntime", "pyarrow", "raylt", "ssh-keygen", "torch"}
    wrong = [
        f"{place}: {text}"
        for place, docstring in docstrings()
        for text in described_items(docstring)
        if re.fullmatch(r"[a-z][a-z'-]*", word := text.split()[0].rstrip(".,;:")) and word not in code
    ]
    assert wrong == []


def test_help_texts_are_no_headless_clauses():
    assert [f"{place}: {text}" for place, text in helps() if QUESTION.match(text)] == []


def test_help_texts_of_fields_begin_with_a_noun():
    assert [
        f"{name}.{field}: {info.description}"
        for name, method in METHODS.items()
        for field, info in method.model_fields.items()
        if HEADLESS.match(info.description or "")
    ] == []


def test_sentences_of_help_texts_are_short():
    assert long_sentences(helps()) == []


def test_sentences_of_errors_are_short():
    assert long_sentences(messages()) == []


def errors_of_raylt() -> Iterator[tuple[str, str]]:
    """Yield the messages of errors that a user sees, with their places; other exceptions become part of one."""
    for file, node in nodes():
        if isinstance(node, ast.Call) and node.args:
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            text = text_of(node.args[0])
            if text and name in OWN_ERRORS:
                yield f"{file}:{node.lineno}", " ".join(text.split())


def test_errors_name_a_setting_and_end_with_a_full_stop():
    """`setting: what is wrong (value). What to do.`; a message that ends in a value is not judged."""
    assert [
        f"{place}: {text}"
        for place, text in errors_of_raylt()
        if (". " in text.partition(": ")[0] and not text.startswith("VALUE")) or not text.endswith((".", "VALUE"))
    ] == []


def messages_around_another(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the lines and texts of errors that put a caught error of raylt, with its remedy, before another remedy."""
    for handler in ast.walk(tree):
        if isinstance(handler, ast.ExceptHandler) and handler.name and handler.type:
            kinds = {getattr(kind, "id", "") for kind in ast.walk(handler.type)}
            for text in ast.walk(handler) if kinds & OWN_ERRORS else ():
                if isinstance(text, ast.JoinedStr) and _ends_otherwise(text, handler.name):
                    yield text.lineno, ast.unparse(text)


def _ends_otherwise(text: ast.JoinedStr, name: str) -> bool:
    """Return whether a sentence follows the caught error in a text."""
    whole = [
        isinstance(part, ast.FormattedValue) and bool(re.match(rf"({name}$|str\({name}\))", ast.unparse(part.value)))
        for part in text.values
    ]
    after = text.values[whole.index(True) + 1 :] if True in whole else []
    return any(isinstance(part, ast.Constant) and re.search(r"\. [A-Z]", str(part.value)) for part in after)


def test_errors_have_one_remedy():
    allowed = {"raylt/data/images/cache_builder.py"}  # both remedies are needed
    assert [
        f"{file}:{line} {text}"
        for file, tree in sources().items()
        for line, text in messages_around_another(tree)
        if file not in allowed
    ] == []


@pytest.mark.parametrize(
    ("caught", "value", "seen"),
    [
        ("CheckpointError", "error", True),
        ("CheckpointError", "str(error)", True),
        ("CheckpointError", "without_remedy(error)", False),
        ("OSError", "error", False),
    ],
)
def test_two_remedies_in_one_error_are_seen(caught, value, seen):
    source = f"try: ...\nexcept {caught} as error:\n    raise DataError(f'x: unreadable ({{{value}}}). Give another.')"
    assert bool(list(messages_around_another(ast.parse(source)))) == seen


@pytest.mark.parametrize(
    "texts",
    [docstrings, helps, messages, pages, pytest.param(prose_of_tests, marks=pytest.mark.slow)],
    ids=["docstrings", "helps", "errors", "pages", "tests"],
)
def test_texts_have_no_phrase_of_private_english(texts):
    assert [f"{place}: {phrase[0]}" for place, text in texts() for phrase in [BANNED.search(text)] if phrase] == []


def test_variables_say_what_they_hold():
    assert [
        f"{file}:{line} {name}"
        for file, tree in sources().items()
        for line, name in assigned_names(tree)
        if name.strip("_") in NAMES
    ] == []


@pytest.mark.slow
def test_variables_of_tests_and_benchmarks_say_what_they_hold():
    assert [
        f"{file}:{line} {name}"
        for folder in ("tests", "benchmarks")
        for file in sorted((ROOT / folder).rglob("*.py"))
        if ".env" not in file.parts  # packages that benchmarks/peers installs
        for line, name in assigned_names(ast.parse(file.read_text()))
        if name.strip("_") in NAMES_IN_TESTS
    ] == []


@pytest.mark.parametrize(
    "source", ["told = 1", "def f(its): ...", "def held(): ...", "x.known = 2", "from a import b as here"]
)
def test_banned_names_are_seen_wherever_a_name_is_given(source):
    assert [name for _, name in assigned_names(ast.parse(source)) if name.strip("_") in NAMES] != []
