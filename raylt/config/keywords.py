"""Settings as Python keywords: `data="digits"`, `local={"lr": 0.1}`, and any other by the last part of its key."""

import difflib
from collections.abc import Collection, Mapping
from typing import Any

from raylt.config.reading import overlay
from raylt.config.sections import Config, settings
from raylt.errors import ConfigError


def apply(tree: dict[str, Any], keywords: Mapping[str, Any], fields: Collection[str] = ()) -> None:
    """Changes a mapping of settings by keywords.

    A whole section is a mapping of what is to change in it; `data` may also be the name of a source. Any other keyword
    is the last part of one setting's key, as `rounds` is of federation.rounds, or a field of the method.

    Args:
        fields: of the method.

    Raises:
        ConfigError: no such setting, or several whose keys end so.
    """
    overlay(tree, {_key(name, value, fields): value for name, value in keywords.items()})


def _key(name: str, value: Any, fields: Collection[str]) -> str:
    """The whole key of what a keyword sets."""
    if name in Config.model_fields:
        return "data.source" if name == "data" and isinstance(value, str) else name
    keys = [key for key, _ in settings() if key.endswith(f".{name}")]
    keys += [f"method.{name}"] if name in fields else []
    if len(keys) > 1:
        ways = (f"{section}={{'{name}': ...}}" for section in (key.partition(".")[0] for key in keys))
        raise ConfigError(f"{name}: may be {' or '.join(keys)}; write {' or '.join(ways)}")
    if not keys:
        close = difflib.get_close_matches(name, [*(key.rpartition(".")[2] for key, _ in settings()), *fields], 1)
        raise ConfigError(f"{name}: no such setting" + (f"; did you mean {close[0]}?" if close else ";")
                          + " raylt settings and raylt methods list them")
    return keys[0]
