"""Commands and options that messages recommend exist."""

import ast
import re
from collections.abc import Iterator
from typing import Any

import pytest
import typer
from test_prose import messages, nodes, text_of

from raylt.cli.main import app

OTHER_TOOLS = re.compile(r"\b(ray|wsl|ssh-keygen|git|start Ray with)\b")


def options(command: Any, path: str) -> Iterator[tuple[str, set[str]]]:
    """Yield every command by its full name, with its options."""
    yield path, {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    for name, inner in getattr(command, "commands", {}).items():
        yield from options(inner, f"{path} {name}")


OPTIONS = dict(options(typer.main.get_command(app), "raylt"))
EVERY_OPTION = {"--help"}.union(*OPTIONS.values())


def wrong_names(text: str) -> list[str]:
    """Return the commands and options in a text that do not exist."""
    wrong = []
    for sentence in re.split(r"[.;,:()] ", text):
        command = re.search(r"raylt ([a-z]+)", sentence)
        known = EVERY_OPTION
        if command and command[0] in OPTIONS:
            known = OPTIONS["raylt"] | OPTIONS[command[0]]
        elif command and re.search(rf"\b(with|[Rr]un|by) {command[0]}", sentence):
            wrong.append(command[0])
        if not OTHER_TOOLS.search(sentence):
            wrong += [name for name in re.findall(r"(?<![\w-])--[a-z][a-z-]+", sentence) if name not in known]
    return wrong


def remedies() -> Iterator[tuple[str, str]]:
    """Yield the places and texts of error messages, and of the commands that `spoken` puts into them."""
    yield from messages()
    for file, node in nodes():
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "spoken":
            yield f"{file}:{node.lineno}", text_of(node.args[0]) or ""


@pytest.mark.slow
def test_commands_and_options_in_messages_exist():
    assert [f"{place}: {wrong_names(text)}" for place, text in remedies() if wrong_names(text)] == []


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("Remove the cache with raylt data --clear NAME.", ["--clear"]),
        ("Continue with raylt proceed RUN.", ["raylt proceed"]),
        ("Give --tokens.", ["--tokens"]),
        ("Remove the cache with raylt data --clear-cache NAME; start one with ray start --head.", []),
    ],
)
def test_a_wrong_name_is_seen(text, wrong):
    assert wrong_names(text) == wrong
