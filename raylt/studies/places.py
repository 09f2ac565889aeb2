"""Where the runs of a study run: one place per core, or per GPU where there are any."""

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """Where a worker runs: its share of the cores, and its GPU."""

    cores: frozenset[int]
    environment: dict[str, str]


def slots(parallel: int | None, fleet: str) -> int:
    """Runs at once: with Ray one, which spreads a run's clients itself; else one per GPU, or per core without any."""
    return parallel or (1 if fleet == "ray" else _gpus() or len(_cores()))


def places_for(parallel: int | None, fleet: str, jobs: int) -> list[Place]:
    count, gpus, cores = min(slots(parallel, fleet), jobs), _gpus(), _cores()
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


def _gpus() -> int:
    import torch  # only here: a study that has nothing to run need not wait for it
    return torch.cuda.device_count()
