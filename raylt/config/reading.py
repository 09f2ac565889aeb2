"""A configuration is a YAML file and `key=value` overrides; whatever is wrong with it becomes one `ConfigError`."""

import difflib
import textwrap
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ValidationError

from raylt.config.notation import parse, read_file
from raylt.config.recipes import recipe
from raylt.config.sections import Config, DataConfig, settings
from raylt.errors import ConfigError

NO_METHOD = ("method: name one, as in method=sfd (raylt methods lists them); raylt run without any settings runs a "
             "demonstration")


def load(path: Path | str | None = None, overrides: Sequence[str] = ()) -> Config:
    """The configuration in a YAML file, if any, changed by `key=value` overrides; one of them names the method.

    Args:
        path: of the file; or recipe:NAME for one that comes with raylt.

    Raises:
        ConfigError: unreadable file, unknown key, wrong type or range, no method; names the value and the remedy.
    """
    return check(Config, read(path, overrides))


def load_data(path: Path | str | None = None, overrides: Sequence[str] = ()) -> DataConfig:
    """The data of a configuration, which need not name a method: that decides nothing about a split."""
    return check(Config, {"method": "none"} | read(path, overrides)).data


def read(path: Path | str | None, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The settings that a file and overrides name, unchecked; see `load`."""
    tree = {} if path is None else _read_file(path)
    override(tree, overrides)
    return tree


def override(tree: dict[str, Any], overrides: Sequence[str]) -> None:
    """Changes a mapping of settings by `key=value` overrides."""
    # the method first: its name drops the fields of another, not those given beside it
    for text in sorted(overrides, key=lambda text: not text.startswith(("method=", "method.name="))):
        _set(tree, text)


def overlay(tree: dict[str, Any], changes: Mapping[str, Any]) -> None:
    """The same by a mapping of keys to values; that of a section changes the settings in it that it names."""
    leaves: dict[str, Any] = {}
    for key, value in changes.items():
        if isinstance(value, Mapping) and not (key == "method" and "name" in value):
            leaves |= {f"{key}.{inner}": each for inner, each in value.items()}
        else:
            leaves["method" if key == "method.name" else key] = dict(value) if isinstance(value, Mapping) else value
    for key in sorted(leaves, key=lambda key: key != "method"):
        assign(tree, key, leaves[key])


def _read_file(path: Path | str) -> dict[str, Any]:
    of_recipe = str(path).startswith("recipe:")
    path = recipe(str(path).removeprefix("recipe:")) if of_recipe else Path(path)
    tree = read_file(path)
    tree = {} if tree is None else tree             # an empty file
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: must be a mapping of settings, is a {type(tree).__name__}")
    return tree


def check(kind: type[BaseModel], tree: dict[str, Any], prefix: str = "") -> Any:
    """`kind` built from a mapping; the first thing that is wrong becomes one `ConfigError`."""
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(_explain(kind, error, prefix)) from None


def assign(tree: dict[str, Any], key: str, value: Any) -> None:
    """Sets one setting, written with dots, in a mapping of settings."""
    value = str(value) if isinstance(value, Path) else value
    whole = key
    *parents, last = key.split(".")
    for name in parents:
        below = tree.setdefault(name, {})
        if name == "method" and isinstance(below, str):     # method: fedprox, then method.mu=0.1
            below = tree[name] = {"name": below}
        if not isinstance(below, dict):
            raise ConfigError(f"{whole}: {name} is {below!r}, which has no fields")
        tree = below
    if key == "method" and isinstance(value, str):          # another method: the fields of the one before do not apply
        before = tree.get("method")
        value = before if isinstance(before, dict) and before.get("name") == value else {"name": value}
    tree[last] = value


def _set(tree: dict[str, Any], setting: str) -> None:
    key, equals, text = setting.partition("=")
    key = "method" if key == "method.name" else key
    if not equals or not key:
        raise ConfigError(f"{setting!r}: an override is written key=value, as in federation.rounds=50")
    try:
        value = parse(text)
    except ValueError as error:
        raise ConfigError(f"{_short(setting)}: {_short(text)} is not a YAML value ({error}); quote it") from None
    assign(tree, key, value)


def _short(value: Any) -> str:
    """A value as a message shows it."""
    try:
        return textwrap.shorten(repr(value), 200, placeholder=" ...")
    except (ValueError, RecursionError):        # a number of thousands of digits, or a mapping that holds itself
        return f"a {type(value).__name__}"


def _explain(kind: type[BaseModel], error: ValidationError, prefix: str) -> str:
    # a method that is missing comes last: whoever mistyped a setting should hear of that
    first = min(error.errors(), key=lambda its: its["loc"] == ("method",) and its["type"] == "missing")
    if kind is Config and first["type"] == "missing" and first["loc"] == ("method",):
        return NO_METHOD
    # pydantic adds the branch of a union to the path; names of settings never hold brackets or capitals
    names = [str(part) for part in first["loc"]]
    where, model = [], kind
    for name in names:
        field = model.model_fields.get(name)
        where.append(name)
        inner = field.annotation if field else None
        # a section may be left out: then its type is a union with None
        inner = next((each for each in (inner, *typing.get_args(inner)) if isinstance(each, type)
                      and issubclass(each, BaseModel)), None)
        if inner is None:
            break
        model = inner
    key = prefix + ".".join(where)
    if first["type"] == "extra_forbidden":
        if not model.model_fields:
            return f"{key}: no such setting; there are none here."
        close = _nearest(key, prefix, model)
        hint = f"; did you mean {close}?" if close else "."
        return f"{key}: no such setting{hint} There are: {', '.join(model.model_fields)}."
    reason = first["msg"].removeprefix("Value error, ")
    reason = reason[0].lower() + reason[1:]
    return f"{key} = {_short(first['input'])}: {reason}{_expected(model, where[-1])}"


def _nearest(key: str, prefix: str, model: type[BaseModel]) -> str | None:
    """The setting that was probably meant: of this section, or of the same name in another."""
    section, _, name = key.rpartition(".")
    close = difflib.get_close_matches(name, model.model_fields, 1)
    if close or prefix:
        return f"{section}.{close[0]}".strip(".") if close else None
    return next((known for known, _ in settings() if known.rpartition(".")[2] == name), None)


def _expected(model: type[BaseModel], name: str) -> str:
    """For a choice between words, the words: pydantic lists only one branch of a union."""
    field = model.model_fields.get(name)
    if field is None or typing.get_origin(field.annotation) not in (typing.Union, types.UnionType):
        return ""
    words = [str(v) for branch in typing.get_args(field.annotation) if typing.get_origin(branch) is Literal
             for v in typing.get_args(branch)]
    return f", or {', '.join(words)}" if words else ""
