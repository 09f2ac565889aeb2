"""What one client actor needs, seen in two steps of a real client: it decides how many share a GPU."""

import resource
from typing import Any

import ray
import torch

from actors.client import device_here
from actors.placement import Need
from raylt.client import Host
from raylt.config import Config
from raylt.data.cache import load
from raylt.data.task import Facts, Shard, Task
from raylt.method import Method
from raylt.server import Server
from raylt.tree import Tree

CONTEXT = 600 * 2**20       # device memory of a CUDA context, which torch does not count
TIMEOUT_S = 120


def probe(config: Config, method: Method, task: Task, gpus: float) -> Need | None:
    """The need of the largest client; None where it could not be measured, and Ray's shares alone decide."""
    largest = max(range(len(task.shards)), key=lambda id: len(task.shards[id]))
    remote: Any = ray.remote(num_cpus=1, num_gpus=gpus, max_retries=0)(_two_steps)
    shard = task.shards[largest]
    try:
        memory, used, device_memory = ray.get(
            remote.remote(config, method, task.facts, ray.put(task.test), largest, ray.put(shard)), timeout=TIMEOUT_S)
    except Exception:       # a message that needs earlier rounds, a device that is full: then nothing is known
        return None
    return Need(memory, used / device_memory if device_memory else 0.0)


def _two_steps(config: Config, method: Method, facts: Facts, test: Shard, id: int,
               shard: Shard) -> tuple[float, float, float]:
    """Bytes of this process at its peak, of its device, and of the whole device (0 on a CPU)."""
    device = device_here()
    short = config.model_copy(update={"local": config.local.model_copy(update={"epochs": 1})})
    host = Host(short, method, facts, test, device)
    x, y = load(shard.x), shard.labels()
    few = Shard(x[:2 * config.local.batch], y[:2 * config.local.batch])
    _, private = host.run(method.join, {}, 0, id, few, None)
    message: Tree = method.message(Server(short, facts, method.new_model(facts, short), torch.device("cpu")))
    host.run(method.train, message, 1, id, few, private)
    data = float(x.nbytes + y.nbytes)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0 + data
    if device.type == "cpu":
        return peak, 0.0, 0.0
    used = torch.cuda.max_memory_reserved(device) + CONTEXT + data
    return peak, used, float(torch.cuda.get_device_properties(device).total_memory)
