"""Packing of values for Ray's workers, together with the user's code that the values need."""

from typing import Any

from ray import cloudpickle

from raylt.own_code.shipment import Shipment, ship
from raylt.registry import plugin_modules


def pack(value: Any) -> Shipment:
    """Pickle a value for a Ray worker, with the sources of this process's plugins.

    Raises:
        ConfigError: A part of the value cannot be pickled; the message names it.
    """
    return ship(value, plugin_modules(), cloudpickle.dumps)  # pyright: ignore[reportPrivateImportUsage]
