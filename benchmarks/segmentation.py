"""Measures a segmentation client: seconds per step and per round, and memory, by image size and precision.

    python benchmarks/segmentation.py [--heights 90 120 180 360] [--batches 8] [--precisions float32 bfloat16]

One client in one process with one thread, as a client actor runs it: FedAvg, lraspp with 12 classes, random images of
CamVid's shape, as many as an eleventh of its training set (33), augmented by scale_crop_flip. Each row is a process of
its own. Measured on one core of an AMD EPYC with AVX-512, other load on the machine, batch 8, CPU seconds:

    size      s/step   s/epoch of 33   s/judged image   peak MiB (720 to 736 of them before there are data)
    120x90     0.126      0.50            0.003             840
    160x120    0.174      0.70            0.004             887
    240x180    0.303      1.21            0.009            1033
    480x360    1.312      5.25            0.031            1711

bfloat16 takes 12 to 18 % longer than float32 there, and up to 15 % less memory. CPU seconds are shown beside wall
seconds, since other load on the machine changes only the latter. Peak memory is that of the process; beside it stands
that of the process with its libraries, before it has data.
"""

import argparse
import multiprocessing
import resource
import time
from dataclasses import dataclass

import numpy as np
import torch

from raylt.config import load
from raylt.core.evaluation.client_models import Judge
from raylt.core.fleet.client_host import ClientHost
from raylt.core.server import Server
from raylt.data.label_maps import class_counts
from raylt.data.task import Shard, TaskSpec
from raylt.registry import resolve

IMAGES, TEST, CLASSES, RATIO = 33, 24, 12, 480 / 360


@dataclass(frozen=True)
class Cost:
    """The cost of a client: seconds per step and per evaluated image, and MiB at the peak and before loading data."""

    step: float
    step_cpu: float
    judged_cpu: float
    peak: float
    bare: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heights", type=int, nargs="+", default=[90, 120, 180, 360])
    parser.add_argument("--batches", type=int, nargs="+", default=[8])
    parser.add_argument("--precisions", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--epochs", type=int, default=1)
    arguments = parser.parse_args()
    print(
        "  size      batch  precision   s/step   CPU s/step   CPU s/epoch of 33   CPU s/judged image   "
        "peak MiB (before)"
    )
    context = multiprocessing.get_context("spawn")
    for height in arguments.heights:
        for batch in arguments.batches:
            for precision in arguments.precisions:
                with context.Pool(1) as pool:
                    cost = pool.apply(measure, (height, batch, precision, arguments.epochs))
                steps = -(-IMAGES // batch) - (IMAGES % batch == 1)
                print(
                    f"{round(height * RATIO):4d}x{height:<4d}  {batch:5d}  {precision:9s}  {cost.step:7.3f}   "
                    f"{cost.step_cpu:10.3f}   {cost.step_cpu * steps:17.2f}   {cost.judged_cpu:18.3f}   "
                    f"{cost.peak:8.0f} ({cost.bare:.0f})",
                    flush=True,
                )


def measure(height: int, batch: int, precision: str, epochs: int) -> Cost:
    """Measure one client's training after a warm-up call, and then its evaluation of a test set."""
    torch.set_num_threads(1)
    config = load(
        None,
        [
            "data.source=npz:random",
            "model=lraspp",
            "method=fedavg",
            f"local.batch={batch}",
            f"local.epochs={epochs}",
            f"local.precision={precision}",
            "augment=scale_crop_flip",
            "evaluation.batch=8",
        ],
    )
    (x, y), test = random_scenes(IMAGES, height), Shard(*random_scenes(TEST, height))
    shard, few = Shard(x, y), Shard(x[:2], y[:2])
    assert class_counts(y, CLASSES).all()
    spec = TaskSpec(
        "random",
        tuple(map(str, range(CLASSES))),
        (height, round(height * RATIO), 3),
        (0.5,) * 3,
        (0.25,) * 3,
        kind="segmentation",
    )
    setup, device = resolve(config), torch.device("cpu")
    method, host = setup.method, ClientHost(setup, spec, test, device)
    message = method.message(Server(config, spec, setup.new_model(spec), device))
    bare = peak() - (x.nbytes + y.nbytes) / 2**20
    ClientHost(setup, spec, test, device).run(method.train, message, 1, 0, few, None)
    wall, cpu = time.perf_counter(), time.process_time()
    host.run(method.train, message, 1, 0, shard, None)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    steps = epochs * (-(-IMAGES // batch) - (IMAGES % batch == 1))
    began = time.process_time()
    host.run(Judge(method).judge, message, 1, 0, shard, None)
    return Cost(wall / steps, cpu / steps, (time.process_time() - began) / TEST, peak(), bare)


def random_scenes(n: int, height: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    width = round(height * RATIO)
    maps = rng.integers(0, CLASSES, (n, height // 10 + 1, width // 10 + 1), dtype=np.uint8)
    maps = maps.repeat(10, axis=1).repeat(10, axis=2)[:, :height, :width].copy()
    return rng.integers(0, 256, (n, height, width, 3), dtype=np.uint8), maps


def peak() -> float:
    """Return the peak resident memory of this process, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main()
