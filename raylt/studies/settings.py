"""Settings of studies: mappings laid over each other, made into configurations, and what people call them."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from raylt.config import Config, check, followed, recipe, settled
from raylt.config.notation import read_file
from raylt.errors import ConfigError
from raylt.registry import resolve

# what a cell is called: the paper's letter, and nothing for a value that speaks for itself
_LETTERS = {"data.imbalance": "IF", "data.alpha": "alpha", "data.clients": "K", "data.beta": "beta",
            "federation.rounds": "R", "federation.participation": "r", "data.source": "", "data.partition": "",
            "model": ""}
_PLACES = ("data.root", "data.download")        # where a machine has its files from


def merge(tree: Mapping[str, Any], changes: Mapping[str, Any], section: str = "") -> dict[str, Any]:
    """Settings with others laid over them; keys may be nested or dotted. A method that is named replaces the one before
    with its fields, fields alone are added to it.

    Args:
        section: that these are settings of, with a dot after it; errors name it.

    Raises:
        ConfigError: something is no mapping that settings of it are given for.
    """
    merged = dict(tree)
    for key, value in changes.items():
        first, dot, rest = str(key).partition(".")
        inner = f"{section}{first}."
        if first == "method" and not dot:
            value = {"name": value} if isinstance(value, str) else _mapping(key, value)
            merged["method"] = value if "name" in value else {**_as_method(merged.get("method")), **value}
        elif dot:
            below = _as_method(merged.get(first)) if first == "method" else _mapping(inner[:-1], merged.get(first, {}))
            merged[first] = merge(below, {rest: value}, inner)
        elif isinstance(value, Mapping) and isinstance(merged.get(first), Mapping):
            merged[first] = merge(merged[first], value, inner)
        else:
            merged[first] = value
    return merged


def resolved(tree: Mapping[str, Any], who: str = "") -> Config:
    """The configuration of a run with all fields of its method, as a run folder records it."""
    try:
        config: Config = check(Config, dict(tree))
        method = resolve(config).method
    except ConfigError as error:
        raise ConfigError(f"{who}: {error}" if who else str(error)) from None
    return config.model_copy(update={"method": {"name": method.name, **method.model_dump(mode="json")}})


def label(settings: Mapping[str, Any]) -> str:
    """What people call a cell: IF 100, alpha 0.5."""
    words = []
    for key, value in settings.items():
        letter = _LETTERS.get(key, key.rpartition(".")[2])
        text = f"{value:g}" if isinstance(value, float) else str(value)
        words.append(f"{letter} {text}".strip())
    return ", ".join(words)


def slug(text: str) -> str:
    """A name as a folder: IF 100, alpha 0.5 is if100_alpha0.5."""
    joined = re.sub(r"([A-Za-z]) (?=[\d.])", r"\1", text.lower()).replace(", ", "_")
    return re.sub(r"[^\w.+=-]+", "-", joined).strip("-")


def read_recipe(name: str) -> dict[str, Any]:
    """The settings of a recipe of the package, or of a file.

    Raises:
        ConfigError: there is no such recipe or file.
    """
    return read_yaml(Path(name) if Path(name).is_file() else recipe(name.removeprefix("recipe:")))


def _as_method(value: Any) -> dict[str, Any]:
    return {"name": value} if isinstance(value, str) else _mapping("method", value or {})


def _mapping(key: Any, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{key} = {value!r}: must be a mapping of settings")
    return dict(value)


def read_yaml(path: Path) -> dict[str, Any]:
    tree = read_file(path)
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: must be a mapping, is a {type(tree).__name__}")
    return tree


def differences(config: dict[str, Any], planned: Config, elsewhere: bool = False) -> list[str]:
    """Settings of a run that are not those of its plan, resources and output apart.

    What its method has as fields now and had not when the run was made is at its default, which is what it did then.

    Raises:
        ConfigError: the run has a setting that this raylt does not know.

    Args:
        elsewhere: whether the run may be another machine's, where files lie in other places: their names alone count.
    """
    if config["method"].get("name") == planned.method["name"]:
        defaults = type(resolve(planned).method).model_construct().model_dump(mode="json")
        config = config | {"method": defaults | config["method"]}
    made: Config = check(Config, dict(config))
    before, after = flat(settled(made)), flat(settled(followed(planned, made)))
    if elsewhere:
        before, after = _without_places(before), _without_places(after)
    return [f"{key}: {before.get(key)!r} -> {after.get(key)!r}" for key in sorted(before | after)
            if before.get(key) != after.get(key)]


def portable(config: Config) -> dict[str, Any]:
    """The settings that results depend on, by dotted key, the same on every machine: of files their names alone."""
    return _without_places(flat(settled(config)))


def names_alone(config: Mapping[str, Any]) -> dict[str, str]:
    """Of those settings that name a file with its place, the text with the file's name alone."""
    texts = [value for value in flat(config).values() if isinstance(value, str)]
    return {text: name for text in texts if (name := _without_place(text)) != text}


def _without_places(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _without_place(value) for key, value in settings.items() if key not in _PLACES}


def _without_place(value: Any) -> Any:
    kind, _, path = value.partition(":") if isinstance(value, str) else ("", "", "")
    return f"{kind}:{Path(path).name}" if kind in ("npz", "folder") else value


def flat(tree: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Nested settings with dotted keys."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        here = f"{path}.{key}" if path else str(key)
        if isinstance(value, Mapping):
            leaves |= flat(value, here)
        else:
            leaves[here] = value
    return leaves
