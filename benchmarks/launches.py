"""Counts the kernel launches of a training step on an accelerator, and the host's waits: eager and as a replayed graph.

    python benchmarks/launches.py [--out benchmarks/launches.json]

Counted on the pretend device of the tests, with ResNet-8 on random images of 32x32: so these are launches, no seconds.
Each is some 5 us of a GPU's time at the least, whatever it computes. A step is what `sgd` takes, batch, augmentation
(crop_flip) and optimiser included; `fit_classifier` is one step on features.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where raylt is not installed
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import accelerator as pretend  # pyright: ignore[reportMissingImports]
import numpy as np
import torch
from torch import nn

from raylt.config import Config
from raylt.core.client import Client
from raylt.core.evaluation.counts import EvaluationSet
from raylt.core.training import cuda_graphs
from raylt.core.training.fit_classifier import fit_classifier
from raylt.core.training.sgd import sgd
from raylt.data.samples import Samples
from raylt.data.task import Shard, TaskSpec
from raylt.registry import resolve
from raylt.tree import scale

BATCH, CLASSES = 4, 10
HERE = Path(__file__).resolve().parent
METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "fedprox": {},
    "scaffold": {},
    "moon": {},
    "sfd": {},
    "bpfed": {},
    "mupfl": {},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE / "launches.json")
    out = parser.parse_args().out
    rows = [measured(name, fields) for name, fields in METHODS.items()] + [classifier()]
    out.write_text(json.dumps({"model": "resnet8", "torch": torch.__version__, "steps": rows}, indent=1) + "\n")
    print(f"{'':15}{'launches':>10}{'replayed':>10}{'waits':>7}")
    for row in rows:
        print(f"{row['step']:15}{row['launches']:10}{row['replayed']:10}{row['waits']:7}")


def measured(name: str, fields: dict[str, Any], model: str = "resnet8") -> dict[str, Any]:
    """Count the kernel launches and waits of one step of a method's local training."""
    config = Config.model_validate(
        {
            "method": {"name": name, **fields},
            "model": model,
            "augment": "crop_flip",
            "data": {"clients": 1},
            "local": {"batch": BATCH, "epochs": 1},
        }
    )
    setup, counted = resolve(config), {}
    for replayed in (False, True):
        with pretend.accelerator() as counts:
            recorder(counts if replayed else None)
            _training(setup, config, name, counts, 1)  # constants that a process makes once are not part of a step
            # both runs include warm-up and recording, so they differ by one step
            seen = [_training(setup, config, name, counts, steps) for steps in (6, 7)]
            recorder(None)
        counted[replayed] = [more - less for less, more in zip(*seen, strict=True)]
    return {"step": name, "launches": counted[False][0], "replayed": counted[True][0], "waits": counted[True][1]}


def classifier() -> dict[str, Any]:
    """Count the kernel launches of one step of `fit_classifier` on features with d = 256."""
    counted = {}
    for replayed in (False, True):
        with pretend.accelerator() as counts:
            recorder(counts if replayed else None)
            seen = []
            for steps in (6, 7):
                z = torch.randn(BATCH * steps, 256).to(pretend.NAME)
                y = torch.zeros(BATCH * steps, dtype=torch.int64).to(pretend.NAME)
                layer = nn.Linear(256, CLASSES).to(pretend.NAME)
                counts.clear()
                fit_classifier(
                    layer,
                    z,
                    y,
                    epochs=1,
                    batch=BATCH,
                    lr=0.1,
                    momentum=0.9,
                    weight_decay=1e-4,
                    seed=0,
                    schedule="constant",
                )
                seen.append((sum(counts.kernels.values()), sum(counts.waits.values())))
            recorder(None)
        counted[replayed] = [more - less for less, more in zip(*seen, strict=True)]
    return {
        "step": "fit_classifier",
        "launches": counted[False][0],
        "replayed": counted[True][0],
        "waits": counted[True][1],
    }


def recorder(counts: Any) -> None:
    """Switch graph recording of the pretend device on, or off if `counts` is None."""
    cuda_graphs.set_recorder(pretend.NAME, None if counts is None else pretend.Recorder(counts))


def _training(setup: Any, config: Config, name: str, counts: Any, steps: int) -> tuple[int, int]:
    """Return the launches and waits of a training of `steps` steps."""
    rng, device = np.random.default_rng(0), torch.device(pretend.NAME)
    n = BATCH * steps
    spec = TaskSpec("random", tuple("0123456789"), (32, 32, 3), (0.5,) * 3, (0.25,) * 3)
    shard = Shard(rng.integers(0, 256, (n, 32, 32, 3), dtype=np.uint8), np.arange(n) % CLASSES)
    model = setup.new_model(spec).to(device)
    client = Client(
        0, Samples(shard, spec, device), EvaluationSet(shard, spec, device), model, config, device, setup.augment
    )
    client.begin("train", 1)
    control = scale({key: value.detach() for key, value in model.named_parameters()}, 0)
    objective = setup.method.objective(client, {"beta": 0.5, "control": control})
    make = setup.method.mixed(client) if name == "bpfed" else None
    counts.clear()
    sgd(client, objective, make=make)
    return sum(counts.kernels.values()), sum(counts.waits.values())


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
