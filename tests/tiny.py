"""A task that trains in a moment and has every kind of troublesome client, for most tests."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from raylt.config import Config
from raylt.contract import trace
from raylt.contract.case import COUNTS, SCENES, make_scenes, make_task, pixels
from raylt.contract.hosts import Recorder
from raylt.contract.trace import fingerprint
from raylt.core.client import Client
from raylt.core.evaluation.counts import EvaluationSet
from raylt.core.experiment import Experiment
from raylt.core.fleet.client_host import ClientHost
from raylt.core.fleet.local_fleet import LocalFleet
from raylt.core.method import Method
from raylt.core.setup import Setup
from raylt.data.samples import Samples
from raylt.data.task import Task
from raylt.models import SplitModel
from raylt.registry import resolve
from raylt.tree import Tree

__all__ = [
    "COUNTS",
    "CPU",
    "SCENES",
    "Recorder",
    "configure",
    "fingerprint",
    "make_experiment",
    "make_scenes",
    "make_setup",
    "make_task",
    "open_client",
    "pixels",
    "private_states",
    "tiny_odd",
    "tiny_pretrained",
]

CPU = torch.device("cpu")


def configure(**parts: Any) -> Config:
    """Return the tiny config with some parts replaced: `configure(seed=1, federation={"participation": 0.5})`."""
    federation = {"rounds": 2} | parts.pop("federation", {})
    local = {"batch": 8} | parts.pop("local", {})
    data = {"clients": 6} | parts.pop("data", {})
    method = parts.pop("method", {"name": "fedavg"})
    model = parts.pop("model", "small")
    return Config(model=model, method=method, data=data, federation=federation, local=local, **parts)


def make_setup(config: Config, method: Method | None = None) -> Setup:
    """Resolve a config, optionally with another method."""
    setup = resolve(config)
    return setup if method is None else replace(setup, method=method)


def private_states(experiment: Experiment) -> dict[int, Tree]:
    """Return, for every client that trains, the state from which its next call starts, even before its first call."""
    host = experiment.fleet._host
    # the host is a wrapper of raylt/contract/hosts.py
    host = host if isinstance(host, ClientHost) else ClientHost(*host.args)
    untouched = {"model": host._initial, "state": {}}
    return dict.fromkeys(experiment.fleet.ids, untouched) | trace.private_states(experiment)


def open_client(task: Task, method: Method, id: int = 0, config: Config | None = None) -> Client:
    """Return a client without a host, in its first training."""
    setup, spec = make_setup(config or configure(), method), task.spec
    client = Client(
        id,
        Samples(task.shards[id], spec, CPU),
        EvaluationSet(task.test, spec, CPU),
        setup.new_model(spec),
        setup.config,
        CPU,
        setup.augment,
    )
    client.begin("train", 1)
    return client


def make_experiment(
    config: Config,
    task: Task,
    tmp_path: Path,
    method: Method | None = None,
    fleet: type[LocalFleet] = LocalFleet,
    host: Callable[..., Any] = ClientHost,
) -> Experiment:
    """Return an experiment in this process, on the CPU; `host` is called like `ClientHost`."""
    setup = make_setup(config, method)
    clients = fleet(config, task, host(setup, task.spec, task.test, CPU))
    return Experiment(setup, task, clients, CPU, tmp_path)


def tiny_pretrained(classes: int, shape: tuple[int, int, int]) -> SplitModel:
    """Return a model with norms, dropout, a 1x1 convolution and a linear layer, to be frozen or adapted; d = 5."""

    def block(inputs: int, outputs: int, side: int) -> nn.Sequential:
        convolution = nn.Conv2d(inputs, outputs, side, padding=side // 2, bias=False)
        return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU())

    encoder = nn.Sequential(
        OrderedDict(
            stem=block(shape[2], 4, 3),
            narrow=block(4, 6, 1),
            pool=nn.AdaptiveAvgPool2d(1),
            flat=nn.Flatten(),
            drop=nn.Dropout(0.5),
            last=nn.Linear(6, 5),
        )
    )
    return SplitModel(encoder, 5, classes)


def tiny_odd(classes: int, shape: tuple[int, int, int]) -> SplitModel:
    """Return a network of odd widths where they are allowed, with GroupNorm, groups and a hidden linear layer."""
    encoder = nn.Sequential(
        OrderedDict(
            stage1=nn.Sequential(nn.Conv2d(shape[2], 6, 3, padding=1), nn.GroupNorm(3, 6), nn.ReLU(inplace=True)),
            stage2=nn.Sequential(
                nn.AvgPool2d(2), nn.Conv2d(6, 16, 3, padding=1, groups=2, bias=False), nn.BatchNorm2d(16), nn.ReLU6()
            ),
            pool=nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 16, bias=False)),
            last=nn.Sequential(nn.ReLU(), nn.Flatten()),
        )
    )
    return SplitModel(encoder, 16, classes)
