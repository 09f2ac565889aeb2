"""Short runs of SFD on the digits."""

from pathlib import Path

from tiny import make_experiment

from raylt import tree
from raylt.config import Config
from raylt.core.experiment import Experiment
from raylt.core.fleet.client_host import ClientHost
from raylt.core.fleet.reductions import total
from raylt.data.task import Task
from raylt.methods.sfd.method import encoder, sums_like

QUICK = {"name": "sfd", "rf_dim": 60, "m_min": 80, "m_max": 120, "synthesis_steps": 4, "retrain_epochs": 3}


def configure(data=None, **fields) -> Config:
    # with alpha 0.1 most clients lack some classes
    return Config(
        data={"clients": 4, "alpha": 0.1} | (data or {}),
        method=QUICK | fields,
        federation={"rounds": 2},
        local={"epochs": 1},
    )


def open_experiment(config: Config, task: Task, folder: Path, host=ClientHost) -> Experiment:
    return make_experiment(config, task, folder, host=host)


def statistics(experiment: Experiment) -> dict:
    """Return the sums over all clients, with frequencies drawn from seed 5."""
    experiment.fleet.begin(9)
    method, model = experiment.method, experiment.server.model
    parts = {"n": 1, "z": sums_like(64), "zz": sums_like(64 * 65 // 2), "phi": sums_like(method.rf_dim)}
    return experiment.fleet.ask(
        method.statistics,
        experiment.fleet.everyone,
        {"model": tree.snapshot(encoder(model)), "seed": 5},
        classes=total.within(dict.fromkeys(range(10), parts)),
    )["classes"]


def finish(experiment: Experiment) -> list:
    reports = []
    while not experiment.done:
        reports.append(experiment.step())
    return reports


class Keeper(ClientHost):
    """Keeps each client object and the last message."""

    def run(self, fn, message, *rest):
        self.message = message
        return super().run(fn, message, *rest)
