"""`Case`: a method on one kind of problem, and the runs that its checks look at."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from raylt.config import Config
from raylt.contract.hosts import Recorder
from raylt.contract.tasks import make_scenes, make_task, pixels
from raylt.contract.trace import Trace, finish
from raylt.core.experiment import Experiment
from raylt.core.host import Host
from raylt.core.in_process import LocalFleet
from raylt.core.method import Method
from raylt.core.setup import ModelFactory, Setup
from raylt.data.sources import Kind
from raylt.data.task import Task
from raylt.models import MODELS

CPU = torch.device("cpu")
FACTORIES: dict[Kind, ModelFactory] = {"classification": MODELS["small"], "segmentation": pixels}
# ceil(0.3 * 6) = 2 clients in each of 2 rounds: at least one of the 5 that hold samples is never asked to train
SOME = 0.3


@dataclass
class Case:
    """A method on a problem of one kind: two rounds, some clients that hold little or nothing.

    Attributes:
        method: with the fields that it is checked with.
        folder: where checkpoints go.
    """

    method: Method
    kind: Kind
    folder: Path

    def __str__(self) -> str:
        return f"{self.method.name} on {self.kind}"

    @cached_property
    def task(self) -> Task:
        return make_task() if self.kind == "classification" else make_scenes()

    def config(self, participation: float = 1.0, **parts: Any) -> Config:
        """The configuration, with some parts replaced."""
        federation = {"rounds": 2, "participation": participation} | parts.pop("federation", {})
        tree = {"method": {"name": self.method.name, **self.method.model_dump()}, "model": "small",
                "data": {"clients": 6}, "federation": federation, "local": {"batch": 8}} | parts
        return Config.model_validate(tree)

    def setup(self, config: Config, method: Method | None = None) -> Setup:
        return Setup(config, method or self.method, FACTORIES[self.kind], None)

    def experiment(self, config: Config, *, method: Method | None = None, fleet: type[LocalFleet] = LocalFleet,
                   host: Callable[..., Any] = Host, task: Task | None = None) -> Experiment:
        """A new experiment in this process, by default on the case's task."""
        setup, task = self.setup(config, method), task or self.task
        clients = fleet(config, task, host(setup, task.facts, task.test, CPU))
        return Experiment(setup, task, clients, CPU, self.folder)

    def run(self, config: Config | None = None, **how: Any) -> Trace:
        """A whole run; `how` as `experiment` takes it."""
        return finish(self.experiment(config or self.config(), **how))

    @cached_property
    def straight(self) -> Trace:
        """The undisturbed run of all clients, whose host is a `Recorder`."""
        return self.run(host=Recorder)

    @cached_property
    def partial(self) -> Trace:
        """The undisturbed run of some clients in each round."""
        return self.run(self.config(SOME), host=Recorder)

    def with_sample(self, sample: Callable[..., Any]) -> Method:
        """The method with another `sample`, called with the method's own first."""
        kind = type(self.method)
        own = kind.sample
        other = type(kind.__name__, (kind,), {
            "sample": lambda *call: sample(own, *call), "__module__": kind.__module__})
        other.__pydantic_parent_namespace__ = None      # else this case would travel with every call
        return other(**self.method.model_dump())
