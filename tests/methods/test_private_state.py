"""Values that clients keep between their calls are read again; else a step of the method would be forgotten."""

from pathlib import Path
from typing import Any

import pytest
from small_runs import QUICK

from raylt.contract.case import Case
from raylt.contract.trace import finish, private_states
from raylt.core.experiment import Experiment
from raylt.methods import METHODS

# with these fields, too, a value counts as read: Eq. 14's model then decides the next training, while by default it
# only judges, on few images
FIELDS: dict[str, dict[str, Any]] = {"mupfl": {"next_init": "cluster"}}

QUICKLY = ("sfd", "fedsm", "bpfed")  # the other methods run with the slow tests


def end(experiment: Experiment) -> tuple[Any, ...]:
    """Run the rest of an experiment; return its model and figures, or the error that ended it."""
    try:
        trace = finish(experiment)
    except Exception as error:  # what a client function raises is the fleet's error
        return (type(error).__name__,)
    figures = [(report.accuracy, report.clients, report.figures) for report in trace.reports]
    return trace.bits["model_sha256"], trace.bits["server"], str(figures)


def after_one_step(case: Case) -> Experiment:
    """Return an experiment with three of six clients in each of its four rounds, after the first round."""
    experiment = case.experiment(case.config(0.5, federation={"rounds": 4}, evaluation={"personal": 1}))
    experiment.step()
    return experiment


def unread(case: Case) -> set[str]:
    """Return the names of private values that the method keeps and whose loss changes nothing."""
    first = after_one_step(case)
    names = {name for state in private_states(first).values() for name in state.get("state", {})}
    whole = end(first)
    never = set()
    for name in sorted(names):
        experiment = after_one_step(case)
        for id, private in private_states(experiment).items():
            rest = {key: value for key, value in private["state"].items() if key != name}
            experiment.fleet.restore(id, {**private, "state": rest})
        if end(experiment) == whole:
            never.add(name)
    return never


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICKLY else pytest.mark.slow) for name in METHODS]
)
def test_every_private_value_is_read_again(name, tmp_path: Path):
    kind = METHODS[name]
    variants = [{}, FIELDS[name]] if name in FIELDS else [{}]
    never = [unread(Case(kind(**QUICK.get(name, {}) | each), kind.problems[0], tmp_path)) for each in variants]
    assert set.intersection(*never) == set()
