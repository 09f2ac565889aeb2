"""Whole rounds on the tiny task, for tests of methods."""

from pathlib import Path
from typing import Any

import torch
from tiny import configure, make_experiment
from torch import Tensor

from raylt.core.client import Message
from raylt.core.experiment import Experiment
from raylt.core.fleet.reductions import each
from raylt.core.method import Method
from raylt.data.task import Task
from raylt.tree import Tree


def start(task: Task, folder: Path, method: Method, **parts: Any) -> Experiment:
    """Return an experiment whose clients have joined and whose first round has begun."""
    experiment = make_experiment(configure(**parts), task, folder, method)
    experiment.method.start(experiment.server, experiment.fleet)
    experiment.server.round = 1
    experiment.fleet.begin(1)
    return experiment


def replies(experiment: Experiment, ids: list[int], *names: str, message: Message | None = None) -> dict[int, Tree]:
    """Return the parts of the clients' replies to `train`, by client; the experiment cannot be used afterwards."""
    message = experiment.method.message(experiment.server) if message is None else message
    got = experiment.fleet.ask(experiment.method.train, ids, message, **dict.fromkeys(names, each))
    return {id: {name: got[name][id] for name in names} for id in ids}


def run(task: Task, folder: Path, method: Method, rounds: int = 3, **parts: Any) -> Experiment:
    """Return a finished experiment."""
    federation = {"rounds": rounds} | parts.pop("federation", {})
    experiment = make_experiment(configure(federation=federation, **parts), task, folder, method)
    while not experiment.done:
        experiment.step()
    return experiment


def ask_only(monkeypatch: Any, method: Method, ids: list[int]) -> None:
    """Make every round of this method's class ask these clients."""
    monkeypatch.setattr(type(method), "sample", lambda self, server, fleet: ids)


def flat(experiment: Experiment) -> Tensor:
    """Return all entries of the global model as one float64 vector."""
    return torch.cat([value.double().flatten() for value in experiment.server.model.state_dict().values()])


def weighted(values: dict[int, Tree], weights: dict[int, int], part: str, name: str) -> Tensor:
    """Return the weighted mean of one entry of a part, in float64."""
    return sum(weights[id] * reply[part][name].double() for id, reply in values.items()) / sum(weights.values())
