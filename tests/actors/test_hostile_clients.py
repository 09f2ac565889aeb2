"""Hostile clients have the same outcome on Ray as in one process."""

import hostile
import pytest
from hostile import COUNTS, KINDS, Hostile, Judged
from ray import cloudpickle
from tiny import CPU, make_setup
from tiny import configure as tiny_configure

from raylt.core.checkpoint.checkpoint import hash_tensors
from raylt.core.experiment import Experiment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
# what the way to another process could change
TRAVELLING = (
    *("an empty name", "a number for a name", "ten thousand names", "a dict in a dict in a dict ..."),
    *("a dict that holds itself", "names in another order", "nan", "bfloat16", "sparse", "quantised", "meta"),
    *("expanded", "expanded to 4 TB", "memory shared", "requires grad", "a subclass", "an object array"),
    *("a text that is not Unicode", "a function", "300 MB", "weight 10**5000", "no reply", "another class"),
    *("an exception", "a generator", "the end of the process", "a state of 4 TB"),
)
CONFIG = {"federation": {"rounds": 2, "retries": 0}, "evaluation": {"every": 9}}


@pytest.fixture
def by_value():
    """Pickle the module `hostile` by value, because actors cannot import it."""
    cloudpickle.register_pickle_by_value(hostile)
    yield
    cloudpickle.unregister_pickle_by_value(hostile)


@pytest.mark.parametrize(
    ("replies", "judgements"),
    [
        pytest.param(TRAVELLING, ("float", "none"), id="travelling"),
        pytest.param(tuple(KINDS), tuple(COUNTS), marks=pytest.mark.soak, id="all"),
    ],
)
def test_fleets_agree_on_hostile_clients(
    make_fleet, make_experiment, tiny_task, tmp_path, by_value, replies, judgements
):
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

    for method, kinds in ((Hostile, replies), (Judged, judgements)):
        for kind in kinds:
            local = finish(make_experiment(config, tiny_task, tmp_path, method(kind=kind)))
            assert on_ray(method(kind=kind)) == local, kind
