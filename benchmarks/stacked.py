"""Measures how much faster small clients train in stacks (`local.stacked`) than one after the other.

    python benchmarks/stacked.py                    # every case
    python benchmarks/stacked.py cnn thousand

A case of a model trains the same clients through a `ClientHost` in stacks and alone, in turn, in one process with one
thread. Its figure is CPU seconds in stacks over CPU seconds alone, the median of the turns. `work` is the number of
multiplications of a client's forward step, by which `auto` decides. Everything runs with the settings of glibc's
allocator that client actors have. The case `thousand` is that workload of benchmarks/speed.py, with raylt's clients in
stacks and alone. Figures go to benchmarks/results/stacked.json.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import speed
import torch
from cuts import processor
from torch import nn

from actors.cluster.session import MALLOC
from raylt import tree
from raylt.config import Config
from raylt.core.fleet.client_host import ClientCall, ClientHost
from raylt.core.training import stacked_sgd
from raylt.core.training.stacked_sgd import Workload
from raylt.data.task import Shard, TaskSpec
from raylt.models.split import SplitModel
from raylt.registry import resolve

RECORD = Path(__file__).parent / "results" / "stacked.json"
CPU = torch.device("cpu")
CLIENTS = 32


@dataclass(frozen=True)
class Training:
    """Clients of one size, model and batch."""

    model: str
    shape: tuple[int, int, int]
    batch: int
    samples: int
    precision: str = "float32"
    fewest: int | None = None  # samples of a client, where they differ; `samples` is the most
    clients: int = CLIENTS
    width: int | None = None  # of a frozen encoder's features, on which the clients then train
    optimiser: str = "sgd"

    def __str__(self) -> str:
        optimiser = "" if self.optimiser == "sgd" else f", {self.optimiser}"
        if self.width is not None:
            sizes = f"{self.samples} samples" if self.fewest is None else f"{self.fewest} to {self.samples} samples"
            return f"{self.width} features of a frozen encoder, batches of {self.batch}, clients of {sizes}{optimiser}"
        precision = "" if self.precision == "float32" else f", {self.precision}"
        height, width, channels = self.shape
        sizes = "" if self.fewest is None else f", {self.clients} clients of {self.fewest} to {self.samples}"
        return f"{self.model} {height}x{width}x{channels}, batches of {self.batch}{precision}{sizes}{optimiser}"

    @property
    def kinds(self) -> set[str]:
        """The names that select this case on the command line."""
        return {self.model if self.width is None else "frozen", self.optimiser}

    def host(self, stacked: str) -> ClientHost:
        """Return a host whose clients train in stacks or alone, whatever `auto` would decide."""
        local = {"batch": self.batch, "epochs": 1, "precision": self.precision, "optimiser": self.optimiser}
        config = Config.model_validate(
            {
                "method": {"name": "fedavg"},
                "model": self.model,
                "data": {"clients": CLIENTS},
                "local": local | {"stacked": stacked},
                "trainable": "all" if self.width is None else "classifier",
            }
        )
        spec = TaskSpec("random", tuple("0123456789"), self.shape, (0.5,) * self.shape[2], (0.25,) * self.shape[2])
        setup = resolve(config)
        if self.width is not None:
            setup = replace(setup, model=lambda classes, shape: SplitModel(nn.Flatten(), self.width or 0, classes))
        return ClientHost(setup, spec, self.shard(0), CPU)

    def shard(self, seed: int) -> Shard:
        rng = np.random.default_rng(seed)
        n = self.samples if self.fewest is None else int(rng.integers(self.fewest, self.samples + 1))
        if self.width is not None:
            return Shard(rng.standard_normal((n, 1, self.width), np.float32), np.arange(n) % 10)
        return Shard(rng.integers(0, 256, (n, *self.shape), dtype=np.uint8), np.arange(n) % 10)


FROZEN = "small", (8, 8, 1)
ADAM = tuple(
    Training(model, shape, batch, samples, optimiser="adam", width=width)
    for model, shape, batch, samples, width in (
        ("small", (8, 8, 1), 5, 10, None),
        ("small", (16, 16, 3), 10, 20, None),
        ("cnn", (28, 28, 1), 5, 10, None),
        (*FROZEN, 5, 10, 1280),
    )
)
# a linear layer on more and more numbers: 49,930 to a million weights that learn
WEIGHTS = tuple(
    Training(*FROZEN, 5, 10, width=width, optimiser=optimiser)
    for optimiser in ("sgd", "adam")
    for width in (4_992, 9_984, 30_000, 100_000)
)
TRAININGS = (
    *ADAM,
    *WEIGHTS,
    Training(*FROZEN, 5, 10, width=1280),
    Training(*FROZEN, 32, 32, width=1280),
    Training(*FROZEN, 32, 128, width=1280),
    Training(*FROZEN, 32, 128, width=1280, fewest=4),
    Training("small", (8, 8, 1), 5, 10),
    Training("small", (8, 8, 1), 32, 32),
    Training("small", (16, 16, 3), 10, 20),
    Training("small", (32, 32, 3), 5, 10),
    Training("small", (32, 32, 3), 10, 20),
    Training("small", (32, 32, 3), 32, 32),
    Training("cnn", (28, 28, 1), 5, 10),
    Training("cnn", (28, 28, 1), 5, 10, "bfloat16"),
    Training("cnn", (28, 28, 1), 10, 20),
    Training("cnn", (28, 28, 1), 20, 20),
    Training("cnn", (28, 28, 1), 32, 32),
    Training("cnn", (32, 32, 3), 5, 10),
    Training("resnet32", (32, 32, 3), 5, 10),
    Training("resnet8", (32, 32, 3), 5, 10),
    *(
        Training(model, shape, batch, most, fewest=4, clients=clients)
        for model, shape, batch, most in (
            ("small", (8, 8, 1), 5, 32),
            ("small", (8, 8, 1), 32, 128),
            ("cnn", (28, 28, 1), 5, 32),
            ("cnn", (28, 28, 1), 10, 128),
        )
        for clients in (1, 12, 64)
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help="models, frozen, adam, weights, or thousand; all by default")
    parser.add_argument("--turns", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    stacked_sgd.MAX_WORK = float("inf")
    stacked_sgd.MAX_WEIGHTS = 10**9
    for training in TRAININGS:
        kinds = {"weights"} if training in WEIGHTS else training.kinds
        if not arguments.cases or kinds & set(arguments.cases):
            keep(str(training), compare(training, arguments.turns))
    if not arguments.cases or "thousand" in arguments.cases:
        keep("thousand clients, in bare loops", thousand(arguments.turns))


def compare(training: Training, turns: int) -> dict[str, Any]:
    """Return the ratio of CPU seconds of clients in stacks and alone."""
    hosts = {stacked: training.host(stacked) for stacked in ("auto", "off")}
    method, model = hosts["off"].setup.method, hosts["off"].model
    message = {"model": tree.snapshot(method.shared(model))}
    calls = [ClientCall(id, training.shard(id), None) for id in range(training.clients)]

    def alone() -> None:
        for call in calls:
            hosts["off"].run(method.train, message, 1, call.id, call.shard, None)

    def together() -> None:
        outcomes = hosts["auto"].run_stacks(method.train, message, 1, calls)
        assert len(outcomes) == training.clients

    alone()
    together()
    seconds = [(seconds_of(together), seconds_of(alone)) for _ in range(turns)]
    local = hosts["off"].setup.config.local
    steps = sum(local.step_count(len(call.shard or ())) for call in calls)
    return {
        "ratio": round(statistics.median(stacked / single for stacked, single in seconds), 3),
        "alone, ms a step": round(1e3 * min(single for _, single in seconds) / steps, 3),
        "stacked, ms a step": round(1e3 * min(stacked for stacked, _ in seconds) / steps, 3),
        "work": Workload.of(model, hosts["off"].spec, training.batch).multiplications,
        "clients of a stack": hosts["auto"]._stack.together,
    }


def thousand(turns: int) -> dict[str, Any]:
    """Return the CPU seconds of raylt's rounds and runs relative to the bare loop of benchmarks/speed.py."""
    systems = ["bare", "raylt-ray", "raylt-ray-stacked", "raylt-local", "raylt-local-stacked"]
    found = speed.compare(speed.SCALES["thousand"], systems, turns, limit=300, refused={})["systems"]
    ratios = {
        f"{system}, {what}": round(figures[key] / found["bare"][key], 3)
        for system, figures in found.items()
        for what, key in (("a round", "round_cpu"), ("whole", "cpu"))
    }
    return {"bare, CPU s a round": round(found["bare"]["round_cpu"], 3)} | ratios


def seconds_of(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def keep(case: str, row: dict[str, Any]) -> None:
    """Store the figures of a case, and show them."""
    rows = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    rows[case] = row | {"recorded": datetime.now(UTC).date().isoformat(), "processor": processor()}
    RECORD.write_text(json.dumps(rows, indent=1) + "\n")
    print(f"{case}: {row}", flush=True)


if __name__ == "__main__":
    if MALLOC.items() - os.environ.items():
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | MALLOC)  # read when a process starts
    main()
