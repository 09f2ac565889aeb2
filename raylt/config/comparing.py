"""Comparison of configurations by the settings that affect results."""

import functools
from collections.abc import Iterator, Mapping
from typing import Any

from raylt.config.sections import Config, settings

NO_RESULT = ("resources", "output")  # Sections that do not affect results.
# Settings of the data section that are derived from the data if null.
FOLLOWS = ("imbalance", "partition", "clients", "test", "test_share")
# Settings of the data section with which a split was drawn.
DRAWN = ("imbalance", "partition", "alpha", "tail", "beta", "per_client")


def settled(config: Config) -> dict[str, Any]:
    """Return the settings that affect results, as JSON values."""
    return {key: value for key, value in config.model_dump(mode="json").items() if key not in NO_RESULT}


def followed(config: Config, recorded: Config) -> Config:
    """Return a planned configuration with the values that depend on the data taken from a run on the same data.

    Args:
        config: The planned configuration.
        recorded: The configuration of a run on the same data.
    """
    data = config.data
    source = recorded.data
    keys = [key for key in FOLLOWS if getattr(data, key) is None and data.source == source.source]
    keys += (*DRAWN, "new_clients", "test", "test_share") if data.split is not None and source.split is not None else ()
    return config.model_copy(update={"data": data.model_copy(update={key: getattr(source, key) for key in keys})})


def completed(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """Return recorded settings, with defaults for settings that older versions did not have.

    The default of a new setting corresponds to the behaviour of older versions.

    Args:
        recorded: Nested settings, as `settled` returns them.
    """
    tree = {key: dict(value) if isinstance(value, Mapping) else value for key, value in recorded.items()}
    for section, name, default in _defaults():
        values = tree.setdefault(section, {}) if section else tree
        values.setdefault(name, default)
    return tree


@functools.cache
def _defaults() -> list[tuple[str, str, Any]]:
    """Return section, name and default of the settings that affect results and have a default."""
    parts = [(*key.rpartition(".")[::2], field) for key, field in settings()]
    return [
        (section, name, field.default)
        for section, name, field in parts
        if section not in NO_RESULT and not field.is_required()
    ]


def differences(before: Mapping[str, Any], after: Mapping[str, Any], key: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield each setting that differs as (key, old value, new value), with None for a missing value.

    Args:
        before: Nested settings, as `settled` returns them.
        after: The settings to compare them with.
        key: Prefix of the keys.
    """
    for name in {**before, **after}:
        old, new = before.get(name), after.get(name)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from differences(old, new, f"{key}{name}.")
        elif old != new or type(old) is not type(new):  # distinguish 1 from true
            yield f"{key}{name}", old, new
