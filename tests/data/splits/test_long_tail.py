import numpy as np
import pytest
from refusals import refused

from raylt.data.splits.long_tail import long_tail_counts, long_tail_subset, shot_groups
from raylt.errors import DataError

CIFAR10 = {
    100: [5000, 2997, 1796, 1077, 645, 387, 232, 139, 83, 50],
    50: [5000, 3237, 2096, 1357, 878, 568, 368, 238, 154, 100],
    10: [5000, 3871, 2997, 2320, 1796, 1391, 1077, 834, 645, 500],
}


# totals and smallest classes as published for CIFAR-10, CIFAR-100, Fashion-MNIST and CINIC-10
@pytest.mark.parametrize(
    ("n_max", "classes", "imbalance", "total", "smallest"),
    [
        (5000, 10, 10, 20431, 500),
        (5000, 10, 50, 13996, 100),
        (5000, 10, 100, 12406, 50),
        (500, 100, 10, 19573, 50),
        (500, 100, 50, 12608, 10),
        (500, 100, 100, 10847, 5),
        (6000, 10, 10, 24516, 600),
        (6000, 10, 50, 16796, 120),
        (6000, 10, 100, 14886, 60),
        (9000, 10, 10, 36779, 900),
        (9000, 10, 50, 25197, 180),
        (9000, 10, 100, 22332, 90),
    ],
)
def test_counts_equal_the_published_ones(n_max, classes, imbalance, total, smallest):
    counts = long_tail_counts(np.full(classes, n_max), imbalance)
    assert (counts.sum(), counts.min(), counts.max()) == (total, smallest, n_max)


@pytest.mark.parametrize("imbalance", CIFAR10)
def test_counts_of_cifar10_equal_the_published_ones_class_by_class(imbalance):
    assert long_tail_counts(np.full(10, 5000), imbalance).tolist() == CIFAR10[imbalance]


@pytest.mark.parametrize("imbalance", CIFAR10)
def test_thinned_data_can_be_thinned_again_as_if_they_were_whole(imbalance):
    assert long_tail_counts(np.array(CIFAR10[10]), imbalance).tolist() == CIFAR10[imbalance]


def test_a_small_class_lowers_the_largest_one():
    # ratios 1, 1/2, 1/4; class 1 has 5 samples, so int(n / 2) <= 5 allows n = 11: 11, int(5.5) = 5, int(2.75) = 2
    assert long_tail_counts(np.array([100, 5, 100]), 4).tolist() == [11, 5, 2]


def test_imbalance_1_and_a_single_class_keep_the_data():
    assert long_tail_counts(np.array([3, 9, 4]), 1).tolist() == [3, 9, 4]
    assert long_tail_counts(np.array([7]), 50).tolist() == [7]


def test_an_imbalance_below_1_is_refused():
    with refused("config.out-of-range", DataError, key="data.imbalance", value=0.5):
        long_tail_counts(np.array([3, 3]), 0.5)


def test_a_class_left_empty_is_named_with_the_largest_imbalance_that_works():
    available = np.array([30, 30, 30])
    # int(30 / IF) stays at least 1 up to IF = 30
    with refused("data.too-few", DataError, key="data.imbalance", value=31, largest=30):
        long_tail_counts(available, 31)
    assert long_tail_counts(available, 30).min() == 1


@pytest.mark.parametrize("imbalance", [1, 2])
def test_a_class_that_was_empty_before_is_named(imbalance):
    with refused("data.too-few", DataError, class_index=1):
        long_tail_counts(np.array([4, 0, 4]), imbalance)


def test_subset_has_the_counts_and_depends_on_the_seed_alone():
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(5), 80))
    subset = long_tail_subset(labels, 10, 5, seed=3)
    assert np.bincount(labels[subset]).tolist() == long_tail_counts(np.full(5, 80), 10).tolist()
    assert (np.diff(subset) > 0).all()
    assert subset.tolist() == long_tail_subset(labels, 10, 5, seed=3).tolist()
    assert subset.tolist() != long_tail_subset(labels, 10, 5, seed=4).tolist()


def test_subset_by_size_keeps_the_largest_class_the_largest():
    labels = np.repeat(np.arange(3), [20, 100, 60])
    counts = [
        np.bincount(labels[long_tail_subset(labels, 4, 3, 0, by_size)]).tolist() for by_size in (True, False)
    ]  # ratios 1, 1/2, 1/4
    assert counts == [[20, 83, 41], [20, 10, 5]]
    equal = np.repeat(np.arange(3), [100, 100, 60])  # of two classes of one size, the first stays larger
    assert np.bincount(equal[long_tail_subset(equal, 4, 3, 0, by_size=True)]).tolist() == [100, 50, 25]


def test_the_thresholds_themselves_are_medium():
    assert shot_groups(np.array([101, 100, 20, 19]), 20, 100) == ["many", "medium", "medium", "few"]


def test_groups_of_the_long_tailed_sets_have_the_published_sizes():
    cifar10 = shot_groups(np.array(CIFAR10[100]), 200, 1000)
    assert [cifar10.count(g) for g in ("many", "medium", "few")] == [4, 3, 3]
    for imbalance, sizes in ((100, [35, 35, 30]), (50, [41, 41, 18]), (10, [69, 31, 0])):
        cifar100 = shot_groups(long_tail_counts(np.full(100, 500), imbalance), 20, 100)
        assert [cifar100.count(g) for g in ("many", "medium", "few")] == sizes
