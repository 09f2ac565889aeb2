"""Former names of methods' fields, so that recorded runs and searches of earlier versions stay valid.

A field that sets the length or the optimiser of a method's second training once had the name of the clients' own
setting, such as `epochs`. Since then it has a prefix: `retrain_epochs`, or `tune_` with FedAFA and `distil_` with
FEDIC. Settings of new runs must have the new names.
"""

from collections.abc import Mapping
from typing import Any

from raylt.errors import CheckpointError
from raylt.methods import METHODS

PREFIXED = ("rounds", "epochs", "batch", "lr", "momentum", "weight_decay", "schedule")
PREFIXES = {"fedafa": "tune", "fedic": "distil"}  # by method; "retrain" with the others


def current_name(method: str, field: str) -> str:
    """Return the present name of a method's field, given the name that an earlier version or this one has for it."""
    prefixed = f"{PREFIXES.get(method, 'retrain')}_{field}"
    fields = METHODS[method].model_fields if method in METHODS else {}
    return prefixed if field in PREFIXED and field not in fields and prefixed in fields else field


def former_name(method: str, field: str) -> str:
    """Return the name that earlier versions had for a method's field, given its present name."""
    former = field.removeprefix(f"{PREFIXES.get(method, 'retrain')}_")
    return former if current_name(method, former) == field else field


def current_settings(settings: Mapping[str, Any], method: str) -> dict[str, Any]:
    """Return settings, nested or dotted, in which the fields of a method have their present names.

    Raises:
        CheckpointError: a field has a value under its former name and another under its present name.
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
            f"{names[twice]}: a record gives it twice, also by its former name ({twice}). Use an intact copy.",
            code="file.malformed",
            key=names[twice],
        )
    return {names[key]: value for key, value in settings.items()}


def former_settings(settings: Mapping[str, Any], method: str) -> dict[str, Any]:
    """Return dotted settings in which the fields of a method have the names that earlier versions had for them."""
    return {
        f"method.{former_name(method, field)}" if section == "method" else key: value
        for key, value in settings.items()
        for section, _, field in [key.partition(".")]
    }


def _current_key(key: str, method: str) -> str:
    section, dot, field = key.partition(".")
    return f"method.{current_name(method, field)}" if section == "method" and dot else key
