"""Functions on settings of studies: merge them, and compare runs."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from raylt.config import Config, check, followed, recipe, settled
from raylt.config.yaml_text import read_file
from raylt.errors import ConfigError
from raylt.registry import resolve

# Settings that tell where files are on a machine.
_LOCATIONS = ("data.root", "data.download")


def read_recipe(name: str) -> dict[str, Any]:
    """Read the settings of a recipe in the package, or of a YAML file.

    Raises:
        ConfigError: The recipe or file does not exist.
    """
    return read_yaml(Path(name) if Path(name).is_file() else recipe(name.removeprefix("recipe:")))


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file.

    Raises:
        ConfigError: The file cannot be read, or its content is not a mapping.
    """
    tree = read_file(path)
    if not isinstance(tree, dict):
        kind = type(tree).__name__
        raise ConfigError(
            f"{path}: must be a mapping (a {kind}). Write settings as KEY: VALUE.",
            code="config.wrong-type",
            path=str(path),
            value=kind,
        )
    return tree


def merge(tree: Mapping[str, Any], changes: Mapping[str, Any], section: str = "") -> dict[str, Any]:
    """Return a copy of settings with changes merged in.

    Keys may be nested or dotted. If the changes name a method, it replaces the former method and its fields; fields
    without a method belong to it. Otherwise the changed fields are added to the former method.

    Args:
        tree: Settings; not modified.
        changes: Settings that override those of `tree`.
        section: Prefix of keys in error messages, ending in a dot.

    Raises:
        ConfigError: A change sets a key inside a value that is not a mapping.
    """
    merged = dict(tree)
    # the method first: its name drops fields of another method, but must not drop fields of the same changes
    for key, value in sorted(changes.items(), key=lambda item: item[0] != "method"):
        first, dot, rest = str(key).partition(".")
        inner = f"{section}{first}."
        if first == "method" and not dot:
            fields = {"name": value} if isinstance(value, str) else _mapping(key, value)
            before = _method(merged.get("method"))
            merged["method"] = fields if "name" in fields and "name" in before else before | fields
        elif dot:
            below = _method(merged.get(first)) if first == "method" else _mapping(inner[:-1], merged.get(first, {}))
            merged[first] = merge(below, {rest: value}, inner)
        elif isinstance(value, Mapping) and isinstance(merged.get(first), Mapping):
            merged[first] = merge(merged[first], value, inner)
        else:
            merged[first] = value
    return merged


def resolved(tree: Mapping[str, Any], owner: str = "") -> Config:
    """Return a run's complete configuration, with all fields of its method, as a run folder records it.

    Args:
        tree: Settings; the other settings have their defaults.
        owner: Prefix of error messages, such as "arm 'x'".

    Raises:
        ConfigError: A setting is unknown or has a wrong value.
    """
    try:
        config: Config = check(Config, dict(tree))
        method = resolve(config).method
    except ConfigError as error:
        if not owner:
            raise
        raise type(error)(f"{owner}: {error}", code=error.code, **error.details) from None
    return config.model_copy(update={"method": {"name": method.name, **method.model_dump(mode="json")}})


def differences(config: dict[str, Any], planned: Config, elsewhere: bool = False) -> list[str]:
    """Return the settings in which a run differs from its plan, apart from resources and output.

    A method may have gained a field since the run was made. The run then counts with the field's default, which is how
    it was trained.

    Args:
        config: Settings of the run, as in its config.yaml.
        planned: Settings that the study plans.
        elsewhere: Whether another machine may have made the run. Only the names of files are compared then.

    Returns:
        One line for each setting: "KEY: OLD -> NEW".

    Raises:
        ConfigError: The run has a setting that this version of raylt does not know.
    """
    if config["method"].get("name") == planned.method["name"]:
        defaults = type(resolve(planned).method).model_construct().model_dump(mode="json")
        config = config | {"method": defaults | config["method"]}
    made: Config = check(Config, dict(config))
    before = flat(settled(made))
    after = flat(settled(followed(planned, made)))
    if elsewhere:
        before = _without_locations(before)
        after = _without_locations(after)
    return [
        f"{key}: {before.get(key)!r} -> {after.get(key)!r}"
        for key in sorted(before | after)
        if before.get(key) != after.get(key)
    ]


def portable(config: Config) -> dict[str, Any]:
    """Return the settings that affect results, by dotted key, with file names in place of paths."""
    return _without_locations(flat(settled(config)))


def file_names(config: Mapping[str, Any]) -> dict[str, str]:
    """Map each file path in the settings to the name of the file."""
    texts = [value for value in flat(config).values() if isinstance(value, str)]
    return {text: name for text in texts if (name := _without_location(text)) != text}


def flat(tree: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Return nested settings as a flat mapping with dotted keys."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        dotted = f"{path}.{key}" if path else str(key)
        if isinstance(value, Mapping):
            leaves |= flat(value, dotted)
        else:
            leaves[dotted] = value
    return leaves


def _method(value: Any) -> dict[str, Any]:
    return {"name": value} if isinstance(value, str) else _mapping("method", value or {})


def _mapping(key: Any, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"{key}: must be a mapping of settings ({value!r}). Write {{NAME: VALUE}}.",
            code="config.wrong-type",
            key=str(key),
            value=value,
        )
    return dict(value)


def _without_locations(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _without_location(value) for key, value in settings.items() if key not in _LOCATIONS}


def _without_location(value: Any) -> Any:
    """Return a setting with a file's name in place of its path.

    Paths after `npz:` and `folder:` name data, which each machine may keep elsewhere. Other relative paths start in the
    study's folder and are kept. Other absolute paths, such as those of weights or index lists, are specific to one
    machine.
    """
    if not isinstance(value, str):
        return value
    kind, _, path = value.partition(":")
    if kind in ("npz", "folder"):
        return f"{kind}:{Path(path).name}"
    if "://" in value:  # such as ray:s3://bucket, which is the same on every machine
        return value
    start = re.search(r"(^|:)(?=~?/)", value)
    return value if start is None else value[: start.end()] + Path(value[start.end() :]).name
