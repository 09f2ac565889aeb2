"""The hash of a run's data."""

import json
import os
from dataclasses import replace

import numpy as np
import pytest

from raylt.config import DataConfig
from raylt.data import fingerprint
from raylt.data.fingerprint import hash_data
from raylt.data.images.cache import Mapped
from raylt.data.task import Holdings, build_task
from raylt.errors import CheckpointError

CONFIG = DataConfig(clients=3, imbalance=5)


@pytest.fixture(scope="module")
def task():
    return build_task(CONFIG)


def differing(one, two):
    first, second = hash_data(one), hash_data(two)
    assert first.keys() == second.keys()
    return [name for name in first if first[name] != second[name]]


def test_the_same_task_has_the_same_hashes(task):
    assert differing(task, build_task(CONFIG)) == []
    assert all(len(value) == 64 for value in hash_data(task).values())


def changed(values):
    values = values.copy()
    values.reshape(-1)[-1] ^= 1
    return values


def test_one_bit_of_a_pixel_or_a_label_shows_where_it_is(task):
    last = task.shards[-1]
    assert differing(task, replace(task, test=replace(task.test, x=changed(task.test.x)))) == ["test images"]
    assert differing(task, replace(task, test=replace(task.test, y=changed(task.test.y)))) == ["test labels"]
    shards = *task.shards[:-1], replace(last, x=changed(last.x))
    assert differing(task, replace(task, shards=shards)) == ["training images"]
    shards = *task.shards[:-1], replace(last, y=changed(last.y))
    assert differing(task, replace(task, shards=shards)) == ["training labels"]


def test_images_of_the_validation_set_and_of_the_server_are_training_images():
    task = build_task(CONFIG.model_copy(update={"validation": 0.2, "auxiliary": 2}))
    for part in ("validation", "auxiliary"):
        shard = getattr(task, part)
        other = replace(task, **{part: replace(shard, x=changed(shard.x), y=changed(shard.y))})
        assert differing(task, other) == ["training images", "training labels"]


def test_the_same_bytes_of_other_clients_or_another_type_are_other_data(task):
    whole = task.shards.whole
    moved = Holdings(whole, task.shards.ends - np.array([1, 0, 0]))
    assert {"training images", "training labels"} <= set(differing(task, replace(task, shards=moved)))
    signed = replace(task.test, y=task.test.y.view(np.uint64))
    assert differing(task, replace(task, test=signed)) == ["test labels"]


def test_a_changed_owner_or_normalisation_is_named(task):
    swapped = replace(task, shards=(task.shards[1], task.shards[0], task.shards[2]))
    assert set(differing(task, swapped)) == {"clients and classes", "training images", "training labels"}
    assert set(differing(task, replace(task, mean=(0.5,)))) == {"classes and normalisation", "clients and classes"}
    assert set(differing(task, build_task(CONFIG.model_copy(update={"validation": 0.2})))) == {
        "clients and classes",
        "training images",
        "training labels",
    }


def test_a_file_of_decoded_images_is_read_once_and_again_when_it_was_written(task, tmp_path, monkeypatch):
    file = tmp_path / "images.npy"
    images = np.zeros((6, 2, 2, 3), np.uint8)
    np.save(file, images)
    mapped = replace(task, test=replace(task.test, x=Mapped(str(file), np.arange(6))))
    first = hash_data(mapped)
    known = json.loads((tmp_path / "images.npy.sha256").read_text())
    assert known["bytes"] == file.stat().st_size
    with monkeypatch.context() as patch:
        patch.setattr(fingerprint.store.Folder, "hash", None)  # a call would fail
        assert hash_data(mapped) == first
    fewer = replace(task, test=replace(task.test, x=Mapped(str(file), np.arange(5))))
    assert hash_data(fewer)["test images"] != first["test images"]
    images[0, 0, 0, 0] = 1
    np.save(file, images)
    os.utime(file, ns=(1, known["time_ns"] + 1))
    assert hash_data(mapped)["test images"] != first["test images"]


def test_a_file_in_a_read_only_cache_is_read_once_for_all_clients(task, tmp_path, monkeypatch):
    file = tmp_path / "images.npy"
    np.save(file, np.zeros((6, 8, 8, 1), np.uint8))
    shards = [replace(shard, x=Mapped(str(file), np.arange(len(shard)) % 6)) for shard in task.shards]
    read = []

    def refuse(folder, name, content):
        raise CheckpointError(f"{name}: the folder is read-only. Copy it.")

    def counted(folder, name, real=fingerprint.store.Folder.hash):
        read.append(name)
        return real(folder, name)

    monkeypatch.setattr(fingerprint.store.Folder, "write", refuse)
    monkeypatch.setattr(fingerprint.store.Folder, "hash", counted)
    mapped = replace(task, shards=shards)
    first = hash_data(mapped)
    assert hash_data(mapped) == first
    assert read == ["images.npy"]
    np.save(file, np.ones((6, 8, 8, 1), np.uint8))
    os.utime(file, ns=(1, 1))
    assert hash_data(mapped)["training images"] != first["training images"]
    assert len(read) == 2
