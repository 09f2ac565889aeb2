"""Sends values to Ray's workers together with the user's own code that the values need."""

from typing import Any

from ray import cloudpickle

from raylt.own_code.shipment import Shipment, ship
from raylt.registry import plugin_modules


def pack(value: Any) -> Shipment:
    """Pickle a value for a Ray worker, with the sources of this process's plugins.

    Raises:
        ConfigError: a part of the value cannot be pickled; the message names it.
    """
    return ship(value, plugin_modules(), cloudpickle.dumps)  # pyright: ignore[reportPrivateImportUsage]
