"""Measures the passes over samples that an arm makes at a client in a run, in a tiny run of the arm's method."""

import json
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from raylt.contract.costs import relative_cost
from raylt.methods import METHODS, make_method
from raylt.models import MODELS
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

    None for methods that are not raylt's own, for runs without rounds, and with `local.steps`, since its passes depend
    on the client.

    Args:
        config: all settings of the run.
    """
    local, federation = config["local"], config["federation"]
    asked = federation["rounds"] * federation["participation"]
    if config["method"]["name"] not in METHODS or local.get("steps") is not None or not asked:
        return None
    return _measured(json.dumps(config["method"], sort_keys=True), local["epochs"], federation["rounds"], asked)


@lru_cache(maxsize=256)
def _measured(method: str, epochs: float, rounds: int, asked: float) -> float:
    return relative_cost(make_method(json.loads(method)), MODELS["small"], (8, 8, 1), 4, epochs, rounds, asked)
