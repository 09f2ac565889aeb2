from dataclasses import replace

import numpy as np
import pytest
from refusals import refused

from raylt.config import DataConfig
from raylt.data.sources.sources import open_source
from raylt.data.splits.check import complete, own_tests
from raylt.data.splits.draw import draw, hold_out, hold_out_validation, notes
from raylt.data.splits.new_clients import draw_new_clients
from raylt.data.splits.split import IndexLists
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


def test_a_class_of_few_samples_gives_one_to_the_validation_set_whose_rows_ascend():
    labels, parts = np.array([0, 0, 1, 1, 1, 0, 0, 0]), [np.array([1, 4, 6, 7]), np.array([0, 2, 3, 5])]
    for seed in range(8):
        kept, taken = hold_out_validation(parts, labels, 0.1, seed)
        assert np.bincount(labels[taken]).tolist() == [1, 1]
        assert [*taken, *kept[0], *kept[1]] == [*sorted(taken), *sorted(kept[0]), *sorted(kept[1])]


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
    for row, client in zip(carved.validation.ids, carved.validation_clients, strict=True):
        assert row in plain.shards[client].ids
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


@pytest.mark.parametrize(("samples", "share", "taken"), [(25, 0.1, 3), (24, 0.1, 2), (2, 0.9, 1), (1, 0.9, 0)])
def test_the_share_that_a_client_holds_out_is_rounded_half_up_and_never_the_last_sample(samples, share, taken):
    (rows,) = hold_out(np.zeros(samples), np.zeros(samples, np.int64), share, 0)
    assert len(rows) == taken


def test_a_client_that_would_get_no_test_sample_gives_one_of_its_largest_class():
    labels, ids = np.array([0, 0, 1, 1, 1, 0, 1]), np.array([2, 2, 2, 2, 2, 4, 4])
    first, second = hold_out(ids, labels, 0.1, 0)
    assert first.tolist() in ([2], [3], [4])
    assert second.tolist() == []  # it has one sample of each class


@pytest.fixture
def of_three(tmp_path):
    """Return a source of 90 images of two classes from three clients, in no order, without a test part."""
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (90, 2, 2, 1), dtype=np.uint8), rng.permutation(np.arange(90) % 2)
    arrays = {"x_train": x, "y_train": y, "x_test": x[:1], "y_test": y[:1], "id_train": rng.permutation(90) % 3}
    np.savez(tmp_path / "it.npz", class_names=np.array(["a", "b"]), **arrays)
    source = open_source(DataConfig(source=f"npz:{tmp_path / 'it.npz'}"))
    return replace(source, x_test=source.x_test[:0], y_test=source.y_test[:0])


def test_clients_by_id_hold_and_test_their_own_samples_of_a_long_tail(of_three):
    split = draw(of_three, DataConfig(imbalance=3.0, partition="by_id", clients=3))
    for k in range(3):
        assert set(of_three.ids[split.clients[k]]) == set(of_three.ids[split.test[k]]) == {k}
    assert sum(map(len, split.clients)) < 90 - sum(map(len, split.test))
    assert not np.isin(np.concatenate(split.clients), np.concatenate(split.test)).any()


def test_each_id_is_a_client_unless_a_number_of_clients_or_another_partition_is_set(of_three):
    counts = [
        len(draw(of_three, DataConfig(source=of_three.name, imbalance=1.0, **settings)).clients)
        for settings in ({}, {"partition": "iid"}, {"partition": "iid", "clients": 4})
    ]
    assert counts == [3, 10, 4]


def test_clients_without_samples_do_not_join_after_training():
    clients = [np.arange(2), np.arange(0), np.arange(0), np.arange(2, 4), np.arange(4, 9)]
    drawn = {draw_new_clients(clients, DataConfig(new_clients=2, seed=seed)) for seed in range(20)}
    assert drawn == {(0, 3), (0, 4), (3, 4)}
    with refused("data.too-few", DataError, key="data.new_clients", value=3):
        draw_new_clients(clients, DataConfig(new_clients=3))


def test_clients_without_a_test_image_of_their_own_are_noted(of_three):
    def lines(*sizes):
        own = IndexLists.of([np.arange(size) for size in sizes])
        split = draw(of_three, DataConfig(source=of_three.name, imbalance=1.0))
        return [line for line in notes(of_three, split, of_three.y_train, own) if "of its own" in line]

    assert lines(1, 1, 2) == []
    assert lines(1, 0, 2) == ["1 of 3 clients has no test image of its own: 1"]


def test_samples_of_a_long_tail_are_dealt_by_their_own_labels(of_three):
    split = draw(of_three, DataConfig(imbalance=3.0, partition="pathological", clients=2, per_client=1))
    assert sorted(np.unique(of_three.y_train[rows]).tolist() for rows in split.clients) == [[0], [1]]


@pytest.mark.parametrize("key", ["test", "test_share"])
def test_a_test_part_has_the_share_that_is_set_and_depends_on_the_seed(of_three, key):
    source = of_three if key == "test" else replace(of_three, ids=None)
    parts = [
        draw(source, DataConfig(imbalance=1.0, seed=seed, **{key: share})).test.flat.tolist()
        for share, seed in ((0.2, 0), (0.2, 0), (0.6, 0), (0.2, 1))
    ]
    assert len(parts[2]) == pytest.approx(3 * len(parts[0]), abs=3)
    assert parts[0] == parts[1]
    assert sorted(parts[0]) != sorted(parts[3])


def test_a_client_without_test_images_has_an_empty_list_at_its_place(of_three):
    tests = {"x_test": of_three.x_train[:4], "y_test": of_three.y_train[:4], "test_ids": np.array([2, 0, 2, 2])}
    source = replace(of_three, **tests)
    split = draw(source, DataConfig(partition="by_id", clients=3))
    assert [rows.tolist() for rows in own_tests(source, split)] == [[1], [], [0, 2, 3]]
    assert own_tests(source, replace(split, partition="imported")) is None  # its clients may be others than the ids


@pytest.mark.parametrize("pooled", [True, False])
def test_the_share_of_a_test_part_is_recorded_under_its_own_setting(of_three, pooled):
    source = replace(of_three, ids=None) if pooled else of_three
    recorded = complete(DataConfig(), draw(source, DataConfig(imbalance=1.0)))
    assert (recorded.test_share, recorded.test) == ((0.2, None) if pooled else (None, 0.2))


@pytest.mark.parametrize("tail", ["global", "local"])
def test_a_saved_split_is_recorded_with_the_tail_that_it_was_drawn_with(of_three, tail):
    split = draw(of_three, DataConfig(imbalance=1.0, tail=tail))
    for configured in ("global", "local", "mixed"):
        assert complete(DataConfig(split="split.json", tail=configured), split).tail == tail
