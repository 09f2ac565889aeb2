"""Worker slots, one per core or per GPU: each holds the resources of one worker process."""

import os
from collections.abc import Sequence
from dataclasses import dataclass

from raylt.config import Config
from raylt.machine import cores


@dataclass(frozen=True)
class WorkerSlot:
    """The resources of one worker process.

    Attributes:
        cores: CPU cores that the process may use; empty for all.
        environment: Environment variables that select the GPU and the number of threads.
    """

    cores: frozenset[int]
    environment: dict[str, str]


def slot_count(parallel: int | None, fleet: str, runs: Sequence[Config]) -> int:
    """Return the number of these runs that can run at the same time.

    With Ray it is one, since Ray distributes the clients of a run itself. Otherwise it is one per GPU, or one per core
    if there is no GPU that a run may use.
    """
    return parallel or (1 if fleet == "ray" else len(_gpu_names(runs)) or len(cores()))


def worker_slots(parallel: int | None, fleet: str, runs: Sequence[Config]) -> list[WorkerSlot]:
    """Return the slots of the workers that carry out these runs, at most one per run."""
    count = min(slot_count(parallel, fleet, runs), len(runs))
    if fleet == "ray":
        return [WorkerSlot(frozenset(), {})] * count
    gpus = _gpu_names(runs)
    usable = cores()
    slots = []
    for number in range(count):
        own_cores = frozenset(usable[number % len(usable) :: count])  # evaluation uses all cores of the process
        environment = {"OMP_NUM_THREADS": str(max(1, len(own_cores)))}
        if gpus:
            environment["CUDA_VISIBLE_DEVICES"] = gpus[number % len(gpus)]
        slots.append(WorkerSlot(own_cores or frozenset(usable), environment))
    return slots


def _gpu_names(runs: Sequence[Config]) -> list[str]:
    """Return the names of this process's GPUs for CUDA_VISIBLE_DEVICES; none if no run may use a GPU.

    A cluster's scheduler may have assigned this process only some of the machine's GPUs, by number, UUID or MIG name.
    """
    if all(config.resources.gpu_share == 0 for config in runs):
        return []
    from raylt.core.device import gpus  # imports torch, which studies without open runs do not need

    count = gpus()
    given = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return given[:count] if given else [str(number) for number in range(count)]
