"""Hostile clients have the same outcome on Ray as in one process: every fifth kind, and all in the soak tests."""

import hostile
import pytest
from hostile import COUNTS, KINDS, Hostile, Judged
from ray import cloudpickle
from tiny import CPU, make_setup
from tiny import configure as tiny_configure

from raylt.core.checkpoint.checkpoint import hash_tensors
from raylt.core.experiment import Experiment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
CONFIG = {"federation": {"rounds": 2, "retries": 0}, "evaluation": {"every": 9}}


@pytest.fixture
def by_value():
    """Pickle the module `hostile` by value, because actors cannot import it."""
    cloudpickle.register_pickle_by_value(hostile)
    yield
    cloudpickle.unregister_pickle_by_value(hostile)


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.soak)])
def test_fleets_agree_on_hostile_clients(make_fleet, make_experiment, tiny_task, tmp_path, by_value, every):
    config = tiny_configure(**CONFIG)
    fleet = make_fleet(config, 2, Hostile())

    def finish(experiment):
        reports = []
        while not experiment.done:
            reports.append(experiment.step())
        refused = {id for report in reports for id in [*report.rejected, *report.lost]}
        return hash_tensors(experiment.server.model.state_dict()), refused, reports[-1].by_client

    def on_ray(method):
        fleet._setup = make_setup(config, method)
        fleet._private.clear()
        return finish(Experiment(fleet._setup, tiny_task, fleet, CPU, tmp_path))

    for method in (Hostile, Judged):
        for kind in [*(KINDS if method is Hostile else COUNTS)][::every]:
            here = finish(make_experiment(config, tiny_task, tmp_path, method(kind=kind)))
            assert on_ray(method(kind=kind)) == here, kind
