"""Measures the teacher's cost in a round of FedSM (semantic mixup): image features encoded once, or at every step.

    python benchmarks/teacher.py [--teacher ViT-B-32] [--samples 64] [--batches 4]

The teacher is open_clip's architecture with random weights: the cost is that of the pretrained one. One thread, as a
client actor has. Seconds of one client's round are put together from what is measured: a step of ResNet-8 with and
without distillation from cached features, encoding one image (preprocessing and tower), and, as FedSM's own code does,
encoding every batch of every epoch anew.
"""

import argparse
import json
import logging
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch

from raylt.config import Config, load
from raylt.core.client import Client
from raylt.core.evaluation.counts import EvaluationSet
from raylt.core.setup import Setup
from raylt.core.training.features import teacher_features
from raylt.core.training.optimisers import SGD
from raylt.core.training.sgd import Objective
from raylt.data.samples import Samples
from raylt.data.task import Shard, TaskSpec
from raylt.methods.fedsm.method import FedSM
from raylt.models import build_model
from raylt.models.clip import open_teacher

CPU = torch.device("cpu")
FACTS = TaskSpec("random", tuple("0123456789"), (32, 32, 3), (0.5,) * 3, (0.25,) * 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", default="ViT-B-32", help="an architecture of open_clip")
    parser.add_argument("--samples", type=int, default=64, help="images encoded for the measurement")
    parser.add_argument("--batches", type=int, default=4, help="training steps measured")
    parser.add_argument("--client", type=int, default=620, help="images of the client whose round is told")
    parser.add_argument("--epochs", type=int, default=10)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        save(arguments.teacher, Path(folder))
        teacher = open_teacher(f"local-dir:{folder}")
        method = FedSM(teacher=teacher.name)
        config = load(None, ["method=fedsm", "model=resnet8_proj", "local.batch=32", "local.momentum=0"])
        client = open_client(method, config, arguments.samples)
        few = Samples(Shard(client.samples.x[:2].numpy(), client.samples.y[:2].numpy()), FACTS, CPU)
        opened = seconds(lambda: teacher.images(few))  # imports open_clip and reads the weights
        texts = seconds(lambda: client.state.update(phrase=teacher.text(FACTS.class_names, "phrase", CPU)))
        image = seconds(lambda: teacher_features(client, teacher.name)) / arguments.samples
    plain = step(client, FedSM(teacher="none").objective(client, {}), arguments.batches)
    distilled = step(client, method.objective(client, {}), arguments.batches)
    steps, n = arguments.epochs * -(-arguments.client // 32), arguments.client
    print(
        f"{arguments.teacher}, one thread: to open {opened:.1f} s, ten texts {texts:.1f} s, an image "
        f"{1000 * image:.0f} ms; a step of 32 images: {1000 * plain:.0f} ms, with cached features "
        f"{1000 * distilled:.0f} ms"
    )
    once, every = steps * distilled, steps * distilled + arguments.epochs * n * image
    print(
        f"a round of a client with {n} images, {arguments.epochs} epochs:\n"
        f"  no teacher                 {steps * plain:8.1f} s\n"
        f"  encoded once               {once:8.1f} s, and {n * image:.1f} s when it joins\n"
        f"  encoded at every step      {every:8.1f} s ({every / once:.1f} times)"
    )


def save(architecture: str, folder: Path) -> None:
    """Save a model with random weights in the form that the teacher local-dir:FOLDER reads."""
    import open_clip
    from safetensors.torch import save_file

    config = open_clip.get_model_config(architecture)
    if config is None:
        raise SystemExit(f"--teacher {architecture}: open_clip has no such model")
    logging.disable(logging.WARNING)  # that there are no pretrained weights
    model = open_clip.create_model(architecture)
    save_file(
        {name: value.contiguous() for name, value in model.state_dict().items()}, folder / "open_clip_model.safetensors"
    )
    (folder / "open_clip_config.json").write_text(json.dumps({"model_cfg": config, "preprocess_cfg": {}}))


def open_client(method: FedSM, config: Config, samples: int) -> Client:
    rng = np.random.default_rng(0)
    shard = Shard(rng.integers(0, 256, (samples, 32, 32, 3), dtype=np.uint8), rng.integers(0, 10, samples))
    model = Setup(config, method, partial(build_model, config.model), None).new_model(FACTS)
    client = Client(0, Samples(shard, FACTS, CPU), EvaluationSet(shard, FACTS, CPU), model, config, CPU)
    client.begin("train", 1)
    return client


def step(client: Client, objective: Objective, batches: int) -> float:
    """Return the CPU seconds of one training step: the median of several steps after a warm-up step."""
    optimiser, taken = SGD(client.model.parameters(), 0.1), []
    for batch in list(client.batches(1 + batches * 32 // len(client), 32))[: batches + 1]:
        began = time.process_time()
        optimiser.step(objective(batch))
        taken.append(time.process_time() - began)
    return float(np.median(taken[1:]))


def seconds(fn: Callable[[], object]) -> float:
    """Return the CPU seconds of one call, which other load on the machine does not change."""
    began = time.process_time()
    fn()
    return time.process_time() - began


if __name__ == "__main__":
    main()
