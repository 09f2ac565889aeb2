"""What one client actor needs, seen in a short run of a real client: it decides how many share a GPU."""

import resource
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch

from actors.client import device_here
from actors.placement import Need
from raylt.core.experiment import Experiment
from raylt.core.host import Host
from raylt.core.in_process import LocalFleet
from raylt.core.setup import Setup
from raylt.data.cache import load
from raylt.data.maps import class_counts
from raylt.data.task import Shard, Task

CONTEXT = 600 * 2**20       # device memory of a CUDA context, which torch does not count
TIMEOUT_S = 120


def probe(setup: Setup, task: Task, gpus: float) -> Need | None:
    """The need of the largest client; None where it could not be measured, and Ray's shares alone decide."""
    largest = max((id for id in range(len(task.shards)) if id not in task.newcomers),
                  key=lambda id: len(task.shards[id]))
    remote: Any = ray.remote(num_cpus=1, num_gpus=gpus, max_retries=0)(_short_run)
    shard = task.shards[largest]
    run = remote.remote(setup, ray.put(task.without_data()), largest, ray.put(shard))
    ended, _ = ray.wait([run], timeout=TIMEOUT_S)
    if not ended:
        # one that waits for a GPU would take it when the clients need it; one that has ended must not be cancelled,
        # since Ray aborts this process where the two meet
        ray.cancel(run, force=True)
        return None
    try:
        memory, used, device_memory = ray.get(run)
    except Exception:       # a device that is full, a process that died: then nothing is known
        return None
    return Need(memory, used / device_memory if device_memory else 0.0)


def _short_run(setup: Setup, task: Task, id: int, shard: Shard) -> tuple[float, float, float]:
    """Bytes of this process at its peak, of its device, and of the whole device (0 on a CPU).

    A run of one round, its last phase and its judgements, whose only client has two batches, or one of those that
    features are taken and models are judged in: so everything that clients do is seen at its full size.
    """
    config, device = setup.config, device_here(setup.config)
    size = max(2 * config.local.batch, config.evaluation.batch)
    short = config.model_copy(update={
        "local": config.local.model_copy(update={"epochs": 1}),
        "federation": config.federation.model_copy(update={"rounds": 1}),
        "evaluation": config.evaluation.model_copy(update={"every": 1, "personal": 0})})
    x, y = load(shard.x), shard.labels()
    few, test = _first(shard, size), _first(task.test, config.evaluation.batch)
    shards = [Shard(x[:0], y[:0]) for _ in task.client_counts]
    counts = np.zeros_like(task.client_counts)
    shards[id], counts[id] = few, class_counts(few.y, task.classes)
    alone = replace(task, shards=tuple(shards), client_counts=counts, test=test)
    shortened = replace(setup, config=short)
    fleet = LocalFleet(short, alone, Host(shortened, alone.facts, alone.test, device))
    experiment = Experiment(shortened, alone, fleet, device, Path())
    while not experiment.done:
        experiment.step()
    data = float(x.nbytes + y.nbytes)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0 + data
    if device.type == "cpu":
        return peak, 0.0, 0.0
    used = torch.cuda.max_memory_reserved(device) + CONTEXT + data
    return peak, used, float(torch.cuda.get_device_properties(device).total_memory)


def _first(shard: Shard, size: int) -> Shard:
    """So many of its samples, evenly from all of it: of the first ones many may be of one class."""
    rows = np.linspace(0, max(len(shard) - 1, 0), min(size, len(shard))).astype(np.int64)
    return Shard(load(shard.x)[rows], shard.labels()[rows], None if shard.ids is None else shard.ids[rows])
