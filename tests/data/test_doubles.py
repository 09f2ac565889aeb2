"""Test images that are also training images are counted, left out or refused."""

from dataclasses import replace

import numpy as np
import pytest
from PIL import Image
from refusals import refused

import raylt
from raylt.config import DataConfig
from raylt.data.doubles import CHUNK_SIZE, repeated, without_doubles
from raylt.data.images.cache import Mapped, cut, load
from raylt.data.sources.sources import open_source
from raylt.data.splits.draw import draw
from raylt.data.task import build_task
from raylt.errors import DataError


@pytest.fixture
def pictures():
    """Return 30 different pictures; the last two differ from the first two in one pixel outside their middle row."""
    x = np.random.default_rng(0).integers(0, 256, (30, 8, 8, 1), dtype=np.uint8)
    x[28:] = x[:2]
    x[28:, 0, 0] ^= 1
    return x


@pytest.fixture
def file(pictures, tmp_path):
    """Save 10 test images, of which 4 are training images, one of them twice."""
    tests = np.concatenate([pictures[:3], pictures[:1], pictures[20:26]])
    np.savez(
        tmp_path / "it.npz",
        x_train=pictures[:20],
        y_train=np.arange(20) % 2,
        x_test=tests,
        y_test=np.arange(10) % 3 % 2,
        id_train=np.arange(20) % 3,
        id_test=np.arange(10) % 3,
        class_names=np.array(["a", "b"]),
    )
    return f"npz:{tmp_path / 'it.npz'}"


def test_doubles_are_compared_pixel_by_pixel_in_memory_and_on_disk(pictures, tmp_path):
    np.save(tmp_path / "images.npy", pictures)
    on_disk = Mapped(str(tmp_path / "images.npy"), np.arange(20, 30))
    tests = np.concatenate([pictures[25:], pictures[:2]])
    assert repeated(on_disk, tests).tolist() == [True] * 5 + [False] * 2  # pictures 28 and 29 only look like 0 and 1
    assert repeated(pictures[:20], on_disk).tolist() == [False] * 10


def test_doubles_are_counted_in_a_line_and_kept(file):
    task = build_task(DataConfig(source=file))
    assert len(task.test) == 10
    assert any(note.startswith("4 of 10 test images are also training images") for note in task.notes)


def test_images_on_which_no_client_trains_are_no_doubles(pictures, no_guests):
    """Those that became test images, and those that the long tail left out."""
    y = np.arange(28) % 2
    split_off = raylt.Source("own", pictures[:28], y, pictures[:0], y[:0], ("a", "b"), (0.5,), (0.25,))
    raylt.register(lambda config: split_off, "own", kind="source")
    assert not any("also training images" in note for note in build_task(DataConfig(source="own", clients=2)).notes)
    thinned = replace(split_off, x_test=pictures[:28], y_test=y)
    raylt.register(lambda config: thinned, "thinned", kind="source")
    task = build_task(DataConfig(source="thinned", clients=2, imbalance=7))
    assert any(note.startswith(f"{task.sizes.sum()} of 28 test images are also training") for note in task.notes)
    assert task.sizes.sum() < 28


def test_doubles_are_left_out_with_their_labels_and_clients(file, pictures):
    task = build_task(DataConfig(source=file, doubles="drop"))
    assert np.array_equal(load(task.test.x), pictures[20:26])
    assert load(task.test.y).tolist() == [1, 0, 0, 1, 0, 0]
    assert [rows.tolist() for rows in task.own_tests] == [[2, 5], [0, 3], [1, 4]]  # ids 1, 2, 0, 1, 2, 0
    assert task.sizes.sum() == 20
    assert any(note.startswith("4 of 10 test images") for note in task.notes)


def test_the_first_of_several_copies_is_kept(pictures, tmp_path):
    x = np.concatenate([pictures[:3], pictures[1:2], pictures[5:7], pictures[1:2]])  # 3 and 6 repeat 1
    names = np.array(list("abcdefg"))
    np.savez(tmp_path / "it.npz", x_train=x, y_train=np.arange(7), x_test=x, y_test=np.arange(7), class_names=names)
    source = open_source(DataConfig(source=f"npz:{tmp_path / 'it.npz'}"))
    kept = without_doubles(replace(source, x_test=source.x_test[:0]))
    assert load(kept.y_train).tolist() == [0, 1, 2, 4, 5]


def test_doubles_are_refused_with_their_number(file):
    with refused("data.doubles", DataError, key="data.doubles", value="refuse", doubles=4):
        build_task(DataConfig(source=file, doubles="refuse"))


def test_data_without_doubles_give_no_line(tmp_path):
    task = build_task(DataConfig(source="digits", doubles="refuse"))
    assert not any("also training images" in note for note in task.notes)


def test_of_a_folder_with_every_photo_twice_one_copy_is_kept(pictures, tmp_path):
    for index, picture in enumerate(pictures[:24]):
        folder = tmp_path / "shops" / ("wien", "graz")[index % 2] / ("a", "b")[index // 2 % 2]
        folder.mkdir(parents=True, exist_ok=True)
        for name in (f"{index:02}.png", f"{index:02} copy.png"):
            Image.fromarray(picture[..., 0]).save(folder / name)
    config = DataConfig(source=f"folder:{tmp_path / 'shops'}", size=8, root=str(tmp_path))
    twice = build_task(config)
    assert any("test images are also training images" in note for note in twice.notes)
    once = build_task(config.model_copy(update={"doubles": "drop"}))
    assert once.sizes.sum() + len(once.test) == 24
    assert not repeated(load(once.shards.whole.x), load(once.test.x)).any()
    assert any(note.startswith("24 of 48 training images are copies") for note in once.notes)


def test_copies_are_found_across_many_images(tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (3 * CHUNK_SIZE, 4, 4, 3), dtype=np.uint8)
    images[2 * CHUNK_SIZE + 1] = images[1]
    path = tmp_path / "images.npy"
    np.save(path, images)
    for x in (images, Mapped(str(path), np.arange(len(images)))):
        doubles = np.flatnonzero(repeated(cut(x, 0, CHUNK_SIZE), cut(x, CHUNK_SIZE, len(images))))
        assert doubles.tolist() == [CHUNK_SIZE + 1]


def test_more_copies_than_are_read_at_once_are_all_found():
    images = np.random.default_rng(0).integers(0, 256, (CHUNK_SIZE + 90, 4, 4, 1), dtype=np.uint8)
    assert repeated(images, images[::-1]).all()


@pytest.mark.parametrize(("names", "left"), [(["ann", "bob", "cleo"], ("ann", "cleo")), (None, ("0", "2"))])
def test_a_client_of_copies_alone_is_left_out_by_name(pictures, tmp_path, names, left):
    x = np.concatenate([pictures[:6], pictures[:4], pictures[6:12]])
    ids = np.repeat([0, 1, 2], [6, 4, 6])  # the four images of 1 are copies
    named = {} if names is None else {"client_names": np.array(names)}
    np.savez(
        tmp_path / "it.npz",
        x_train=x,
        y_train=np.arange(16) % 2,
        x_test=x[:2],
        y_test=np.arange(2),
        id_train=ids,
        class_names=np.array(["a", "b"]),
        **named,
    )
    source = replace(open_source(DataConfig(source=f"npz:{tmp_path / 'it.npz'}")), x_test=x[:0], y_test=ids[:0])
    kept = without_doubles(source)
    assert kept.client_names == left
    assert kept.ids.tolist() == [0] * 6 + [2] * 6
    lost = "bob" if names else "1"
    assert kept.notes[-1] == f"1 client has only copies of other images and is left out: {lost}"
    split = draw(kept, DataConfig(clients=2, imbalance=1, partition="by_id"))
    assert split.client_names == left
    assert {*kept.ids[split.clients[1]]} == {2}
