"""Checks of the settings that may change when a trial continues from another trial's checkpoint.

Population-based training gives a trial another trial's checkpoint, and changes some settings at the same time. Settings
of `local` take effect in every round. So do fields of a method, unless the method reads them before the first round: to
build the model, choose what is sent, let clients join or start the server. All other settings are fixed.
"""

import ast
import inspect
import textwrap
from collections.abc import Iterable, Iterator

from raylt.config import Config, differences, settled
from raylt.core.method import Method
from raylt.errors import ConfigError
from raylt.methods import METHODS

BEFORE_ROUNDS = ("build", "shared", "prepare", "join", "start")  # Functions of a method.


def check_changes(before: Config, after: Config) -> None:
    """Check that a trial can continue from a checkpoint with other settings.

    Args:
        before: Settings of the checkpoint, with all fields of the method.
        after: Settings of the trial.

    Raises:
        ConfigError: A setting that acts before the first round differs.
    """
    for key, old, new in differences(settled(before), settled(after)):
        if not may_change(key, after.method["name"]):
            raise ConfigError(
                f"{key}: acts before the first round, so a trial cannot change it when it continues from another "
                f"({old!r} -> {new!r}). Let the scheduler change only local.* and method fields that act in rounds.",
                code="search.fixed-setting",
                key=key,
                value=new,
            )


def check_exchangeable(keys: Iterable[str], method: str) -> None:
    """Check that population-based training can change all of the settings.

    Raises:
        ConfigError: A setting acts before the first round.
    """
    for key in keys:
        if not may_change(key, method):
            raise ConfigError(
                f"{key}: acts before the first round, so population-based training cannot change it (--scheduler pbt). "
                "Give it a value, or remove it from --fields.",
                code="search.fixed-setting",
                key=key,
                method=method,
            )


def may_change(key: str, method: str) -> bool:
    """Return whether a setting of a method may change between two rounds."""
    if key.startswith("local."):
        return True
    section, _, field = key.partition(".")
    field = field.partition(".")[0]
    return section == "method" and field in METHODS[method].model_fields and field not in fields_before_rounds(method)


def fields_before_rounds(method: str) -> set[str]:
    """Return the fields that a method reads before the first round, by analysis of its source code.

    The analysis follows calls to functions of the method. If the method passes itself to another function, or its
    source code is unavailable, the result is all fields.
    """
    kind = METHODS[method]
    functions = _functions(kind)
    if functions is None:
        return set(kind.model_fields)
    fields: set[str] = set()
    waiting = [name for name in BEFORE_ROUNDS if name in functions]
    seen = set(waiting)
    while waiting:
        for definition in functions[waiting.pop()]:
            for name in _attributes(definition):
                if name is None:
                    return set(kind.model_fields)
                if name in kind.model_fields:
                    fields.add(name)
                elif name in functions and name not in seen:
                    seen.add(name)
                    waiting.append(name)
    return fields


def _functions(kind: type[Method]) -> dict[str, list[ast.FunctionDef]] | None:
    """Return the functions of a method and its base classes by name; None if the source code is unavailable."""
    functions: dict[str, list[ast.FunctionDef]] = {}
    for each in kind.__mro__:
        if each is Method or not issubclass(each, Method):
            continue
        try:
            source = textwrap.dedent(inspect.getsource(each))
        except (OSError, TypeError):
            return None
        for node in ast.parse(source).body[0].body:  # pyright: ignore[reportAttributeAccessIssue]
            if isinstance(node, ast.FunctionDef):
                functions.setdefault(node.name, []).append(node)
    return functions


def _attributes(definition: ast.FunctionDef) -> Iterator[str | None]:
    """Yield the attributes of `self` that a function reads, and None for every use of `self` without an attribute."""
    read = [node for node in ast.walk(definition) if isinstance(node, ast.Attribute)]
    named = {id(node.value) for node in read}
    for node in read:
        if isinstance(node.value, ast.Name) and node.value.id == "self":
            yield node.attr
    for node in ast.walk(definition):
        if isinstance(node, ast.Name) and node.id == "self" and id(node) not in named:
            yield None
