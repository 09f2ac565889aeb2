"""The workloads of benchmarks/gpu.py: configurations, and experiments and trainings on random images."""

import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where raylt is not installed

import numpy as np
import torch

from raylt.config import Config, load, recipe
from raylt.core.client import Client
from raylt.core.device import open_device
from raylt.core.evaluation.counts import EvaluationSet
from raylt.core.experiment import Experiment
from raylt.core.fleet.client_host import ClientHost
from raylt.core.fleet.local_fleet import LocalFleet
from raylt.core.training.loss_terms import Objective
from raylt.data.samples import Samples
from raylt.data.splits.split import Split
from raylt.data.task import Shard, Task
from raylt.registry import resolve

Finding = dict[str, Any]


def until(seconds: float, cases: Any) -> Iterator[Any]:
    """Yield cases until the given seconds have passed."""
    end = time.monotonic() + seconds
    for case in cases:
        if time.monotonic() > end:
            return
        yield case


def config_of(method: str, *settings: str) -> Config:
    """Return a method's default configuration on random images, without files. Later settings override earlier ones."""
    none = ["method.teacher=none"] if method == "fedsm" else []
    return load(
        None,
        [
            f"method={method}",
            *none,
            "data.source=npz:random",
            "data.clients=2",
            "federation.rounds=2",
            "local.epochs=1",
            "evaluation.every=1000",
            *settings,
        ],
    )


def protocol(name: str, *settings: str) -> Config:
    """Return the configuration of a recipe on random images, evaluated only at the end."""
    none = ["method.teacher=none"] if name.startswith("fedsm") else []
    return load(
        recipe(name), ["data.source=npz:random", "evaluation.every=1000", "evaluation.personal=0", *none, *settings]
    )


def random_task(samples: int, clients: int) -> Task:
    """Return a task of random images in ten classes, with `samples` images for each client."""
    rng = np.random.default_rng(0)

    def shard() -> Shard:
        return Shard(rng.integers(0, 256, (samples, 32, 32, 3), dtype=np.uint8), np.arange(samples) % 10)

    shards = tuple(shard() for _ in range(clients))
    counts = np.stack([np.bincount(one.labels(), minlength=10) for one in shards])
    split = Split(tuple(np.arange(samples) + samples * k for k in range(clients)), "", "random", 1.0, "iid", 1.0, 0)
    return Task(
        "random",
        tuple("0123456789"),
        (32, 32, 3),
        (0.5,) * 3,
        (0.25,) * 3,
        counts,
        ("many",) * 10,
        shards,
        shard(),
        split,
    )


def open_experiment(config: Config, samples: int, clients: int = 2) -> Experiment:
    """Open an experiment in this process on random images, with `samples` images for each client."""
    task = random_task(samples, clients)
    setup, device = resolve(config), open_device(config)
    model = setup.new_model(task.spec)
    setup.check(task.spec, model)
    setup.method.prepare(task, config, model)
    fleet = LocalFleet(config, task, ClientHost(setup, task.spec, task.test, device))
    return Experiment(setup, task, fleet, device, Path(tempfile.gettempdir()))


def open_training(config: Config, samples: int, id: int = 0) -> tuple[Client, Objective]:
    """Return a client in this process with its own model and random images, and the objective of its method."""
    task = random_task(samples, 1)
    setup, device = resolve(config), open_device(config)
    torch.manual_seed(config.seed)
    model = setup.new_model(task.spec).to(device)
    client = Client(
        id,
        Samples(task.shards[0], task.spec, device),
        EvaluationSet(task.test, task.spec, device),
        model,
        config,
        device,
        setup.augment,
    )
    client.begin("train", 1)
    return client, setup.method.objective(client, {})
