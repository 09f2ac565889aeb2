"""Measures data and replies on a cluster of several nodes, simulated on one machine.

    python benchmarks/nodes.py [--nodes 4] [--record NAME]

The head node has the server and no client actor; each other node has one actor. Two measurements:

- packs: 48 clients with 1 MB of images each; a round asks half of them for a number. Reports the megabytes of clients'
  data that the actors of each node keep after ten rounds, and the bytes that each node's object store then holds.
- sums: 160 clients reply with a tensor of ResNet-8's size (4.9 MB). Reports the bytes of results that reach the
  server, the CPU seconds of the server's process and the seconds of the call, with sums by node and without,
  alternately. Medians of three.

`--record` keeps the figures under NAME in benchmarks/results/nodes.json. All nodes share this machine's cores and
memory, so bytes and the server's CPU seconds carry over to a real cluster, and elapsed seconds do not.
"""

import argparse
import itertools
import os
import pickle
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import ray
import recorded
import torch
from ray._private.internal_api import node_stats
from ray.cluster_utils import Cluster

from actors import calls, dispatch
from actors.capacity import Placement
from actors.fleet import RayFleet
from actors.shards import Shards
from raylt.config import load
from raylt.core.client import Client, Message, Reply
from raylt.core.fleet.reductions import mean
from raylt.data.task import build_task
from raylt.registry import resolve

NAME = "nodes"
MB = 1e6
NUMBERS = 1_225_000  # float32 numbers of a reply: 4.9 MB, as of ResNet-8
_names = itertools.count()


def touch(client: Client, message: Message) -> Reply:
    """Read the client's images; reply with their mean."""
    return client.reply(x=float(client.samples.x.float().mean()))


def upload(client: Client, message: Message) -> Reply:
    """Reply with a large tensor, short enough to be added up at once (robust/outliers.py)."""
    return client.reply(x=torch.full((NUMBERS,), client.id / 1000))


@contextmanager
def fleet_of(clients: int, side: int, samples: int, actors: int) -> Iterator[RayFleet]:
    """Start a fleet for a task of random images."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "images.npz"
        rng = np.random.default_rng(0)
        x = rng.integers(0, 256, (clients * samples, side, side), dtype=np.uint8)
        labels = {"y_train": np.arange(len(x)) % 2, "y_test": np.arange(20) % 2, "class_names": np.array(["a", "b"])}
        np.savez(source, x_train=x, x_test=x[:20], **labels)
        settings = [f"data.source=npz:{source}", f"data.clients={clients}", "data.partition=iid", "data.imbalance=1"]
        config = load(None, [*settings, "method=fedavg", "model=small", "federation.participation=0.5"])
        task = build_task(config.data)
        name = f"nodes{next(_names)}"
        placement = Placement(actors, 1, 0.0)
        fleet = RayFleet(resolve(config), task, Shards.put(task.shards), ray.put(task.test), placement, name)
        try:
            yield fleet
        finally:
            fleet.close()


def store_bytes() -> list[int]:
    """Return the bytes in use in the object store of each node, the head first."""
    nodes = sorted(ray.nodes(), key=lambda node: "node:__internal_head__" not in node["Resources"])
    return [
        node_stats(node["NodeManagerAddress"], node["NodeManagerPort"]).store_stats.object_store_bytes_used
        for node in nodes
        if node["Alive"]
    ]


def measure_packs(actors: int) -> dict[str, Any]:
    """Measure the clients' data that nodes keep."""
    with fleet_of(48, 100, 100, actors) as fleet:
        before = store_bytes()
        rng = np.random.default_rng(1)
        for round in range(1, 11):
            fleet.begin(round)
            fleet.ask(touch, sorted(rng.choice(fleet.ids, len(fleet.ids) // 2, replace=False).tolist()), {}, x=mean)
        packs: dict[str, set[int]] = {}
        for slot in fleet.slots:
            assert slot.process is not None
            packs.setdefault(slot.process[0], set()).update(slot.packs)
        size = sum(len(shard) * 100 * 100 for shard in fleet._task.shards) / len(fleet.shards.packs) / MB  # of a pack
        return {
            "clients_data_mb": round_to(size * len(fleet.shards.packs)),
            "kept_mb": [round_to(len(numbers) * size) for numbers in packs.values()],
            "store_mb": [round_to((after - first) / MB) for first, after in zip(before, store_bytes(), strict=True)],
        }


class Received:
    """Replaces `ray` in the dispatcher: counts the bytes of all results that reach the server."""

    def __init__(self) -> None:
        self.bytes = 0
        self.wait = ray.wait

    def get(self, ref: Any) -> Any:
        """Return a result, and count its bytes without copying them."""
        result = ray.get(ref)
        buffers: list[Any] = []
        self.bytes += len(pickle.dumps(result, protocol=5, buffer_callback=buffers.append))
        self.bytes += sum(buffer.raw().nbytes for buffer in buffers)
        return result


def measure_sums(actors: int, repeats: int) -> dict[str, Any]:
    """Measure the same call with sums by node and without."""
    rows: dict[str, list[tuple[float, float, float]]] = {"single replies": [], "sums by node": []}
    results = set()
    process = psutil.Process(os.getpid())
    received = dispatch.ray = Received()
    like = torch.empty(NUMBERS, device="meta")
    limit = calls.MIN_STORED_BYTES
    with fleet_of(160, 8, 4, actors) as fleet:
        fleet.begin(1)
        fleet.ask(touch, fleet.ids, {}, x=mean)  # every actor has its clients' data
        for kind in list(rows) * repeats:
            calls.MIN_STORED_BYTES = limit if kind == "sums by node" else 2**62
            received.bytes, cpu, start = 0, sum(process.cpu_times()[:2]), time.perf_counter()
            got = fleet.ask(upload, fleet.ids, {}, x=mean.like(like))
            seconds = time.perf_counter() - start
            rows[kind].append((received.bytes / MB, sum(process.cpu_times()[:2]) - cpu, seconds))
            results.add(got["x"][0].item())
    calls.MIN_STORED_BYTES = limit
    assert len(results) == 1
    return {
        kind: dict(zip(("received_mb", "server_cpu_s", "seconds"), map(median, zip(*row, strict=True)), strict=True))
        for kind, row in rows.items()
    }


def median(values: Any) -> float:
    return round_to(statistics.median(values))


def round_to(value: float) -> float:
    """Round a figure to two decimals."""
    return round(value, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=4, help="nodes with clients")
    parser.add_argument("--repeats", type=int, default=3, help="calls of each kind")
    parser.add_argument("--skip-sums", action="store_true", help="measure only the clients' data")
    parser.add_argument("--record", metavar="NAME")
    arguments = parser.parse_args()
    os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    torch.set_num_threads(1)
    store: dict[str, Any] = {"object_store_memory": 2**30}
    cluster = Cluster(initialize_head=True, head_node_args=store | {"num_cpus": 0, "include_dashboard": False})
    for _ in range(arguments.nodes):
        cluster.add_node(num_cpus=1, **store)
    ray.init(address=cluster.address, log_to_driver=False, namespace=NAME)
    figures: dict[str, Any] = {"nodes": arguments.nodes, "packs": measure_packs(arguments.nodes)}
    print(figures, flush=True)
    if not arguments.skip_sums:
        figures["sums"] = measure_sums(arguments.nodes, arguments.repeats)
        print(figures["sums"], flush=True)
    ray.shutdown()
    cluster.shutdown()
    if arguments.record:
        figures |= {"cores": os.cpu_count(), "load": round(os.getloadavg()[0], 1), "recorded": f"{date.today()}"}
        earlier = recorded.kept(NAME) if (recorded.HERE / "results" / f"{NAME}.json").exists() else {}
        recorded.keep(NAME, earlier | {arguments.record: figures})


if __name__ == "__main__":
    main()
