"""Measures the peak memory of the server actor for 10 and 100 clients. It must not grow with the number of clients.

    python benchmarks/memory.py [--model resnet8] [--clients 10 100]

Every client takes part and replies with a whole model; clients hold eight images each, so a round is short. Peaks are
of the server's process: private memory (USS) and memory with its share of what it shares (PSS), every 20 ms.
"""

import argparse
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import psutil

from actors.launch import open_experiment
from raylt.config import load
from raylt.data.splits.split import Split
from raylt.data.task import Shard, Task
from raylt.registry import resolve


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet8")
    parser.add_argument("--clients", type=int, nargs="+", default=[10, 100])
    arguments = parser.parse_args()
    print("clients   server before training, MiB   peak USS   peak PSS   bytes up per round")
    for clients in arguments.clients:
        config = load(
            None,
            [
                "data.source=npz:random",
                f"data.clients={clients}",
                "federation.rounds=3",
                "method=fedavg",
                f"model={arguments.model}",
                "local.batch=8",
                "local.epochs=1",
                "evaluation.every=1000",
            ],
        )
        with (
            tempfile.TemporaryDirectory() as folder,
            open_experiment(resolve(config), random_task(clients), Path(folder), None) as experiment,
        ):
            children = psutil.Process().children(recursive=True)
            server = next(child for child in children if "ServerActor" in " ".join(child.cmdline()))
            before = server.memory_full_info().uss
            with Peak(server) as peak:
                reports = [experiment.advance() for _ in range(2)]
        up = reports[-1].traffic["train"]["up"]
        print(f"{clients:7d}   {before / 2**20:27.0f}   {peak.uss / 2**20:8.0f}   {peak.pss / 2**20:8.0f}   {up:18,d}")


def random_task(clients: int) -> Task:
    rng = np.random.default_rng(0)
    shards = tuple(
        Shard(rng.integers(0, 256, (8, 32, 32, 3), dtype=np.uint8), rng.integers(0, 10, 8)) for _ in range(clients)
    )
    counts = np.stack([np.bincount(shard.labels(), minlength=10) for shard in shards])
    split = Split(tuple(np.arange(8) + 8 * k for k in range(clients)), "", "random", 1.0, "iid", 1.0, 0)
    return Task(
        "random",
        tuple("0123456789"),
        (32, 32, 3),
        (0.5,) * 3,
        (0.25,) * 3,
        counts,
        ("many",) * 10,
        shards,
        shards[0],
        split,
    )


class Peak:
    """Records the peak memory of a process within a block."""

    def __init__(self, process: psutil.Process):
        self.process, self.uss, self.pss = process, 0, 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> "Peak":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.is_set():
            memory = self.process.memory_full_info()
            self.uss, self.pss = max(self.uss, memory.uss), max(self.pss, memory.pss)
            time.sleep(0.02)


if __name__ == "__main__":
    main()
