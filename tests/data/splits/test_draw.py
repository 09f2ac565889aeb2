import numpy as np
import pytest
from refusals import refused

from raylt.config import DataConfig
from raylt.data.splits.draw import hold_out, hold_out_validation
from raylt.data.task import build_task
from raylt.errors import DataError

DIGITS = DataConfig(validation=0.2, clients=6)


@pytest.mark.parametrize("seed", range(10))
def test_carve_is_disjoint_stratified_and_keeps_clients_and_single_samples(seed):
    rng = np.random.default_rng(seed)
    labels = rng.choice(6, 400, p=[0.5, 0.25, 0.12, 0.08, 0.04, 0.01])
    labels[labels == 5] = 4
    labels[7] = 5  # a class with one sample
    parts = [np.sort(part) for part in np.split(rng.permutation(300), [100, 101, 160])]  # one client has one sample
    kept, held = hold_out_validation(parts, labels, 0.2, seed)
    assert sorted([*np.concatenate(kept), *held]) == list(range(300))
    assert all(
        set(after) <= set(before) and len(after) >= min(1, len(before))
        for after, before in zip(kept, parts, strict=True)
    )
    whole = np.bincount(labels[:300], minlength=6)
    expected = [min(max(1, round(0.2 * n)), n - 1) for n in whole]
    assert np.bincount(labels[held], minlength=6).tolist() == expected
    assert 7 not in held


def test_carve_is_a_function_of_its_seed():
    labels, parts = np.arange(100) % 5, [np.arange(50), np.arange(50, 100)]
    same, again, other = (hold_out_validation(parts, labels, 0.2, seed)[1].tolist() for seed in (1, 1, 2))
    assert same == again
    assert same != other


def test_hold_out_validation_never_takes_the_last_sample_of_a_client():
    labels, parts = np.zeros(5, dtype=int), [*(np.array([k]) for k in range(3)), np.array([3, 4])]
    kept, taken = hold_out_validation(parts, labels, 0.5, 0)
    assert [len(rows) for rows in kept] == [1, 1, 1, 1]
    assert taken.tolist() in ([3], [4])
    with refused("data.too-few", DataError, key="data.validation", value=0.5):
        hold_out_validation(parts[:3], labels, 0.5, 0)


def test_validation_comes_from_the_training_samples_and_leaves_the_rest_of_a_task_as_it_is():
    plain, carved = build_task(DIGITS.model_copy(update={"validation": 0.0})), build_task(DIGITS)
    assert plain.validation is None
    assert carved.validation is not None
    # round(0.2 n) of the long-tailed class sizes
    assert np.bincount(carved.validation.y).tolist() == [max(1, round(0.2 * n)) for n in plain.counts]
    assert (carved.counts + np.bincount(carved.validation.y) == plain.counts).all()
    assert np.array_equal(carved.test.x, plain.test.x)
    assert carved.groups == plain.groups
    assert carved.split.sha256 == plain.split.sha256
    before = {x.tobytes() for shard in plain.shards for x in shard.x}
    taken = [x.tobytes() for x in carved.validation.x]
    assert set(taken) <= before
    assert not {x.tobytes() for shard in carved.shards for x in shard.x} & set(taken)


def test_a_saved_split_is_carved_the_same(tmp_path):
    first = build_task(DIGITS)
    first.split.save(tmp_path / "split.json")
    again = build_task(DIGITS.model_copy(update={"split": str(tmp_path / "split.json")}))
    assert first.validation is not None
    assert again.validation is not None
    assert np.array_equal(first.validation.x, again.validation.x)
    assert (first.client_counts == again.client_counts).all()


def test_clients_alike_hold_out_samples_at_other_places():
    labels, ids = np.zeros(80, dtype=int), np.repeat([2, 3, 5, 7], 20)
    parts = hold_out(ids, labels, 0.5, 0)
    assert [len(rows) for rows in parts] == [10] * 4
    assert len({tuple(rows % 20) for rows in parts}) == 4
