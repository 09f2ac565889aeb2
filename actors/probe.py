"""Measures the memory of a client actor in a short run, to decide how many actors share a GPU."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from ray.exceptions import RayTaskError

from actors.actor_pool import LOST
from actors.by_value import pack
from actors.capacity import Need
from actors.client import own_device
from raylt.core.experiment import Experiment
from raylt.core.fleet.client_host import ClientHost
from raylt.core.fleet.local_fleet import LocalFleet
from raylt.core.setup import Setup
from raylt.data.images.cache import load
from raylt.data.label_maps import class_counts
from raylt.data.task import Shard, Task
from raylt.errors import one_line
from raylt.machine import peak_memory
from raylt.own_code.shipment import Shipment

# Device memory of a CUDA context and its libraries, which torch does not count: 1.53 GB on an H200 with CUDA 13.
CONTEXT_BYTES = 1600 * 2**20
TIMEOUT_S = 120


def _warn(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=3)


def probe(setup: Setup, task: Task, gpus: float, on_message: Callable[[str], None] = _warn) -> Need | None:
    """Measure the resources that the largest client needs.

    Args:
        setup: Configuration, method, model and augmentation.
        task: Data of the experiment.
        gpus: GPUs that the short run reserves.
        on_message: Function that is called with the reason if the short run fails; by default it issues a warning.

    Returns:
        The need, or None if it could not be measured.
    """
    largest = max(
        (id for id in range(len(task.shards)) if id not in task.new_clients), key=lambda id: len(task.shards[id])
    )
    remote: Any = ray.remote(num_cpus=1, num_gpus=gpus, max_retries=0)(_short_run)
    shard = task.shards[largest]
    run = remote.remote(pack(setup), ray.put(task.without_data()), largest, ray.put(shard))
    ended, _ = ray.wait([run], timeout=TIMEOUT_S)
    if not ended:
        # Otherwise a probe that still waits for a GPU would take it from the clients later. A probe that has ended
        # must not be cancelled, because Ray would abort this process.
        ray.cancel(run, force=True)
        return None
    try:
        memory, used, device_memory = ray.get(run)
    except (RayTaskError, *LOST) as error:
        cause = one_line(error.cause if isinstance(error, RayTaskError) else error)
        on_message(f"resources.gpu_share: the memory of a client could not be measured ({cause})")
        return None
    return Need(memory, used / device_memory if device_memory else 0.0)


def _short_run(shipped: Shipment, task: Task, id: int, shard: Shard) -> tuple[float, float, float]:
    """Run one client for a round, the phase after the last round and an evaluation, and measure its memory.

    The client has two training batches of samples, or one evaluation batch if that is larger, so that all computation
    of clients occurs at full size.

    Args:
        shipped: The `Setup`.
        task: Data of the experiment, without the clients' samples.
        id: Id of the client.
        shard: Samples of the client.

    Returns:
        Peak memory of this process, memory used on its device, and memory of the device, in bytes (0 on a CPU).
    """
    setup: Setup = shipped.open()
    config = setup.config
    device = own_device(config)
    size = max(2 * config.local.batch, config.evaluation.batch)
    short = config.model_copy(
        update={
            "local": config.local.model_copy(update={"epochs": 1, "steps": None}),
            # the single client must take part; a secure sum would need two clients
            "federation": config.federation.model_copy(
                update={"rounds": 1, "participation": 1, "over_select": 0, "secure": False}
            ),
            "evaluation": config.evaluation.model_copy(update={"every": 1, "personal": 0}),
        }
    )
    x, y = load(shard.x), shard.labels()
    few = _evenly(shard, size)
    test = _evenly(task.test, config.evaluation.batch)
    shards = [Shard(x[:0], y[:0]) for _ in task.client_counts]
    counts = np.zeros_like(task.client_counts)
    shards[id] = few
    counts[id] = class_counts(few.y, task.classes)
    alone = replace(task, shards=tuple(shards), client_counts=counts, test=test)
    shortened = replace(setup, config=short)
    fleet = LocalFleet(short, alone, ClientHost(shortened, alone.spec, alone.test, device))
    experiment = Experiment(shortened, alone, fleet, device, Path())
    while not experiment.done:
        experiment.step()
    data = float(x.nbytes + y.nbytes)
    peak = float(peak_memory()) + data
    if device.type == "cpu":
        return peak, 0.0, 0.0
    used = torch.cuda.max_memory_reserved(device) + CONTEXT_BYTES + data
    return peak, used, float(torch.cuda.get_device_properties(device).total_memory)


def _evenly(shard: Shard, size: int) -> Shard:
    """Return `size` evenly spaced samples of a shard, because its first samples may all be of one class."""
    rows = np.linspace(0, max(len(shard) - 1, 0), min(size, len(shard))).astype(np.int64)
    return Shard(load(shard.x)[rows], shard.labels()[rows], None if shard.ids is None else shard.ids[rows])
