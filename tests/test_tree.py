import copy
import warnings

import numpy as np
import pytest
import torch
from torch import tensor

from raylt.tree import RunningSum, Stamps, from_arrays, leaves, map_tensors, nbytes, snapshot, to, to_arrays


def mean(*weighted):
    fold = RunningSum()
    for tree, weight in weighted:
        fold.add(tree, weight)
    return fold.mean()


def total(*trees):
    fold = RunningSum()
    for tree in trees:
        fold.add(tree)
    return fold.sum()


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


def test_mean_is_weighted():
    # (1 * 2 + 3 * 6) / 4 = 5 for tensors, (1 * 0.5 + 3 * 1.5) / 4 = 1.25 for numbers
    result = mean(({"a": {"w": tensor([2.0])}, "loss": 0.5}, 1), ({"a": {"w": tensor([6.0])}, "loss": 1.5}, 3))
    assert result == {"a": {"w": tensor([5.0])}, "loss": 1.25}


def test_mean_adds_up_in_float64():
    # 2^24 + 1 + 1 = 16777218, and a third is 5592406; in float32 2^24 + 1 is 2^24, and the mean would be 5592405.5
    parts = [tensor([2.0**24]), tensor([1.0]), tensor([1.0])]
    assert (parts[0] + parts[1] + parts[2]).item() == 2**24
    assert mean(*(({"w": part}, 1) for part in parts))["w"].item() == 5592406.0


def test_sum_is_in_float64_and_adds_up_in_it():
    result = total({"w": tensor([2.0**24])}, {"w": tensor([1.0])}, {"w": tensor([1.0])})["w"]
    assert same(result, tensor([16777218.0], dtype=torch.float64))


@pytest.mark.parametrize("weight", [1, 3, 7, 10, 47, 12345, 2**29 - 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_mean_of_one_tree_is_that_tree_bit_for_bit(weight, dtype):
    # a float32 has 24 bits and the weight 29, which fit into the 53 bits of a float64, so the product is exact
    values = torch.randn(500, generator=torch.Generator().manual_seed(0)).to(dtype)
    values[:4] = tensor([0.0, 0.1, 1e-7, -3e4]).to(dtype)
    assert same(mean(({"w": values}, weight))["w"], values)


def test_mean_of_equal_trees_is_that_tree_bit_for_bit():
    values = torch.randn(500, generator=torch.Generator().manual_seed(1))
    assert same(mean(*(({"w": values}, weight) for weight in (20, 47, 33)))["w"], values)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_mean_has_the_type_of_the_replies(dtype):
    assert mean(({"w": torch.ones(2, dtype=dtype)}, 2), ({"w": torch.ones(2, dtype=dtype)}, 1))["w"].dtype == dtype


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_integers_take_the_maximum_in_a_mean_and_add_up_in_a_sum(dtype):
    first, second = {"n": tensor([1, 9], dtype=dtype)}, {"n": tensor([4, 2], dtype=dtype)}
    assert same(mean((first, 100), (second, 1))["n"], tensor([4, 9], dtype=dtype))
    assert same(total(first, second)["n"], tensor([5, 11]))


@pytest.mark.parametrize(("maximum", "expected"), [(False, [5, 11]), (True, [4, 9])])
def test_integers_of_two_running_sums_take_the_maximum_only_where_asked(maximum, expected):
    first, second = RunningSum(), RunningSum()
    first.add({"n": tensor([1, 9])})
    second.add({"n": tensor([4, 2])})
    first.merge(second, maximum)
    assert first.sum()["n"].tolist() == expected


def test_a_merged_sum_stays_as_it_is_when_more_is_merged_after_it():
    parts = [RunningSum() for _ in range(2)]
    for part, value in zip(parts, (1.0, 2.0), strict=True):
        part.add({"w": tensor([value])})
    whole = RunningSum()
    for part in parts:
        whole.merge(part, maximum=False)
    assert whole.sum()["w"].item() == 3.0
    assert [part.sum()["w"].item() for part in parts] == [1.0, 2.0]


def test_booleans_are_ored_in_a_mean_and_counted_in_a_sum():
    first, second = {"b": tensor([True, False, True])}, {"b": tensor([True, False, False])}
    assert same(mean((first, 1), (second, 1))["b"], tensor([True, False, True]))
    assert same(total(first, second)["b"], tensor([2, 0, 1]))


def test_small_integers_do_not_overflow_in_a_sum():
    assert total(*[{"n": tensor([200], dtype=torch.uint8)}] * 2)["n"].item() == 400


def test_keys_absent_from_some_trees_count_zero_in_a_sum():
    result = total(
        {"3": {"n": tensor(2), "z": tensor([1.0])}}, {"5": {"z": tensor([7.0])}, "k": 2}, {"3": {"z": tensor([0.5])}}
    )
    assert result == {"3": {"n": tensor(2), "z": tensor([1.5])}, "5": {"z": tensor([7.0])}, "k": 2}


@pytest.mark.parametrize("weight", [None, 2])
def test_fold_leaves_the_trees_it_adds_alone(weight):
    trees = [{"a": {"w": tensor([1.5]), "n": tensor([3])}, "x": 1.0} for _ in range(3)]
    before = copy.deepcopy(trees)
    fold = RunningSum()
    for tree in trees:
        fold.add(tree, weight)
    assert trees == before


def test_what_cannot_be_averaged_is_named():
    with pytest.raises(AssertionError, match="note: a str"):
        RunningSum().add({"note": "hello"}, 1)


def test_nbytes_counts_tensors_numbers_and_text():
    # 3 * 4 + 2 * 8 + 5 * 1 + 1 * 2 of tensors, 8 + 8 of numbers, 3 of the UTF-8 of "né", 0 of None
    tree = {
        "a": {"f": torch.zeros(3), "i": torch.zeros(2, dtype=torch.int64)},
        "b": torch.zeros(5, dtype=torch.bool),
        "h": torch.zeros((), dtype=torch.bfloat16),
        "x": 0.5,
        "k": 3,
        "s": "né",
        "none": None,
        "empty": {},
        "no": torch.zeros(0),
    }
    assert nbytes(tree) == 12 + 16 + 5 + 2 + 16 + 3


def test_nbytes_of_a_view_are_its_own():
    assert nbytes({"v": torch.zeros(100)[:3]}) == 12


def test_snapshot_does_not_follow_its_source():
    source = {"a": {"w": torch.ones(3, requires_grad=True)}, "k": 2}
    copied = snapshot(source)
    with torch.no_grad():
        source["a"]["w"].zero_()
    assert copied["a"]["w"].tolist() == [1, 1, 1]
    assert copied["k"] == 2
    assert not copied["a"]["w"].requires_grad


def test_to_shares_tensors_that_are_on_the_device_already():
    source = {"w": torch.ones(3)}
    assert to(source, torch.device("cpu"))["w"].data_ptr() == source["w"].data_ptr()


def test_leaves_have_dotted_paths_in_the_order_of_the_dicts():
    assert list(leaves({"b": {"y": 1, "x": None}, "a": "s", "e": {}})) == [("b.y", 1), ("b.x", None), ("a", "s")]


def test_map_tensors_keeps_other_leaves():
    result = map_tensors(lambda t: t + 1, {"a": {"w": tensor(1)}, "k": 1, "none": None})
    assert result == {"a": {"w": tensor(2)}, "k": 1, "none": None}


def test_arrays_round_trip():
    tree = {
        "a": {"f": torch.randn(2, 3), "zero": tensor(0.1), "empty": torch.zeros(0, 4)},
        "b": tensor([True, False]),
        "i": tensor([1, -2]),
        "u": tensor([255], dtype=torch.uint8),
        "h": torch.ones(2, dtype=torch.float16),
        "k": 3,
        "x": 0.1,
        "s": "text",
        "none": None,
        "e": {},
    }
    arrays = to_arrays(tree)
    assert isinstance(arrays["a"]["zero"], np.ndarray)
    back = from_arrays(arrays)
    assert list(back) == list(tree)
    for (path, was), (again, now) in zip(leaves(tree), leaves(back), strict=True):
        assert path == again
        assert same(was, now) if isinstance(was, torch.Tensor) else (was == now and type(was) is type(now)), path


def test_read_only_arrays_become_tensors_without_a_copy_or_a_warning():
    array = np.arange(3)
    array.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert from_arrays({"a": array})["a"].data_ptr() == array.ctypes.data


def test_tensors_of_one_key_are_forgotten_and_those_of_a_longer_key_are_not():
    stamps, tree = Stamps(), {"a": {"w": torch.zeros(1)}, "ab": torch.zeros(1)}
    stamps.add(tree, "state")
    stamps.forget("a", "state")
    tree["a"]["w"].add_(1)
    assert stamps.changed() is None
    tree["ab"].add_(1)
    assert stamps.changed() == "state.ab"
