"""Where the runs of a study run: one place per core, or per GPU where there are any and a run may use them."""

import os
from collections.abc import Sequence
from dataclasses import dataclass

from raylt.config import Config


@dataclass(frozen=True)
class Place:
    """Where a worker runs: its share of the cores, and its GPU."""

    cores: frozenset[int]
    environment: dict[str, str]


def slots(parallel: int | None, fleet: str, runs: Sequence[Config]) -> int:
    """How many of these runs at once: with Ray one, which spreads a run's clients itself; else one per GPU, or per core
    where there is no GPU that one of them may use."""
    return parallel or (1 if fleet == "ray" else _gpus(runs) or len(_cores()))


def places_for(parallel: int | None, fleet: str, runs: Sequence[Config]) -> list[Place]:
    count, gpus, cores = min(slots(parallel, fleet, runs), len(runs)), _gpus(runs), _cores()
    if fleet == "ray":
        return [Place(frozenset(), {})] * count
    places = []
    for number in range(count):
        mine = frozenset(cores[number % len(cores)::count])         # evaluation takes all cores that a process may use
        gpu = {"CUDA_VISIBLE_DEVICES": str(number % gpus)} if gpus else {}
        places.append(Place(mine or frozenset(cores), {"OMP_NUM_THREADS": str(max(1, len(mine))), **gpu}))
    return places


def _cores() -> list[int]:
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def _gpus(runs: Sequence[Config]) -> int:
    """GPUs of this machine, where a run may use one."""
    if all(config.resources.gpu_share == 0 for config in runs):
        return 0
    from raylt.core.device import gpus  # only here: it imports torch, and a study with nothing to run need not wait
    return gpus()
