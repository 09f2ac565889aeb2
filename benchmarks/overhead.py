"""Measures the overhead of the framework: seconds per round on Ray against a bare PyTorch loop over the same batches.

    python benchmarks/overhead.py [--rounds 7] [--model resnet8] [--source npz:PATH]

The bare loop is the fastest we know without any framework: as many forked one-thread processes as there are client
actors, uint8 data in memory, the same batches in the same order, channels-last, a foreach SGD, models passed through
shared memory and averaged in float64. Both are alive at once and take rounds alternately, so a machine that slows down
slows both. CPU seconds are those of all processes of each side (Ray's own daemons are on Ray's side), start-up apart.
The final weights of both are compared: the same batches give the same bits.
"""

import argparse
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil
import torch
import torch.multiprocessing as mp
from torch.nn import functional as F

from actors.cluster.session import MALLOC
from actors.launch import open_experiment
from raylt.config import Config, load
from raylt.core.checkpoint.checkpoint import hash_tensors
from raylt.core.client import Client
from raylt.core.evaluation.counts import EvaluationSet
from raylt.core.training.optimisers import SGD
from raylt.data.samples import Samples
from raylt.data.splits.split import Split
from raylt.data.task import Shard, Task, build_task
from raylt.models.split import load_entries
from raylt.registry import resolve
from raylt.seeds import seed_for


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rounds", type=int, default=7, help="at least 2; the first is not counted: it holds first-time costs"
    )
    parser.add_argument("--model", default="resnet8")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--actors", type=int, default=2)
    parser.add_argument("--source", help="a data source instead of random images of CIFAR-10-LT's size")
    arguments = parser.parse_args()
    if arguments.rounds < 2:
        parser.error(f"--rounds {arguments.rounds}: at least 2")
    config = load(
        None,
        [
            f"data.source={arguments.source or 'npz:random'}",
            "data.imbalance=100",
            "data.partition=creff",
            "data.clients=20",
            "federation.participation=0.4",
            f"federation.rounds={arguments.rounds + 1}",
            "method=fedavg",
            f"model={arguments.model}",
            "local.epochs=1",
            f"local.batch={arguments.batch}",
            "local.lr=0.1",
            "local.momentum=0",
            "evaluation.every=1000",
            f"resources.actors={arguments.actors}",
        ],
    )
    task = build_task(config.data) if arguments.source else random_task()
    setup = resolve(config)
    with tempfile.TemporaryDirectory() as folder, open_experiment(setup, task, Path(folder), None) as ours:
        bare = Bare(config, task, arguments.actors)
        rows = [
            {"raylt": spend(ours.advance, bare.pids, own=False), "bare": spend(bare.round, bare.pids, own=True)}
            for _ in range(arguments.rounds)
        ]
        ours.advance()  # the last one is evaluated: not counted
        bare.round()
        same = ours.export_model()["model_sha256"] == hash_tensors(bare.model.state_dict())
        bare.close()
    show(rows[1:], same)


def random_task() -> Task:
    """Return a task of 12,400 random images in 20 equal shards. The content does not matter for speed."""
    rng = np.random.default_rng(0)
    shards = tuple(
        Shard(rng.integers(0, 256, (620, 32, 32, 3), dtype=np.uint8), rng.integers(0, 10, 620)) for _ in range(20)
    )
    test = Shard(rng.integers(0, 256, (500, 32, 32, 3), dtype=np.uint8), rng.integers(0, 10, 500))
    counts = np.stack([np.bincount(shard.labels(), minlength=10) for shard in shards])
    split = Split(tuple(np.arange(620) + 620 * k for k in range(20)), "", "random", 1.0, "iid", 1.0, 0)
    return Task(
        "random", tuple("0123456789"), (32, 32, 3), (0.5,) * 3, (0.25,) * 3, counts, ("many",) * 10, shards, test, split
    )


class Bare:
    """FedAvg without a framework, with worker processes, queues and shared memory."""

    def __init__(self, config: Config, task: Task, workers: int):
        self.config, self.sizes = config, {k: len(shard) for k, shard in enumerate(task.shards)}
        self.model = resolve(config).new_model(task.spec)
        self.shared = {
            name: torch.zeros_like(value, memory_format=torch.contiguous_format).share_memory_()
            for name, value in self.model.state_dict().items()
        }
        context = mp.get_context("spawn")
        self.todo, self.done = context.Queue(), context.Queue()
        self.returned = [
            {name: value.clone().share_memory_() for name, value in self.shared.items()} for _ in range(20)
        ]
        self.workers = [
            context.Process(
                target=work, daemon=True, args=(config, task, self.shared, self.returned, self.todo, self.done)
            )
            for _ in range(workers)
        ]
        for worker in self.workers:
            worker.start()
        for _ in self.workers:
            self.done.get()
        self.pids = [worker.pid for worker in self.workers if worker.pid]
        self.number = 0

    def round(self) -> None:
        self.number += 1
        rng = np.random.default_rng(seed_for(self.config.seed, "server", "sample", self.number))
        chosen = sorted(int(k) for k in rng.choice(20, 8, replace=False))
        for name, value in self.model.state_dict().items():
            self.shared[name].copy_(value)
        for k in sorted(chosen, key=lambda k: -self.sizes[k]):
            self.todo.put((k, self.number))
        for _ in chosen:
            self.done.get()
        total = sum(self.sizes[k] for k in chosen)
        mean = {}
        for name, like in self.shared.items():
            if like.is_floating_point():
                acc = torch.zeros(like.shape, dtype=torch.float64)
                for k in chosen:
                    acc.add_(self.returned[k][name], alpha=float(self.sizes[k]))
                mean[name] = (acc / total).to(like.dtype)
            else:
                mean[name] = torch.stack([self.returned[k][name] for k in chosen]).max(0).values
        load_entries(self.model, mean)

    def close(self) -> None:
        for _ in self.workers:
            self.todo.put(None)
        for worker in self.workers:
            worker.join()


def work(config, task, shared, returned, todo, done) -> None:
    """Train clients in a worker process of the bare loop."""
    torch.set_num_threads(1)
    model = resolve(config).new_model(task.spec).train()
    params = list(model.parameters())
    cpu = torch.device("cpu")
    samples = [Samples(shard, task.spec, cpu) for shard in task.shards]
    orders = Client(0, samples[0], EvaluationSet(task.test, task.spec, cpu), model, config, cpu)
    done.put(None)
    while (order := todo.get()) is not None:
        k, number = order
        load_entries(model, shared)
        orders.id = k
        orders.begin("train", number)
        optimiser = SGD(params, config.local.lr)
        for rows in torch.randperm(len(samples[k]), generator=orders.order).split(config.local.batch):
            batch = samples[k].batch(rows)
            optimiser.step(F.cross_entropy(model(batch.x), batch.y))
        for name, value in model.state_dict().items():
            returned[k][name].copy_(value)
        done.put(k)


class Spent(NamedTuple):
    cpu: float
    wall: float
    kinds: dict[str, float]


def spend(act: Callable[[], object], bare: list[int], own: bool) -> Spent:
    """Return the CPU and wall seconds of one call, and the CPU seconds by kind of process.

    They include this process and the children of one side: the bare loop or raylt.
    """
    before, start = cpu_seconds(bare, own), time.perf_counter()
    act()
    wall = time.perf_counter() - start
    kinds: defaultdict[str, float] = defaultdict(float)
    for (pid, kind), seconds in cpu_seconds(bare, own).items():
        kinds[kind] += seconds - before.get((pid, kind), 0.0)
    return Spent(sum(kinds.values()), wall, kinds)


def cpu_seconds(bare: list[int], own: bool) -> dict[tuple[int, str], float]:
    """Return the CPU seconds so far, by process and kind, of this process and the children of one side.

    The sides are the bare loop and all other processes.
    """
    me, found = psutil.Process(), {}
    for process in [me, *me.children(recursive=True)]:
        if process.pid == me.pid or (process.pid in bare) == own:
            try:
                times, name = process.cpu_times(), " ".join(process.cmdline())
            except psutil.NoSuchProcess:
                continue
            kind = (
                "driver"
                if process.pid == me.pid
                else "clients"
                if "ClientActor" in name or own
                else "server"
                if "ServerActor" in name
                else "Ray's daemons"
            )
            found[process.pid, kind] = times.user + times.system
    return found


def show(rows: list[dict[str, Spent]], same: bool) -> None:
    print("round   CPU s raylt   bare   ratio     wall s raylt   bare   ratio")
    for i, row in enumerate(rows, 2):
        (cpu, wall, _), (bare_cpu, bare_wall, _) = row["raylt"], row["bare"]
        print(
            f"{i:5d}   {cpu:11.2f} {bare_cpu:6.2f}  {cpu / bare_cpu:6.3f}   {wall:14.2f} {bare_wall:6.2f}  "
            f"{wall / bare_wall:6.3f}"
        )
    for what, ratios in (
        ("CPU", [row["raylt"].cpu / row["bare"].cpu for row in rows]),
        ("wall", [row["raylt"].wall / row["bare"].wall for row in rows]),
    ):
        print(f"median ratio of {what} seconds per round: {statistics.median(ratios):.3f}")
    for side in ("raylt", "bare"):
        kinds = {
            kind: sum(row[side].kinds.get(kind, 0.0) for row in rows) / len(rows)
            for kind in {kind for row in rows for kind in row[side].kinds}
        }
        print(
            f"CPU seconds per round of {side}: "
            + ", ".join(f"{kind} {kinds[kind]:.2f}" for kind in sorted(kinds, key=lambda kind: -kinds[kind]))
        )
    print(f"same weights, bit for bit: {'yes' if same else 'NO'}")


if __name__ == "__main__":
    import os

    os.environ.update(MALLOC)  # the bare workers get what Ray's get
    main()
