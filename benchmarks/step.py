"""Measures which share of one core's peak a step of local training reaches, and where its time goes.

    python benchmarks/step.py [--model cnn] [--batch 32]

One client with random images takes epochs of `sgd` as FedAvg does, batch, normalisation and optimiser included, on one
thread. The peak is what a product of two matrices of 1024 x 1024 reaches in the same process; floating-point operations
are torch's own count, of convolutions and matrix products. Seconds are of this process's CPU, the least of a few
epochs. Beside raylt's step: the same in bfloat16, and in the memory layout that torch has by itself (contiguous).
"""

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from raylt.config import Config
from raylt.core.client import Client
from raylt.core.evaluation.counts import EvaluationSet
from raylt.core.training.sgd import sgd
from raylt.data.augment import Augmentation
from raylt.data.samples import Batch, Samples
from raylt.data.task import Shard, TaskSpec
from raylt.registry import resolve

STEPS, EPOCHS, SHOWN = 20, 5, 8
SHAPES = {"small": (8, 8, 1), "cnn": (28, 28, 1)}  # CIFAR's else


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="cnn")
    parser.add_argument("--batch", type=int, default=32)
    arguments = parser.parse_args()
    peak, rows = peak_gflops(), {}
    for name, precision, layout in (
        ("raylt's step", "float32", torch.channels_last),
        ("bfloat16", "bfloat16", torch.channels_last),
        ("contiguous", "float32", torch.contiguous_format),
    ):
        rows[name] = measured(client(arguments.model, arguments.batch, precision, layout))
    operations = shares(client(arguments.model, arguments.batch, "float32", torch.channels_last))
    print(
        f"{arguments.model}, batches of {arguments.batch}; a product of matrices: {peak:.0f} GFLOP/s\n"
        f"{'':16}{'ms a step':>10}{'GFLOP/s':>10}{'of the peak':>13}"
    )
    for name, row in rows.items():
        print(f"{name:16}{row['ms']:10.2f}{row['gflops']:10.0f}{row['gflops'] / peak:13.0%}")
    print("\nof raylt's step:")
    for name, share in operations.items():
        print(f"{share:6.1%}  {name}")


def peak_gflops(side: int = 1024) -> float:
    """Return the GFLOP/s of a product of two float32 matrices on this thread."""
    a, b = torch.randn(side, side), torch.randn(side, side)
    return 2 * side**3 / min(_seconds(lambda: a @ b) for _ in range(10)) / 1e9


def client(model: str, batch: int, precision: str, layout: torch.memory_format) -> Client:
    """Return a client with random images for STEPS batches."""
    config = Config.model_validate(
        {
            "method": {"name": "fedavg"},
            "model": model,
            "augment": "none",
            "data": {"clients": 1},
            "local": {"batch": batch, "epochs": 1, "precision": precision},
        }
    )
    setup, device, rng = resolve(config), torch.device("cpu"), np.random.default_rng(0)
    shape = SHAPES.get(model, (32, 32, 3))
    spec = TaskSpec("random", tuple("0123456789"), shape, (0.5,) * shape[2], (0.25,) * shape[2])
    shard = Shard(rng.integers(0, 256, (STEPS * batch, *shape), dtype=np.uint8), rng.integers(0, 10, STEPS * batch))
    samples = (Samples if layout == torch.channels_last else Contiguous)(shard, spec, device)
    net = setup.new_model(spec).to(memory_format=layout)  # pyright: ignore[reportCallIssue]
    return Client(0, samples, EvaluationSet(shard, spec, device), net, config, device, setup.augment)


class Contiguous(Samples):
    """Samples whose batches have torch's default memory layout."""

    def batch(
        self, rows: Tensor, augment: Augmentation | None = None, generator: torch.Generator | None = None
    ) -> Batch:
        batch = super().batch(rows, augment, generator)
        # one channel is both contiguous and channels-last; only a copy makes the layout definite
        return batch._replace(x=batch.x.clone(memory_format=torch.contiguous_format))


def measured(client: Client) -> dict[str, float]:
    """Return the milliseconds of a training step, and its floating-point operations per second."""
    train(client)
    seconds = min(_seconds(lambda: train(client)) for _ in range(EPOCHS)) / STEPS
    with FlopCounterMode(display=False) as counter:
        train(client)
    return {"ms": 1000 * seconds, "gflops": counter.get_total_flops() / STEPS / seconds / 1e9}


def shares(client: Client) -> dict[str, float]:
    """Return torch's most expensive operations with their shares of the time."""
    train(client)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        train(client)
    events = profiler.key_averages()
    total = sum(event.self_cpu_time_total for event in events)
    largest = sorted(events, key=lambda event: -event.self_cpu_time_total)[:SHOWN]
    return {event.key: event.self_cpu_time_total / total for event in largest}


def train(client: Client) -> None:
    """Train a client for one epoch of plain local training."""
    client.begin("train", 1)
    sgd(client, lambda batch: client.cross_entropy(client.model(batch.x), batch.y))


def _seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
