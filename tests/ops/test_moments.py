import math

import numpy as np
import pytest
import torch

from raylt.ops.moments import (
    class_scatter,
    class_sums,
    is_covariance,
    moments_fault,
    moments_from_sums,
    pack,
    packed_trace,
    perturb_along,
    pooled_means,
    scatter_fault,
    sums_fault,
    unpack,
    weighted_class_means,
)
from raylt.tree import RunningSum


@pytest.mark.parametrize("cuts", [[], [0, 0, 40], [1, 2, 60], [25, 25, 99]])
def test_moments_of_summed_parts_are_those_of_the_pooled_features(cuts):  # T-SFD-7
    rng = np.random.default_rng(0)
    z, y = rng.normal(3, 2, (100, 6)), rng.integers(0, 3, 100)
    fold = RunningSum()
    for part in np.split(np.arange(100), cuts):  # a part may be empty
        fold.add(class_sums(torch.from_numpy(z[part]), torch.from_numpy(y[part])))
    total = fold.sum()
    assert sorted(total) == [0, 1, 2]
    for c in range(3):
        n, mean, cov = moments_from_sums(total[c])
        own = z[y == c]
        assert n == len(own)
        assert np.allclose(mean, own.mean(0), atol=1e-12)
        assert np.allclose(cov, np.cov(own.T, bias=True), atol=1e-10)
        assert torch.equal(cov, cov.T)


def test_absent_classes_are_absent_from_the_sums():
    sums = class_sums(torch.ones(2, 3), torch.tensor([4, 4]))
    assert list(sums) == [4]
    assert sums[4]["zz"].shape == (6,)
    assert sums[4]["zz"].dtype == torch.float64


def test_one_sample_has_covariance_zero():
    _, mean, cov = moments_from_sums(class_sums(torch.tensor([[0.1, 0.7]]), torch.tensor([0]))[0])
    assert mean.tolist() == pytest.approx([0.1, 0.7])
    assert cov.abs().max() < 1e-15


def test_unpack_undoes_pack():
    matrix = torch.randn(5, 5, generator=torch.Generator().manual_seed(0))
    matrix = matrix + matrix.T
    assert pack(matrix).tolist()[:5] == matrix[0].tolist()
    assert torch.equal(unpack(pack(matrix), 5), matrix)


@pytest.mark.parametrize("cuts", [[], [0, 0, 40], [1, 2, 60], [25, 25, 99]])
def test_prototypes_of_any_partition_are_the_pooled_class_means(cuts):  # T-FSM-4
    rng = np.random.default_rng(0)
    z, y = rng.normal(3, 2, (100, 6)).astype(np.float32), rng.integers(0, 3, 100)
    fold = RunningSum()
    for part in np.split(np.arange(100), cuts):
        fold.add(weighted_class_means(torch.from_numpy(z[part]), torch.from_numpy(y[part])))
    pooled = pooled_means(fold.sum(), 5)
    assert pooled["present"].tolist() == [True, True, True, False, False]
    for c in range(3):
        assert np.allclose(pooled["means"][c], z[y == c].mean(0), atol=1e-6)
    assert not pooled["means"][3:].any()


def test_unit_prototypes_are_the_weighted_mean_of_directions():
    # one client has 3 samples with mean (0, 2), another has 1 with mean (0.5, 0): (3 (0, 1) + (1, 0)) / 4
    first = weighted_class_means(torch.tensor([[0.0, 1], [0, 2], [0, 3]]), torch.zeros(3, dtype=torch.int64), unit=True)
    second = weighted_class_means(torch.tensor([[0.5, 0]]), torch.zeros(1, dtype=torch.int64), unit=True)
    fold = RunningSum()
    for part in (first, second):
        fold.add(part)
    assert torch.allclose(pooled_means(fold.sum(), 1)["means"], torch.tensor([[0.25, 0.75]]))


def test_sums_are_those_of_features_where_no_direction_has_a_negative_variance():
    z = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))  # fewer samples than directions
    honest = class_sums(torch.cat([z, 1e3 + 1e-3 * z]), torch.tensor([0, 0, 0, 1, 1, 1]))
    assert moments_fault(honest) is None
    for name, wrong in (("zz", -honest[1]["zz"]), ("z", 10 * honest[1]["z"])):
        assert moments_fault(honest | {1: honest[1] | {name: wrong}}) == "has no covariance in class 1"


def test_sums_belong_to_as_many_features_of_no_more_than_the_bound():
    z = 3 * torch.nn.functional.normalize(torch.randn(6, 4, generator=torch.Generator().manual_seed(0)))
    honest = class_sums(z, torch.tensor([0, 0, 0, 0, 1, 1]))
    of_one = honest[1]
    assert sums_fault(6, {"classes": honest}, 3.0) is None
    assert sums_fault(6, {"classes": honest}, 2.0)
    lies = (
        {"n": 0},
        {"n": 7},
        {"n": 2**53},
        {"z": 3 * of_one["z"]},
        {"zz": 3 * of_one["zz"]},
        {"phi": torch.full((8,), 1.0)},
    )
    for lie in lies:
        assert sums_fault(6, {"classes": honest | {1: of_one | lie}}, 3.0), lie
    assert packed_trace(of_one["zz"], 4) == pytest.approx(2 * 9)
    for length, believed in ((9e3, True), (2e4, False)):  # without a bound, no feature is longer than 1e4
        sums = class_sums(torch.tensor([[length, 0.0]]), torch.tensor([0]))
        assert (sums_fault(1, {"classes": sums}) is None) == believed


@pytest.mark.parametrize("lie", ["z", "zz"])
def test_behind_a_relu_no_sum_is_negative(lie):
    z = torch.rand(6, 4, generator=torch.Generator().manual_seed(0))
    honest = class_sums(z, torch.tensor([0, 0, 0, 0, 1, 1]))
    wrong = honest | {1: honest[1] | {lie: -1e-3 * honest[1][lie]}}
    assert sums_fault(6, {"classes": honest}, 3.0, negative=False) is None
    assert sums_fault(6, {"classes": wrong}, 3.0, negative=False)


@pytest.mark.parametrize("weight", ["n", "n-1"])
def test_scatter_belongs_to_as_many_samples(weight):
    z = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    scatter, n = class_scatter(z, torch.tensor([0, 0, 0, 0, 1, 2]), weight)
    honest = {"scatter": pack(scatter).float(), "n": n}
    assert scatter_fault(6, honest, 5, weight, 4.0) is None
    most = 6 if weight == "n" else 5
    lies = (
        *({"n": n} for n in (most + 1, 7, 0, -1, 2**53)),
        {"scatter": -honest["scatter"]},
        {"scatter": 1e4 * honest["scatter"]},
    )
    for lie in lies:
        assert scatter_fault(6, honest | lie, 5, weight, 4.0), lie


def test_scatter_of_two_opposite_features_of_the_greatest_length_is_believed():
    scatter, n = class_scatter(torch.tensor([[3.0, 0.0], [-3.0, 0.0]]), torch.tensor([1, 1]), "n")
    assert scatter.trace().item() == pytest.approx(2 * 2 * 3**2)
    assert scatter_fault(2, {"scatter": pack(scatter).float(), "n": n}, 5, "n", 3.0) is None


@pytest.mark.parametrize("weight", ["n", "n-1"])
def test_scatter_is_the_weighted_sum_of_the_classes_covariances(weight):
    z = torch.randn(9, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = torch.tensor([2, 0, 0, 2, 0, 2, 0, 1, 2])
    weights = [4, 1, 4] if weight == "n" else [3, 0, 3]
    expected = sum(weights[c] * torch.cov(z[y == c].T) for c in (0, 2))
    scatter, total = class_scatter(z, y, weight)
    assert torch.allclose(scatter, expected)
    assert total == sum(weights)


@pytest.mark.parametrize("m", [0, 2, 5, 40])
def test_draws_along_rows_have_their_product_as_covariance(m):
    rows = torch.randn(m, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    n = 200_000
    drawn = perturb_along(rows, n, torch.Generator().manual_seed(0))
    covariance = rows.T @ rows
    # the standard error of an entry is below sqrt(2) * the largest variance / sqrt(n)
    bound = 5 * math.sqrt(2 / n) * covariance.diagonal().max().item()
    assert drawn.shape == (n, 5)
    assert (torch.cov(drawn.T) - covariance).abs().max() <= bound
    assert (drawn.mean(0).abs() <= 5 * (covariance.diagonal() / n).sqrt()).all()


def test_rounding_to_float32_does_not_make_a_covariance_impossible():
    z = 1e3 + 1e-3 * torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    matrix = unpack(pack(z.double().T @ z.double()).float().double(), 32)
    assert is_covariance(matrix, torch.float32)
    assert not is_covariance(matrix - 2 * torch.diag(matrix.diagonal()), torch.float32)
