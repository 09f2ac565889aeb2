"""What two configurations differ in."""

from collections.abc import Iterator, Mapping
from typing import Any

from raylt.config.sections import Config

NO_RESULT = ("resources", "output")         # sections that no result depends on


def settled(config: Config) -> dict[str, Any]:
    """The settings that results depend on, as JSON has them."""
    return {key: value for key, value in config.model_dump(mode="json").items() if key not in NO_RESULT}


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
