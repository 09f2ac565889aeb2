"""A learning rate that falls over the rounds falls in all of a method's formulas, not in its local SGD alone."""

from pathlib import Path
from typing import Any

import pytest
import torch
from refusals import refused
from small_runs import QUICK

import raylt
from raylt.contract.case import Case
from raylt.contract.trace import fingerprint, private_states
from raylt.core.checkpoint import checkpoint
from raylt.core.evaluation.evaluator import Evaluator
from raylt.errors import ConfigError
from raylt.methods import METHODS

# papers' methods, and those that read the rate outside of `sgd`; the other methods run with the slow tests
QUICKLY = ("sfd", "scaffold", "mupfl", "bpfed", "apfl", "pfedme", "qfedavg", "fedrela", "fedetf")
RATE = 0.2
# fields with which methods train clients by local SGD after the last round
LAST: dict[str, dict[str, Any]] = {
    "fedbabu": {"tune_epochs": 1},
    "fedrep": {},
    "fedetf": {},
    "mupfl": {"last_update": True},
}


@pytest.fixture(autouse=True)
def nothing_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave evaluations out, which take most of the time and change no state."""
    monkeypatch.setattr(Evaluator, "evaluate", lambda self, step, last, done: ({}, None))


def after_rounds(case: Case, folder: Path, rounds: int) -> checkpoint.Checkpoint:
    """Run rounds at the rate 0.2; return their checkpoint."""
    experiment = case.experiment(case.config(local={"batch": 8, "lr": RATE}))
    reports = [experiment.step() for _ in range(rounds)]
    experiment.save(reports[-1])
    saved, _ = checkpoint.latest(folder / "checkpoints")
    assert saved is not None
    return saved


def next_step(case: Case, saved: checkpoint.Checkpoint, **local: Any) -> str:
    """Run the step after a checkpoint with other settings of local training; return the state after it.

    The state has the server's and all clients'.
    """
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
    saved = after_rounds(case, tmp_path, 1)
    falling = next_step(case, saved, lr=RATE, lr_decay=0.5)
    assert falling == next_step(case, saved, lr=RATE / 2)
    assert falling != next_step(case, saved, lr=RATE)


@pytest.mark.parametrize("name", LAST)
def test_a_last_phase_of_local_training_has_the_rate_of_the_last_round(name, tmp_path):
    method = METHODS[name](**QUICK.get(name, {}) | LAST[name])
    case = Case(method, method.problems[0], tmp_path)
    saved = after_rounds(case, tmp_path, 2)
    falling = next_step(case, saved, lr=RATE, lr_decay=0.5)
    assert falling == next_step(case, saved, lr=RATE / 2)
    assert falling != next_step(case, saved, lr=RATE)


@pytest.mark.parametrize(
    ("name", "without"), [("fedbabu", {"tune_epochs": 0}), ("fedrep", None), ("fedetf", {"turns": 0}), ("mupfl", {})]
)
def test_a_last_phase_at_a_rate_of_almost_zero_is_refused(name, without, tmp_path):
    method = METHODS[name](**QUICK.get(name, {}) | LAST[name])
    case = Case(method, method.problems[0], tmp_path)
    cosine = case.config(local={"schedule": "cosine"})
    task, model = case.task, case.setup(cosine).new_model(case.task.spec)
    with refused("config.conflict", ConfigError, key="local.schedule", value="cosine"):
        method.prepare(task, cosine, model)
    method.prepare(task, case.config(), model)
    if without is not None:
        METHODS[name](**QUICK.get(name, {}) | without).prepare(task, cosine, model)


def pausing(local, round, rounds):
    """Return a learning rate of 0 in round 2."""
    return 0.0 if round == 2 else local.lr


@pytest.mark.parametrize("name", ["scaffold", "qfedavg", "fednova", "apfl", "pfedme"])
@pytest.mark.usefixtures("no_guests")
def test_round_at_a_rate_of_zero_moves_no_weight(name, tmp_path):
    raylt.register(pausing, kind="schedule")
    method = METHODS[name]()
    case = Case(method, method.problems[0], tmp_path)
    experiment = case.experiment(case.config(federation={"rounds": 3}, local={"batch": 8, "schedule": "pausing"}))
    ends = []
    for _ in range(3):
        report = experiment.step()
        assert report.lost == []
        assert report.rejected == {}
        ends.append([value.clone() for value in experiment.server.model.parameters()])
    first, second, third = ends
    assert all(torch.equal(before, after) for before, after in zip(first, second, strict=True))
    assert any(not torch.equal(before, after) for before, after in zip(second, third, strict=True))
