"""The importance of a search's settings."""

import random
from dataclasses import replace

import pytest
from test_plan import BASE, plan, run, size_of

from tune.asha import Outcome
from tune.plan import SearchState
from tune.records import Score, TrialRecord
from tune.report.importance import _scores_of_one_step, importance
from tune.space import Grid


def searched(**changes):
    settings = plan(samples=27, searcher="random", **changes)
    return settings, run(SearchState(settings, size_of), random.Random(0), 3)


@pytest.mark.slow
@pytest.mark.parametrize("scheduler", ["none", "asha"])
def test_the_setting_that_decides_the_scores_has_nearly_all_importance(scheduler):
    settings, state = searched(scheduler=scheduler)
    shares = importance(settings, state, "fedprox")
    assert list(shares) == ["local.lr", "method.mu"]
    assert shares["local.lr"] > 0.8
    assert sum(shares.values()) == pytest.approx(1)


@pytest.mark.slow
def test_it_does_not_depend_on_the_timing_of_the_trials():
    settings, state = searched(scheduler="asha")
    other = run(SearchState(settings, size_of), random.Random(5), 2)
    assert importance(settings, other, "fedprox") == importance(settings, state, "fedprox")


def test_trials_are_compared_after_the_last_step_that_nearly_all_of_them_reached():
    records = [TrialRecord(f"t{number}", "fedprox", {}, BASE, 9) for number in range(9)]
    for number, record in enumerate(records):
        scores = {1: number / 10, 10: 1 - number / 10} | ({30: 0.5} if number < 8 else {})
        record.scores = {step: Score(step, "round", value, 0, {}, {}) for step, value in scores.items()}
    found = _scores_of_one_step(records)  # eight of nine are fewer than nine tenths
    assert found == {f"t{number}": 1 - number / 10 for number in range(9)}


def test_scores_that_do_not_count_have_no_say_in_the_importance():
    records = [TrialRecord(f"t{number}", "fedprox", {}, BASE, 9) for number in range(9)]
    for number, record in enumerate(records):
        # all were stopped in round 1, and ran to round 3 until that was known
        scores = [Score(1, "rehearsal", number / 10, 0, {}, {}), Score(2, "proxy", 0.5, 0, {}, {})]
        record.scores = {score.step: score for score in [*scores, Score(3, "rehearsal", 0.6, 0, {}, {})]}
        record.outcome = Outcome("stopped", 1, number / 10)
    assert _scores_of_one_step(records) == {f"t{number}": number / 10 for number in range(9)}
    for record in records:
        record.outcome = Outcome("stopped", 2, 0.5)
    assert _scores_of_one_step(records) == {f"t{number}": number / 10 for number in range(9)}


def test_too_few_trials_or_settings_have_none():
    few = plan(samples=5, searcher="random")
    assert importance(few, run(SearchState(few, size_of), random.Random(0), 1), "fedprox") == {}
    space = plan().spaces["fedprox"]
    one = replace(few, samples=12, spaces={"fedprox": {"local.lr": space["local.lr"]}})
    assert importance(one, run(SearchState(one, size_of), random.Random(0), 1), "fedprox") == {}


def test_settings_of_a_grid_are_left_out():
    space = plan().spaces["fedprox"] | {"local.momentum": Grid((0.0, 0.9))}
    settings = plan(samples=10, searcher="random", scheduler="none", spaces={"fedprox": space})
    state = run(SearchState(settings, size_of), random.Random(0), 1)
    assert set(importance(settings, state, "fedprox")) == {"local.lr", "method.mu"}
