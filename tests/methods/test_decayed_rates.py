"""A learning rate that falls over the rounds falls in all of a method's formulas, not in its local SGD alone."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from small_runs import QUICK

from raylt.contract.case import Case
from raylt.contract.trace import fingerprint, private_states
from raylt.core.checkpoint import checkpoint
from raylt.methods import METHODS

# papers' methods, and those that read the rate outside of `sgd`; the other methods run with the slow tests
QUICKLY = ("sfd", "scaffold", "mupfl", "bpfed", "apfl", "pfedme", "qfedavg", "fedrela", "fedetf")
RATE = 0.2


def second_round(case: Case, folder: Path, **local: Any) -> str:
    """Run a round at the rate 0.2 and a second one with other settings of local training; return the state after it.

    The state has the server's and all clients'.
    """
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    first = case.experiment(case.config(local={"batch": 8, "lr": RATE}))
    first.save(first.step())
    saved, _ = checkpoint.latest(folder / "checkpoints")
    assert saved is not None
    experiment = case.experiment(case.config(local={"batch": 8, **local}))
    experiment.load(saved)
    experiment.step()
    server = experiment.server
    return fingerprint(
        {"model": server.model.state_dict(), "state": server.state, "clients": private_states(experiment)}
    )


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICKLY else pytest.mark.slow) for name in METHODS]
)
def test_a_second_round_at_half_the_rate_is_one_with_half_the_rate_as_its_setting(name, tmp_path):
    method = METHODS[name](**QUICK.get(name, {}))
    case = Case(method, method.problems[0], tmp_path)
    falling = second_round(case, tmp_path, lr=RATE, lr_decay=0.5)
    assert falling == second_round(case, tmp_path, lr=RATE / 2)
    assert falling != second_round(case, tmp_path, lr=RATE)
