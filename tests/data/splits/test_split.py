"""Indices and shards of many clients in a few arrays: they read as given, and each client costs little memory."""

import gc
import hashlib
import pickle
import tracemalloc

import numpy as np
import pytest
from refusals import refused
from tiny import make_scenes, make_task

from raylt.config import DataConfig
from raylt.data.images.cache import Mapped, load
from raylt.data.splits.split import IndexLists, Split, grouped, hash_labels
from raylt.data.task import Holdings, Shard, build_task
from raylt.errors import DataError

CLIENTS, EACH = 2500, 4


@pytest.fixture
def config(tmp_path):
    """Return the config of clients with four images of one pixel each, so that the split takes most of the memory."""
    rng, n = np.random.default_rng(0), CLIENTS * EACH
    np.savez(
        tmp_path / "many.npz",
        x_train=rng.integers(0, 256, (n, 1, 1, 1), dtype=np.uint8),
        y_train=np.arange(n) % 4,
        x_test=np.zeros((4, 1, 1, 1), np.uint8),
        y_test=np.arange(4),
        class_names=np.array(list("abcd")),
    )
    return DataConfig(source=f"npz:{tmp_path / 'many.npz'}", clients=CLIENTS, partition="iid", imbalance=1)


def test_index_lists_are_the_lists_that_were_given():
    lists = [np.array([3, 5]), np.array([], dtype=np.int64), np.array([1]), np.array([0, 2, 9])]
    made = pickle.loads(pickle.dumps(IndexLists.of(lists)))
    assert [rows.tolist() for rows in made] == [rows.tolist() for rows in lists]
    assert [rows.tolist() for rows in made[1:3]] == [[], [1]]
    assert (made[-1].tolist(), made.sizes.tolist(), len(made)) == ([0, 2, 9], [2, 0, 1, 3], 4)
    assert made[3].base is made.flat
    with pytest.raises(IndexError):
        made[4]
    assert len(IndexLists.of([])) == 0


def test_grouped_finds_the_places_of_each_id_in_order_and_no_others():
    rng = np.random.default_rng(0)
    ids, known = rng.integers(0, 30, 400), np.array([-1, 0, 3, 4, 29, 40])
    assert [rows.tolist() for rows in grouped(ids, known)] == [np.flatnonzero(ids == one).tolist() for one in known]


@pytest.mark.parametrize("make", [make_task, make_scenes])
def test_a_shard_is_a_view_of_what_all_hold(make):
    shards = make().shards
    ends, views = np.cumsum([len(shard) for shard in shards]), [shard.view for shard in shards]
    whole = Shard(np.concatenate([shard.x for shard in shards]), np.concatenate([shard.y for shard in shards]))
    held = Holdings(whole, ends, views)
    assert [len(shard) for shard in held] == held.sizes.tolist() == [len(shard) for shard in shards]
    for own, shard in zip(held, shards, strict=True):
        assert np.array_equal(own.x, shard.x)
        assert np.array_equal(own.labels(), shard.labels())
        assert own.x.base is whole.x
    mapped = Holdings(Shard(Mapped("/images.npy", np.array([4, 7, 1])), np.arange(3)), np.array([1, 3]))
    assert mapped[1].x.rows.tolist() == [7, 1]


def test_what_a_server_is_sent_of_a_client_is_its_indices_and_its_counts(config):
    task = build_task(config)
    sent = pickle.dumps(task.without_data(), protocol=5)
    assert len(sent) / CLIENTS < 8 * EACH + 8 * 4 + 40  # indices and counts of four classes, two ends and a name
    known = pickle.loads(sent)
    assert [len(shard) for shard in known.shards[:3]] == [EACH] * 3
    assert not any(load(known.shards.whole.x).shape[1:])
    assert known.views is None
    assert task.views is None


@pytest.mark.slow
def test_a_task_keeps_no_objects_for_each_client(config):
    build_task(config)  # imports on the way must not count
    gc.collect()
    tracemalloc.start()
    task = build_task(config)
    gc.collect()
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # images, labels, ids, indices and counts, two ends, and a name as long as a text
    assert kept / CLIENTS < EACH * (1 + 3 * 8) + 4 * 8 + 2 * 8 + 80
    assert task.clients == CLIENTS


def test_a_split_of_more_clients_than_are_written_at_once_has_one_hash(config, monkeypatch):
    task = build_task(config)
    assert Split.from_json(task.split.as_text()).seal == task.split.seal
    monkeypatch.setattr("raylt.data.splits.split.CHUNK_SIZE", 10**6)
    whole = Split.from_json(task.split.as_text())
    assert whole.as_text() == task.split.as_text()
    assert whole.sha256 == task.split.sha256


def test_the_hashes_of_a_split_are_those_that_earlier_versions_wrote():
    split = Split((np.array([0, 3]), np.array([1])), "0" * 64, "digits", 10.0, "dirichlet", 0.5, 7)
    assert split.sha256 == "8f448f37954ad2811c531365a05cfad2df0820ddb82321e4f8e45264f054c258"
    assert split.seal == "e41a7458e643e60bc37789d44c31620857a4521a92e7cadf9e05796415c39aad"


def test_test_samples_that_were_changed_in_a_split_are_refused():
    lists = IndexLists.of([np.array([2]), np.array([4])])
    split = Split((np.array([0, 3]), np.array([1])), "0" * 64, "digits", 10.0, "by_id", 0.5, 7, test=lists)
    text = split.as_text()
    assert Split.from_json(text).seal == split.seal
    with refused("data.split-changed", DataError, field="seal"):
        Split.from_json(text.replace("[[2],[4]]", "[[4],[2]]"))


def test_labels_are_hashed_as_numbers_of_eight_bytes_and_label_maps_as_bytes():
    labels = np.arange(100) % 7
    maps = np.random.default_rng(0).integers(0, 256, (100, 2, 3), dtype=np.uint8)
    assert hash_labels(labels) == hash_labels(labels.astype(np.uint8)) == hashlib.sha256(labels.tobytes()).hexdigest()
    assert hash_labels(maps) == hashlib.sha256(maps.tobytes()).hexdigest()
