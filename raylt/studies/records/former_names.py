"""Former names of methods' fields, so that recorded runs and searches of earlier versions stay valid.

Fields for the length or the optimiser of a method's second training once had the same names as the clients' settings,
such as `epochs`. They now have a prefix: `retrain_` as in `retrain_epochs`, `tune_` for FedAFA, and `distil_` for
FEDIC. Settings of new runs must use the new names.
"""

from collections.abc import Mapping
from typing import Any

from raylt.errors import CheckpointError
from raylt.methods import METHODS

PREFIXED = ("rounds", "epochs", "batch", "lr", "momentum", "weight_decay", "schedule")
PREFIXES = {"fedafa": "tune", "fedic": "distil"}  # by method; other methods have "retrain"


def current_name(method: str, field: str) -> str:
    """Return the current name of a method's field, given its current name or its name in an earlier version."""
    prefixed = f"{PREFIXES.get(method, 'retrain')}_{field}"
    fields = METHODS[method].model_fields if method in METHODS else {}
    return prefixed if field in PREFIXED and field not in fields and prefixed in fields else field


def former_name(method: str, field: str) -> str:
    """Return the name of a method's field in earlier versions, given its current name."""
    former = field.removeprefix(f"{PREFIXES.get(method, 'retrain')}_")
    return former if current_name(method, former) == field else field


def current_settings(settings: Mapping[str, Any], method: str) -> dict[str, Any]:
    """Return settings, nested or dotted, with the current names of the method's fields.

    Raises:
        CheckpointError: A field occurs under both its former name and its current name.
    """
    current = _renamed(settings, {key: _current_key(key, method) for key in settings})
    fields = current.get("method")
    if isinstance(fields, Mapping):
        current["method"] = _renamed(fields, {key: current_name(method, key) for key in fields})
    return current


def _renamed(settings: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    if len(set(names.values())) < len(names):
        twice = next(key for key, name in names.items() if name != key and name in settings)
        raise CheckpointError(
            f"{names[twice]}: occurs twice in a record, also under its former name ({twice}). Use an intact copy.",
            code="file.malformed",
            key=names[twice],
        )
    return {names[key]: value for key, value in settings.items()}


def former_settings(settings: Mapping[str, Any], method: str) -> dict[str, Any]:
    """Return dotted settings with the names that the method's fields had in earlier versions."""
    return {
        f"method.{former_name(method, field)}" if section == "method" else key: value
        for key, value in settings.items()
        for section, _, field in [key.partition(".")]
    }


def _current_key(key: str, method: str) -> str:
    section, dot, field = key.partition(".")
    return f"method.{current_name(method, field)}" if section == "method" and dot else key
