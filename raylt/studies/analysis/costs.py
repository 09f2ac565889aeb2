"""Measures the passes over samples that an arm makes at a client in a run, in a tiny run of the arm's method."""

from collections.abc import Iterable, Mapping
from typing import Any

from raylt.contract.costs import passes_of_settings
from raylt.methods import METHODS
from raylt.studies.records.record import RunRecord


def passes_by_arm(records: Iterable[RunRecord]) -> dict[tuple[str, str], float | None]:
    """Return the passes of a client in a run by cell and arm, as a multiple of FedAvg's; see `client_passes`."""
    settings: dict[tuple[str, str], Mapping[str, Any]] = {}
    for record in records:
        if record.config:
            settings.setdefault((record.cell, record.arm), record.config)
    return {place: client_passes(config) for place, config in settings.items()}


def client_passes(config: Mapping[str, Any]) -> float | None:
    """Return the forward and backward passes of a client in a run, as a multiple of FedAvg's.

    Return None for methods outside raylt, for runs without rounds, and with `local.steps`, where the passes depend on
    the client.

    Args:
        config: All settings of the run.
    """
    local, federation = config["local"], config["federation"]
    asked = federation["rounds"] * federation["participation"]
    kind = METHODS.get(config["method"]["name"])
    if kind is None or not kind.__module__.startswith("raylt.methods.") or local.get("steps") is not None or not asked:
        return None
    return passes_of_settings(config["method"], local["epochs"], federation["rounds"], asked)
