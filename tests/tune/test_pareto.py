"""The Pareto front of trials and its plot."""

import io

import pytest
from PIL import Image

from tune import draw_pareto, pareto_front
from tune.ray_search import _with_front

TRIALS = [
    {"accuracy": 0.9, "few": 0.1},
    {"accuracy": 0.8, "few": 0.4},
    {"accuracy": 0.7, "few": 0.3},  # worse than the second in both
    {"accuracy": 0.8, "few": 0.2},  # equal to the second in one, worse in the other
    {"accuracy": 0.6, "few": 0.5},
    {"accuracy": 0.95, "few": None},
    {},
]


def test_the_front_has_the_trials_that_no_other_exceeds_best_first():
    assert pareto_front(TRIALS, ("accuracy", "few")) == [0, 1, 4]


def test_equal_trials_are_all_on_the_front():
    assert pareto_front([{"a": 1.0, "b": 1.0}, {"a": 1.0, "b": 1.0}], ("a", "b")) == [0, 1]


def test_a_picture_of_three_metrics_has_a_panel_for_each_other_metric():
    trials = [{"accuracy": 0.9, "few": 0.1, "local": 0.5}, {"accuracy": 0.8, "few": 0.4, "local": 0.6}]
    sizes = [
        Image.open(io.BytesIO(draw_pareto(trials, metrics, ("a", "b")))).size
        for metrics in (("accuracy", "few"), ("accuracy", "few", "local"))
    ]
    assert sizes[1] == (sizes[0][0], 2 * sizes[0][1])


@pytest.mark.parametrize("trials", [TRIALS, TRIALS[:1], []])
def test_the_picture_is_drawn_for_any_number_of_trials(trials):
    picture = draw_pareto(trials, ("accuracy", "few"), [str(index) for index in range(len(trials))])
    assert Image.open(io.BytesIO(picture)).size > (600, 400)


def test_a_trial_that_failed_or_was_stopped_is_on_no_front():
    rows = [
        {"trial": "a", "round": 4, "accuracy": 0.5, "few": 0.1, "failed": None},
        {"trial": "b", "round": 4, "accuracy": 0.4, "few": 0.2, "failed": None},
        {"trial": "stopped", "round": 2, "accuracy": 0.6, "few": 0.3, "failed": None},
        {"trial": "failed", "round": 4, "accuracy": 0.6, "few": 0.3, "failed": "out of memory"},
        {"trial": "worse", "round": 4, "accuracy": 0.4, "few": 0.1, "failed": None},
    ]
    marked = _with_front(rows, ["accuracy", "few"])
    assert [row["trial"] for row in marked if row["front"]] == ["a", "b"]
