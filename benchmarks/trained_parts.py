"""Measures a pass over 1,000 images by what of a pretrained encoder learns: bytes of the model and CPU seconds.

    python benchmarks/trained_parts.py [--weights FILE] [--images 192] [--turns 3] [--record]

The model is EfficientNet-lite0 at 112 pixels with ten classes, the images are random and of 32x32, batches have 32, and
one thread computes in float32. CPU seconds are those of the process, the least of several turns. Without `--weights`
the encoder has random weights, which take as long. `--record` keeps the figures in
benchmarks/results/trained_parts.json.
"""

import argparse
import json
import time
from datetime import date

import recorded
import torch
from cuts import processor
from torch.nn import functional as F

from raylt.core.training.optimisers import SGD
from raylt.models import SplitModel, build
from raylt.models.trainable import limit

NAME = "trained_parts"
PARTS = ("classifier", "norm", "lora:8", "last:1", "last:2", "all")
BATCH = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", metavar="FILE")
    parser.add_argument("--images", type=int, default=192)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--record", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    x = torch.rand(arguments.images, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    turns = [measure(arguments.weights, x) for _ in range(arguments.turns)]
    rows = {
        name: row | {"seconds": round(min(turn[name]["seconds"] for turn in turns), 1)}
        for name, row in turns[0].items()
    }
    print(json.dumps(rows, indent=1))
    if arguments.record:
        recorded.keep(NAME, rows | {"recorded": f"{date.today()}", "processor": processor()})


def measure(weights: str | None, x: torch.Tensor) -> dict[str, dict[str, float]]:
    """Return bytes and CPU seconds for each part that may learn."""
    rows = {"encoder alone": {"seconds": forward(weights, x)}}
    for part in PARTS:
        model = limit(new_model(weights), part)
        size = sum(value.nbytes for value in model.entries().values())
        rows[part] = {"kib": round(size / 1024), "seconds": training(model, x)}
    return rows


def new_model(weights: str | None) -> SplitModel:
    return build(10, (32, 32, 3), name="timm:tf_efficientnet_lite0", factory=None, weights=weights, side=112)


@torch.no_grad()
def forward(weights: str | None, x: torch.Tensor) -> float:
    """Return the CPU seconds of the encoder alone for 1,000 images."""
    model = new_model(weights).eval()
    start = time.process_time()
    for part in x.split(BATCH):
        model(part)
    return 1000 * (time.process_time() - start) / len(x)


def training(model: SplitModel, x: torch.Tensor) -> float:
    """Return the CPU seconds of a pass of training over 1,000 images, without features that were computed before."""
    labels = torch.arange(len(x)) % 10
    optimiser = SGD([entry for entry in model.parameters() if entry.requires_grad], 0.01)
    model.train()
    start = time.process_time()
    for part, y in zip(x.split(BATCH), labels.split(BATCH), strict=True):
        optimiser.step(F.cross_entropy(model(part), y))
    return 1000 * (time.process_time() - start) / len(x)


if __name__ == "__main__":
    main()
