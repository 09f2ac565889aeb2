"""The Pareto front of trials and its plot."""

import io

import numpy as np
import pytest
from PIL import Image

from tune import draw_pareto, pareto_front
from tune.ray_tune.search import _with_front

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


def test_a_figure_of_zero_is_a_figure():
    assert pareto_front([{"a": 0.0, "b": 1.0}, {"a": 0.5, "b": 0.5}], ("a", "b")) == [1, 0]


def test_a_picture_of_three_metrics_has_a_panel_for_each_other_metric():
    trials = [{"accuracy": 0.9, "few": 0.1, "local": 0.5}, {"accuracy": 0.8, "few": 0.4, "local": 0.6}]
    sizes = [
        Image.open(io.BytesIO(draw_pareto(trials, metrics, ("a", "b")))).size
        for metrics in (("accuracy", "few"), ("accuracy", "few", "local"))
    ]
    assert sizes[1] == (sizes[0][0], 2 * sizes[0][1])


def test_a_picture_has_the_front_as_steps_and_the_other_trials_as_points(monkeypatch):
    figures = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, *_, **__: figures.append(figure))
    names = [f"t{index}" for index in range(len(TRIALS))]
    draw_pareto(TRIALS, ("accuracy", "few"), names)
    [panel] = figures[0].axes
    third, fourth, steps, front = (list(zip(*map(np.ravel, line.get_data()), strict=True)) for line in panel.lines)
    assert third == [pytest.approx((70, 30))]
    assert fourth == [pytest.approx((80, 20))]
    assert steps == front == [pytest.approx(point) for point in [(90, 10), (80, 40), (60, 50)]]
    # as few as of the last trial with at least this accuracy
    assert panel.lines[2].get_drawstyle() == "steps-post"
    assert [text.get_text() for text in panel.texts] == ["t0", "t1", "t4"]
    with_local = [{"accuracy": 0.9, "few": 0.1, "local": 0.5}, {"accuracy": 0.8, "few": 0.4, "local": 0.6}]
    draw_pareto(with_local, ("accuracy", "few", "local"), names)
    assert [list(panel.lines[0].get_ydata()) for panel in figures[1].axes] == [
        pytest.approx([10, 40]),
        pytest.approx([50, 60]),
    ]


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
