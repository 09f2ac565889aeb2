"""Short runs of MuPFL, and references for them."""

from dataclasses import replace

import numpy as np
import tiny
import torch
from tiny import Recorder, configure, make_experiment, make_setup

from raylt import tree
from raylt.core.client import Client
from raylt.data.task import Shard
from raylt.methods.mupfl.method import MuPFL

OFF = {"bavd": False, "acmu": False, "pkcf": False}
QUICK = {"m": 5, "tau": 2, "matching_steps": 3}


def open_client(task, id=0, method=None, **parts) -> Client:
    return tiny.open_client(task, method or MuPFL(**QUICK), id, configure(**parts))


def run(task, folder, method=None, until=None, host=Recorder, **parts):
    experiment = make_experiment(configure(**parts), task, folder, method or MuPFL(**QUICK), host=host)
    reports = []
    while not experiment.done and len(reports) != until:
        reports.append(experiment.step())
    return experiment, reports


def replies_of(experiment, function="train", round=1):
    return {id: reply for name, r, id, reply in experiment.fleet._host.replies if (name, r) == (function, round)}


def ends_of(experiment, whole, round=1) -> dict[int, dict[str, torch.Tensor]]:
    """Return w_i of each participant of a round: the global model that it received, its own start, and its update."""
    return {
        id: reply["model"]
        if "model" in reply
        else {name: (whole | reply["start"])[name] + update for name, update in reply["update"].items()}
        for id, reply in replies_of(experiment, round=round).items()
    }


def average(models, weights) -> dict[str, torch.Tensor]:
    return {
        name: sum(w * model[name].double() for w, model in zip(weights, models, strict=True)) / sum(weights)
        for name in models[0]
    }


def initial(task, method=None, **parts) -> dict[str, torch.Tensor]:
    return tree.snapshot(make_setup(configure(**parts), method or MuPFL(**QUICK)).new_model(task.spec).state_dict())


def equal_task(task):
    """Return a task whose clients have equal sizes, as with the creff partition."""
    shards = tuple(Shard(shard.x[:8], shard.y[:8]) for shard in task.shards if len(shard) > 7)
    counts = np.stack([np.bincount(shard.y, minlength=4) for shard in shards])
    return replace(task, shards=shards, client_counts=counts)
