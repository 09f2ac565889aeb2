import numpy as np
import pytest

from raylt.data.heterogeneity import heterogeneity


def test_figures_by_hand():
    # pooled counts: 8 and 2 of 10. Clients: (4, 0), (4, 2), with class mixes (1, 0), (2/3, 1/3) against (0.8, 0.2)
    figures = heterogeneity(np.array([[4, 0], [4, 2], [0, 0]]))
    assert figures.imbalance == 4
    assert figures.sizes == 1.5
    assert figures.classes == 1.5
    assert figures.distance == pytest.approx((0.2 + 2 / 15) / 2)


def test_the_bounds_of_the_distance():
    assert heterogeneity(np.full((3, 4), 5)).distance == 0
    # 1 - 1 / 4, because each client is a part of the pooled mix
    assert heterogeneity(np.eye(4, dtype=int)).distance == 0.75


def test_a_class_that_nobody_holds_is_not_the_smallest():
    assert heterogeneity(np.array([[4, 0, 2], [2, 0, 0]])).imbalance == 3


def test_mix_of_all_is_that_of_all_samples_and_not_of_equal_clients():
    # the mix of all is (0.8, 0.2), from which the clients are 0.2, 0.8 and 0.8 away
    assert heterogeneity(np.array([[8, 0], [0, 1], [0, 1]])).distance == pytest.approx(0.6)
