"""Former names of methods' fields, so that recorded runs and searches of earlier versions stay valid.

A field that sets the length or the optimiser of a method's second training once had the name of the clients' own
setting, such as `epochs`. Since then it has a prefix: `retrain_epochs`, or `tune_` with FedAFA and `distil_` with
FEDIC. Settings of new runs must have the new names.
"""

from collections.abc import Mapping
from typing import Any

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
    """Return settings, nested or dotted, in which the fields of a method have their present names."""
    current = {_current_key(key, method): value for key, value in settings.items()}
    fields = current.get("method")
    if isinstance(fields, Mapping):
        current["method"] = {current_name(method, key): value for key, value in fields.items()}
    return current


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
