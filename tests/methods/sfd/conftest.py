"""Runs that several tests in this folder share."""

import pytest
from sfd_runs import Keeper, configure, finish, open_experiment

from raylt.core.experiment import Experiment
from raylt.data.task import Task, build_task


@pytest.fixture(scope="module")
def task() -> Task:
    return build_task(configure().data)


@pytest.fixture(scope="module")
def finished(task, tmp_path_factory) -> tuple[Experiment, list]:
    experiment = open_experiment(configure(), task, tmp_path_factory.mktemp("sfd"))
    return experiment, finish(experiment)


@pytest.fixture
def open_client(task, tmp_path):
    """Return a function that opens a client which lacks classes, in the middle of a round, with its message."""

    def opened(**fields):
        experiment = open_experiment(configure(**fields), task, tmp_path, Keeper)
        experiment.step()
        host = experiment.fleet._host
        client = next(c for c in host.clients.values() if 1 < (c.counts > 0).sum() < 10 and len(c) > 40)
        client.begin("train", 2)
        return experiment, client, host.message

    return opened
