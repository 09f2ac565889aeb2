"""What two configurations differ in."""

from collections.abc import Iterator, Mapping
from typing import Any

from raylt.config.sections import Config, settings

NO_RESULT = ("resources", "output")         # sections that no result depends on
FOLLOWS = ("imbalance", "partition", "clients", "test")     # of the data section: what null leaves to the data
DRAWN = ("imbalance", "partition", "alpha", "tail", "beta", "per_client")      # what a split from a file was drawn with


def settled(config: Config) -> dict[str, Any]:
    """The settings that results depend on, as JSON has them."""
    return {key: value for key, value in config.model_dump(mode="json").items() if key not in NO_RESULT}


def followed(config: Config, known: Config) -> Config:
    """The configuration of a run that is planned, with what its data decide as a run over the same data has it."""
    data, there = config.data, known.data
    left = [key for key in FOLLOWS if getattr(data, key) is None and data.source == there.source]
    left += DRAWN if data.split is not None and there.split is not None else ()
    return config.model_copy(update={"data": data.model_copy(update={key: getattr(there, key) for key in left})})


def completed(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that an older raylt recorded, with those that it did not have yet, at their defaults: what they ask for
    now is what it did.

    Args:
        recorded: nested, as `settled` gives them.
    """
    tree = {key: dict(value) if isinstance(value, Mapping) else value for key, value in recorded.items()}
    for key, field in settings():
        section, _, name = key.rpartition(".")
        if section in NO_RESULT or field.is_required():
            continue
        (tree.setdefault(section, {}) if section else tree).setdefault(name, field.default)
    return tree


def differences(before: Mapping[str, Any], after: Mapping[str, Any], key: str = "") -> Iterator[tuple[str, Any, Any]]:
    """The settings that differ, with what they were and are; None where there is none.

    Args:
        before, after: nested, as `settled` gives them.
        key: what the key of each starts with.
    """
    for name in {**before, **after}:
        old, new, whole = before.get(name), after.get(name), f"{key}{name}"
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from differences(old, new, f"{whole}.")
        elif old != new or type(old) is not type(new):          # 1 is not true
            yield whole, old, new
