import itertools

import numpy as np
import pytest
from PIL import Image
from refusals import refused

from raylt.config import DataConfig
from raylt.data.fingerprint import hash_data
from raylt.data.images.cache import load
from raylt.data.sources.sources import open_source
from raylt.data.splits.auxiliary import auxiliary_rows
from raylt.data.task import build_task
from raylt.errors import DataError

CONFIG = DataConfig(clients=5, auxiliary=6, validation=0.2)


@pytest.fixture(scope="module")
def task():
    return build_task(CONFIG)


def test_the_server_gets_auxiliary_images_of_each_class_from_the_training_set(task):
    assert np.bincount(task.auxiliary.y).tolist() == [6] * 10
    source = open_source(CONFIG)
    assert np.array_equal(load(task.auxiliary.x), source.x_train[task.auxiliary.ids])
    assert np.array_equal(task.auxiliary.y, source.y_train[task.auxiliary.ids])
    assert (np.diff(task.auxiliary.ids) > 0).all()


def test_auxiliary_images_are_those_that_the_long_tail_left_out_else_copies_and_never_validation_images(task):
    clients = np.concatenate([shard.ids for shard in task.shards])
    ids, y = task.auxiliary.ids, task.auxiliary.y
    assert not np.isin(ids, task.validation.ids).any()
    assert np.isin(ids[y == 0], clients).all()  # class 0 is the largest, so all of its 148 images are in the long tail
    assert not np.isin(ids[y > 0], clients).any()


def test_nothing_is_taken_away_from_anybody(task):
    plain = build_task(CONFIG.model_copy(update={"auxiliary": 0}))
    assert plain.auxiliary is None
    assert plain.split.sha256 == task.split.sha256
    assert all(np.array_equal(a.ids, b.ids) for a, b in zip(plain.shards, task.shards, strict=True))
    assert np.array_equal(plain.validation.ids, task.validation.ids)


def test_seed_decides_which(task):
    same, other = (build_task(CONFIG.model_copy(update=change)) for change in ({}, {"seed": 1}))
    assert np.array_equal(task.auxiliary.ids, same.auxiliary.ids)
    assert not np.array_equal(task.auxiliary.ids, other.auxiliary.ids)


@pytest.mark.parametrize("clients", [[range(3)], [range(1797 - 300)]], ids=["left out by the tail", "of clients"])
def test_images_of_a_class_are_drawn_at_random(clients):
    source, lists = open_source(CONFIG), [np.array(rows) for rows in clients]
    configs = [DataConfig(auxiliary=2, seed=seed) for seed in range(3)]
    drawn = {tuple(auxiliary_rows(source, lists, (), [], config)) for config in configs}
    assert len(drawn) == 3


def test_a_class_with_fewer_gives_what_it_has():
    task = build_task(DataConfig(clients=2, auxiliary=146, imbalance=1))
    # digits have 144 to 148 training images of each class
    assert np.bincount(task.auxiliary.y).tolist() == np.minimum(np.bincount(open_source(CONFIG).y_train), 146).tolist()


def test_where_the_images_outside_are_too_few_none_is_given_twice():
    task = build_task(DataConfig(clients=2, auxiliary=100))
    clients = np.concatenate([shard.ids for shard in task.shards])
    rows = task.auxiliary.ids
    assert 0 < np.isin(rows[task.auxiliary.y == 1], clients).sum() < 100
    assert np.bincount(task.auxiliary.y).tolist() == [100] * 10
    assert len(np.unique(rows)) == len(rows)


def test_they_are_part_of_what_a_run_saw(task):
    other = build_task(CONFIG.model_copy(update={"auxiliary": 7}))
    names = {name for name, sha256 in hash_data(other).items() if hash_data(task)[name] != sha256}
    assert names == {"training images", "training labels"}


def test_label_maps_are_refused():
    with refused("data.wrong-kind", DataError, key="data.auxiliary", value=5):
        build_task(DataConfig(source="shapes", partition="iid", clients=3, imbalance=1, auxiliary=5))


def test_they_are_never_of_a_test_part_that_was_split_off(tmp_path):
    for shop, place in itertools.product(("a", "b"), range(2)):
        folder = tmp_path / "shops" / shop / f"class {place}"
        folder.mkdir(parents=True)
        for number in range(6):
            Image.new("L", (8, 8), 100 * place + number).save(folder / f"{number}.png")
    shops = DataConfig(source=f"folder:{tmp_path / 'shops'}", root=str(tmp_path), size=8, test=0.5)
    task = build_task(shops.model_copy(update={"auxiliary": 3}))
    assert len(task.auxiliary.ids) == 6
    assert np.isin(task.auxiliary.ids, np.concatenate([shard.ids for shard in task.shards])).all()
    assert not np.isin(task.auxiliary.ids, np.concatenate(task.split.test)).any()
