"""Shards of many clients are stored as a few values."""

import pickle
from dataclasses import replace

import numpy as np
import pytest
from tiny import make_scenes, make_task

from actors.shards import packs
from raylt.data.images.cache import Mapped, load
from raylt.data.task import Shard


def shards_of(packed, clients):
    return [next(pack for pack in reversed(packed) if pack.first <= id).shard(id) for id in range(clients)]


@pytest.mark.parametrize("make", [make_task, make_scenes])
def test_every_client_gets_out_what_was_put_in(make, monkeypatch):
    shards = [replace(shard, ids=100 * k + np.arange(len(shard))) for k, shard in enumerate(make().shards)]
    monkeypatch.setattr("actors.shards.MAX_PACK_BYTES", 2000)
    packed = pickle.loads(pickle.dumps(list(packs(shards))))
    assert 1 < len(packed) <= len(shards)
    for shard, out in zip(shards, shards_of(packed, len(shards)), strict=True):
        assert np.array_equal(load(out.x), load(shard.x))
        assert np.array_equal(out.labels(), shard.labels())
        assert np.array_equal(out.ids, shard.ids)
        assert (out.view is None) == (shard.view is None)


def test_a_pack_keeps_the_view_of_each_client_that_has_one():
    images, labels = np.zeros((2, 4, 4, 1), np.uint8), np.zeros((2, 4, 4), np.uint8)
    views = [None, np.array([1, 0], np.uint8), None]
    (pack,) = packs([Shard(images, labels, view=view) for view in views])
    assert [view if view is None else view.tolist() for view in (pack.shard(k).view for k in range(3))] == [
        None,
        [1, 0],
        None,
    ]


def test_neighbours_share_a_pack_up_to_its_size_and_a_large_client_has_its_own():
    sizes = [3, 0, 2, 9, 1, 1]  # numbers of images; an image has 100 bytes, its label and id 16
    shards = [Shard(np.zeros((n, 10, 10, 1), np.uint8), np.zeros(n, np.int64), np.zeros(n, np.int64)) for n in sizes]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("actors.shards.MAX_PACK_BYTES", 600)
        packed = list(packs(shards))
    assert [(pack.first, len(pack.shards)) for pack in packed] == [(0, 3), (3, 1), (4, 2)]
    assert packed[1].shards.whole.x is shards[3].x  # a client with its own pack is not copied


def test_images_of_a_file_stay_rows_of_it():
    shards = [Shard(Mapped("/images.npy", np.array(rows)), np.zeros(len(rows), np.int64)) for rows in ([4, 7], [1])]
    (pack,) = packs(shards)
    assert isinstance(pack.shards.whole.x, Mapped)
    assert pack.shards.whole.x.rows.tolist() == [4, 7, 1]
    assert pack.shard(1).x.rows.tolist() == [1]
