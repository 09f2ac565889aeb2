import math
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
from sklearn import metrics as sk
from torch import tensor

from raylt.metrics import (
    accuracy,
    as_seen,
    by_client,
    class_accuracy,
    class_figures,
    client_figures,
    confusion,
    group_accuracy,
    macro,
    matched_accuracy,
    mean_iou,
    owned_accuracy,
    owned_iou,
    packed,
    pooled,
    quality,
    seen_by_each,
    unpacked,
    wilson_interval,
    worst_decile,
)

C = 7
# of class 0, 4 of 5 samples are right; of class 1, 1 of 2; class 2 has no test sample
BY_HAND = tensor([[4, 1, 0], [1, 1, 0], [0, 0, 0]])


@pytest.fixture(params=range(5))
def labels(request) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(request.param)
    truth = rng.integers(0, C, 300)
    return np.where(rng.random(300) < 0.6, truth, rng.integers(0, C, 300)), truth


@pytest.fixture
def matrix(labels) -> torch.Tensor:
    predicted, truth = labels
    return confusion(torch.from_numpy(predicted), torch.from_numpy(truth), C)


def test_figures_equal_those_of_scikit_learn(labels, matrix):
    predicted, truth = labels
    assert np.array_equal(matrix.numpy(), sk.confusion_matrix(truth, predicted, labels=range(C)))
    assert accuracy(matrix) == pytest.approx(sk.accuracy_score(truth, predicted), abs=1e-12)
    assert macro(matrix) == pytest.approx(sk.balanced_accuracy_score(truth, predicted), abs=1e-12)
    assert mean_iou(matrix) == pytest.approx(sk.jaccard_score(truth, predicted, average="macro"), abs=1e-12)
    assert np.allclose(class_accuracy(matrix), sk.recall_score(truth, predicted, average=None), atol=1e-12)


def test_figures_of_each_class_equal_those_of_scikit_learn(labels, matrix):
    predicted, truth = labels
    precision, recall, f1, tested = sk.precision_recall_fscore_support(truth, predicted, labels=range(C))
    figures = class_figures(matrix)
    assert not np.allclose(matrix.sum(0), tested)  # otherwise precision would be recall
    for name, expected in (("precision", precision), ("recall", recall), ("f1", f1)):
        assert np.allclose(figures[name], expected, atol=1e-12)
    assert np.allclose(figures["iou"], sk.jaccard_score(truth, predicted, average=None), atol=1e-12)


def test_a_client_none_of_whose_classes_is_tested_is_not_judged_whatever_is_predicted():
    each = by_client({0: tensor([[5, 1], [0, 0]])}, tensor([[0, 3]]))
    assert {kind: values for kind, values in each.items() if values != [None]} == {}


def test_client_accuracies_equal_a_loop_over_test_samples(labels, matrix):
    predicted, truth = labels
    counts = [0, 3, 10, 0, 1, 0, 6]
    owned = matched = 0.0
    for c in range(C):
        right = [p == t for p, t in zip(predicted, truth, strict=True) if t == c]
        owned += (counts[c] > 0) * sum(right) / len(right) / 4
        matched += counts[c] / 20 * sum(right) / len(right)
    assert owned_accuracy(matrix, tensor(counts)) == pytest.approx(owned, abs=1e-12)
    assert matched_accuracy(matrix, tensor(counts)) == pytest.approx(matched, abs=1e-12)


def test_more_pixels_than_a_float_of_32_bits_can_count_are_weighed_exactly():
    counts = tensor([2**24 + 1, 2**24, 0])
    assert matched_accuracy(BY_HAND, counts).item() == (0.8 * (2**24 + 1) + 0.5 * 2**24) / (2**25 + 1)


def test_equal_counts_of_all_classes_make_owned_and_matched_the_macro_accuracy(matrix):
    counts = torch.full((C,), 5)
    assert owned_accuracy(matrix, counts) == pytest.approx(macro(matrix))
    assert matched_accuracy(matrix, counts) == pytest.approx(macro(matrix))


def test_group_accuracies_weighted_by_test_samples_average_to_the_overall(labels, matrix):
    predicted, truth = labels
    groups = ["many", "many", "medium", "medium", "medium", "few", "few"]
    figures = group_accuracy(matrix, groups)
    overall = 0.0
    for group, figure in figures.items():
        inside = np.isin(truth, [c for c in range(C) if groups[c] == group])
        assert figure == pytest.approx((predicted[inside] == truth[inside]).mean(), abs=1e-12)
        overall += inside.mean() * figure
    assert overall == pytest.approx(accuracy(matrix))


def test_group_without_classes_or_test_samples_has_no_accuracy():
    figures = group_accuracy(BY_HAND, ["many", "many", "few"])
    assert figures == {"many": pytest.approx(5 / 7), "medium": None, "few": None}


def test_classes_without_test_samples_are_left_out():
    assert class_accuracy(BY_HAND).tolist() == pytest.approx([0.8, 0.5, float("nan")], nan_ok=True)
    assert macro(BY_HAND) == pytest.approx(0.65)
    assert owned_accuracy(BY_HAND, tensor([3, 0, 9])) == pytest.approx(0.8)
    # (3 * 0.8 + 1 * 0.5) / 4
    assert matched_accuracy(BY_HAND, tensor([3, 1, 96])) == pytest.approx(0.725)
    # 4 / (4 + 1 + 1) and 1 / (1 + 1 + 1); class 2 occurs nowhere
    assert mean_iou(BY_HAND) == pytest.approx((4 / 6 + 1 / 3) / 2)


def test_accuracy_on_the_long_tailed_mix_weighs_classes_by_the_samples_of_all_clients():
    # clients' own models: the second one is right on all images
    matrices = {0: BY_HAND, 1: tensor([[5, 0, 0], [0, 2, 0], [0, 0, 0]])}
    counts = tensor([[8, 0, 0], [1, 1, 2]])
    each = by_client(matrices, counts)
    assert each["long_tailed"] == [pytest.approx((9 * 0.8 + 1 * 0.5) / 10), pytest.approx(1.0)]
    assert each["matched"] == [pytest.approx(0.8), pytest.approx(1.0)]


def test_confusion_leaves_out_ignored_pixels():
    truth = tensor([[0, 1, 255], [1, 255, 2]])
    predicted = tensor([[0, 2, 1], [1, 0, 2]])
    assert confusion(predicted, truth, 3, ignore=255).tolist() == [[1, 0, 0], [0, 1, 1], [0, 0, 1]]


def test_confusions_of_parts_add_up_to_that_of_the_whole(labels, matrix):
    predicted, truth = map(torch.from_numpy, labels)
    assert torch.equal(confusion(predicted[:99], truth[:99], C) + confusion(predicted[99:], truth[99:], C), matrix)


@pytest.mark.parametrize(("n", "lowest"), [(1, 1), (9, 1), (10, 1), (11, 2), (20, 2), (21, 3), (100, 10)])
def test_worst_decile_averages_the_lowest_tenth_rounded_up(n, lowest):
    values = np.random.default_rng(n).permutation(n) / n
    assert worst_decile(values.tolist()) == pytest.approx(np.sort(values)[:lowest].mean())


def test_client_figures_of_one_shared_model():
    # owned: 0.8 and (0.8 + 0.5) / 2; matched: 0.8 and (0.8 + 3 * 0.5) / 4; clients 2 and 3 hold no tested class
    counts = tensor([[2, 0, 0], [1, 3, 0], [0, 0, 0], [0, 0, 5]])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        each = by_client(seen_by_each(BY_HAND, None, range(4)), counts)
        figures = client_figures(each)
    assert each["owned"] == [pytest.approx(0.8), pytest.approx(0.65), None, None]
    assert each["matched"] == [pytest.approx(0.8), pytest.approx(0.575), None, None]
    # all clients together have samples 3, 3 and 5; class 2 is not tested
    assert each["long_tailed"] == [pytest.approx(0.65), pytest.approx(0.65), None, None]
    assert each["global"] == [pytest.approx(5 / 7), pytest.approx(5 / 7), None, None]
    assert figures["owned"] == {"mean": pytest.approx(0.725), "worst_decile": pytest.approx(0.65)}
    assert figures["matched"] == {"mean": pytest.approx((0.8 + 0.575) / 2), "worst_decile": pytest.approx(0.575)}
    assert figures["global"] == {"mean": pytest.approx(5 / 7), "worst_decile": pytest.approx(5 / 7)}


def test_figures_of_a_client_are_the_same_bits_with_however_many_others(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    matrices = {k: torch.randint(0, 30, (10, 10), generator=generator) for k in range(40) if k != 7}
    counts = torch.randint(0, 3, (40, 10), generator=generator)
    together = by_client(matrices, counts)
    alone = {k: by_client({k: matrix}, counts) for k, matrix in matrices.items()}
    assert together == {kind: [alone[k][kind][k] if k in alone else None for k in range(40)] for kind in together}
    shared = dict.fromkeys(matrices, matrices[0])
    same = by_client({k: matrix.clone() for k, matrix in shared.items()}, counts)
    assert by_client(shared, counts) == same
    # so that three clients, or thirty that share a matrix, are computed at once
    monkeypatch.setattr("raylt.metrics.CHUNK_CELLS", 300)
    assert by_client(matrices, counts) == together
    assert by_client(shared, counts) == same


def test_a_matrix_of_more_cells_than_are_computed_at_once_is_computed_alone(monkeypatch):
    monkeypatch.setattr("raylt.metrics.CHUNK_CELLS", 8)
    counts = tensor([[2, 0, 0], [1, 3, 0]])
    assert by_client({0: BY_HAND, 1: BY_HAND.clone()}, counts)["owned"] == pytest.approx([0.8, 0.65])


def test_client_figures_of_own_models_use_each_clients_own_matrix():
    counts = tensor([[2, 0, 0], [0, 3, 0], [1, 1, 0]])
    right = tensor([[5, 0, 0], [0, 2, 0], [0, 0, 0]])
    each = by_client({1: right, 0: BY_HAND}, counts)
    assert each["owned"] == [pytest.approx(0.8), 1.0, None]  # client 2 was not judged
    among_equals = by_client({0: BY_HAND, 1: right, 2: BY_HAND}, counts)  # the first and the last share a model
    assert among_equals["owned"][:2] == each["owned"][:2]
    figures = client_figures(each)
    assert figures["owned"] == {"mean": pytest.approx(0.9), "worst_decile": pytest.approx(0.8)}
    assert figures["global"] == {"mean": pytest.approx((1 + 5 / 7) / 2), "worst_decile": pytest.approx(5 / 7)}


@pytest.mark.parametrize("decimals", [0, 1, 8])  # the scores have two values, eleven values, and hardly any value twice
def test_the_area_under_the_curve_is_scikit_learns_to_the_bit(decimals):
    rng = np.random.default_rng(decimals)
    for n in (2, 3, 10, 333):
        truth, scores = rng.permutation(np.arange(n) % 3 > 0), rng.random((n, 1)).round(decimals)
        shares = torch.from_numpy(np.hstack([1 - scores, scores]))
        found = quality(shares, torch.from_numpy(truth.astype(np.int64)))
        assert found["auc"] == (sk.roc_auc_score(~truth, shares[:, 0]) + sk.roc_auc_score(truth, shares[:, 1])) / 2


@pytest.mark.slow
def test_no_figure_imports_scikit_learn():
    code = (
        "import sys, torch; from raylt.metrics import quality; quality(torch.tensor([[.2, .8], [.6, .4]]), "
        "torch.tensor([1, 0])); assert 'sklearn' not in sys.modules and 'pandas' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# label maps


@pytest.mark.parametrize("seed", range(4))
def test_figures_of_maps_with_ignored_pixels_equal_brute_force_and_scikit_learn(seed):
    rng = np.random.default_rng(seed)
    truth = rng.choice([0, 1, 2, 4, 5, 255], (3, 20, 30))  # class 3 occurs in predictions only, class 6 nowhere
    predicted = np.where(rng.random(truth.shape) < 0.6, np.minimum(truth, 5), rng.integers(0, 6, truth.shape))
    matrix = confusion(torch.from_numpy(predicted), torch.from_numpy(truth), C, ignore=255)
    labelled = truth != 255
    ious, accuracies = [], []
    for c in range(C):
        of_class, as_class = labelled & (truth == c), labelled & (predicted == c)
        if (of_class | as_class).any():
            ious.append((of_class & as_class).sum() / (of_class | as_class).sum())
        if of_class.any():
            accuracies.append((of_class & as_class).sum() / of_class.sum())
    assert len(ious) == 6
    assert mean_iou(matrix) == pytest.approx(np.mean(ious), abs=1e-12)
    assert macro(matrix) == pytest.approx(np.mean(accuracies), abs=1e-12)
    assert accuracy(matrix) == pytest.approx((truth == predicted)[labelled].mean(), abs=1e-12)
    flat = truth[labelled], predicted[labelled]
    assert mean_iou(matrix) == pytest.approx(sk.jaccard_score(*flat, average="macro", labels=range(6)), abs=1e-12)


@pytest.mark.parametrize("seed", range(4))
def test_counts_as_seen_are_those_of_relabelled_maps(seed):
    rng = np.random.default_rng(seed)
    truth, predicted = torch.from_numpy(rng.integers(0, C, (2, 2, 10, 10)))
    view = tensor([6, 1, 2, 6, 6, 6, 6])
    assert torch.equal(as_seen(confusion(predicted, truth, C), view), confusion(view[predicted], view[truth], C))


def test_each_client_judges_the_classes_it_keeps_and_background():
    # the truth has 4 pixels of class 0, 4 of class 1 and 2 of class 2; class 3 is background
    matrix = tensor([[3, 1, 0, 0], [0, 2, 1, 1], [0, 1, 1, 0], [0, 0, 0, 0]])
    views = np.array([[0, 3, 3, 3], [3, 1, 3, 3], [0, 1, 2, 3]])
    seen = seen_by_each(matrix, views, [0, 1, 2])
    assert seen[0].tolist() == [[3, 0, 0, 1], [0] * 4, [0] * 4, [0, 0, 0, 6]]
    assert seen[1].tolist() == [[0] * 4, [0, 2, 0, 2], [0] * 4, [0, 2, 0, 4]]
    assert torch.equal(seen[2], matrix)
    counts = tensor([[5, 0, 0, 9], [0, 5, 0, 5], [1, 1, 0, 0]])
    each = by_client(seen, counts)
    # (3 / 4 + 6 / 7) / 2; (2 / 6 + 4 / 8) / 2; (3 / 4 + 2 / 6) / 2: the third client holds classes 0 and 1
    assert each["miou"] == pytest.approx([(3 / 4 + 6 / 7) / 2, (2 / 6 + 4 / 8) / 2, (3 / 4 + 2 / 6) / 2])
    assert each["global"] == pytest.approx([0.9, 0.6, 0.6])
    assert each["matched"][0] == pytest.approx((5 * 3 / 4 + 9 * 1) / 14)
    assert owned_iou(seen[0], counts[0]) == each["miou"][0]


def test_wilson_interval_is_that_of_the_score_test():
    low, high = wilson_interval(1.0, 1)
    assert (low, high) == (pytest.approx(0.2065, abs=1e-4), 1.0)
    low, high = wilson_interval(0.0, 10)
    assert (low, high) == (0.0, pytest.approx(0.2775, abs=1e-4))
    assert wilson_interval(0.0, 27)[0] == 0.0  # by rounding errors it would be below 0
    assert wilson_interval(1.0, 16)[1] == 1.0
    for share, n in ((0.3, 10), (0.5, 40), (0.81, 99)):
        for bound in wilson_interval(share, n):
            # the observed share is 1.96 standard deviations away from each bound
            deviation = (bound * (1 - bound) / n) ** 0.5
            assert abs(share - bound) == pytest.approx(1.959964 * deviation, rel=1e-6)


def test_pooled_counts_are_the_sum_whichever_clients_share_a_matrix():
    one, other = tensor([[3, 1], [0, 2]]), tensor([[1, 0], [5, 4]])
    before = one.clone()
    assert torch.equal(pooled([one, other, one]), one + other + one)
    assert torch.equal(pooled([one, one, other, other, other]), 2 * one + 3 * other)
    assert torch.equal(pooled(iter([other])), other)
    assert torch.equal(one, before)


def test_calibration_error_is_the_weighted_mean_of_the_gaps_of_bins():
    """In loops over the bins, some of which are too sure and some not sure enough, which must not cancel."""
    generator = torch.Generator().manual_seed(0)
    shares, truth = torch.randn(200, 4, generator=generator).softmax(1), torch.randint(4, (200,), generator=generator)
    sure, likeliest = (part.tolist() for part in shares.double().max(1))
    right = [float(a == b) for a, b in zip(likeliest, truth.tolist(), strict=True)]
    gaps = []
    for low in range(15):
        rows = [i for i in range(200) if low / 15 < sure[i] <= (low + 1) / 15]
        gaps.append(sum(sure[i] for i in rows) - sum(right[i] for i in rows))
    assert min(gaps) < 0 < max(gaps)
    expected = sum(abs(gap) for gap in gaps) / 200
    assert quality(shares, truth)["calibration_error"] == pytest.approx(expected, abs=1e-9)


def test_a_probability_on_the_edge_of_two_bins_is_in_the_lower_one():
    """In one bin 1/2 - 1 and 3/8 - 0 add up to -1/8; in two bins they would count 7/8."""
    shares, truth = tensor([[0.5, 0.25, 0.25], [0.375, 0.3125, 0.3125]]), tensor([0, 1])
    assert quality(shares, truth, bins=2)["calibration_error"] == pytest.approx(1 / 8 / 2)


def test_a_class_that_all_samples_have_has_no_area():
    assert quality(tensor([[0.2, 0.8], [0.6, 0.4]]), tensor([1, 1]))["auc"] is None


def test_classes_without_an_area_are_left_out_of_the_mean():
    two, truth = tensor([[0.2, 0.8], [0.6, 0.4], [0.7, 0.3]]), tensor([1, 0, 1])
    three = torch.cat([two, torch.zeros(3, 1)], 1)  # a class without a sample
    assert quality(three, truth)["auc"] == quality(two, truth)["auc"] == 0.5


def test_probabilities_that_are_not_numbers_have_no_quality():
    assert quality(tensor([[0.5, 0.5], [math.nan, math.nan]]), tensor([0, 1])) is None


def test_truth_values_of_another_number_or_alphabet_are_refused():
    text = packed(torch.ones(16, dtype=torch.bool))
    for wrong, n in ((text, 8), (text, 17), (f"*{text}", 16)):
        with pytest.raises(ValueError, match=r"hold|alphabet|base64"):
            unpacked(wrong, n)


def test_a_client_none_of_whose_own_images_is_labelled_has_no_accuracy_on_them():
    matrices, counts = {0: torch.eye(2, dtype=torch.int64)}, tensor([[3, 1]])
    assert by_client(matrices, counts, {0: torch.zeros(2, 2, dtype=torch.int64)})["local"] == [None]
    assert by_client(matrices, counts, {0: tensor([[1, 1], [0, 2]])})["local"] == [0.75]
    # of eight images seven are right, and a class with two of them weighs no more
    assert by_client(matrices, counts, {0: tensor([[1, 1], [0, 6]])})["local"] == [0.875]
