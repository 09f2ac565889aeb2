"""A user's images in folders: the client and class of each image, the test part, and the notes."""

import json
import os
import re
import unicodedata
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image
from refusals import refused

from raylt.config import DataConfig
from raylt.data.fingerprint import hash_data
from raylt.data.images.cache import load
from raylt.data.sources.folders import check_same_names
from raylt.data.splits.check import complete
from raylt.data.splits.split import Split
from raylt.data.task import build_task
from raylt.errors import DataError

SHOPS = {"wien": {"shoe": 10, "bag": 5}, "linz": {"shoe": 20}, "graz": {"bag": 1, "shoe": 2}}


def other_notes(task):
    """Return the task's notes except the one on doubles, since pictures of one colour often look equal."""
    return tuple(note for note in task.notes if "also training images" not in note)


def write(folder, counts, level=0):
    """Write PNGs of 8 x 8 pixels, each in its own grey: folder/<class>/<i>.png, or such a folder for each client."""
    for position, (name, below) in enumerate(counts.items()):
        if isinstance(below, dict):
            write(folder / name, below, level + 40 * position)
            continue
        (folder / name).mkdir(parents=True, exist_ok=True)
        for i in range(below):
            Image.new("RGB", (8, 8), (level + i,) * 3).save(folder / name / f"{i}.png")


@pytest.fixture
def shops(tmp_path):
    write(tmp_path / "shops", SHOPS)
    return tmp_path / "shops"


def config(folder, **settings):
    return DataConfig(source=f"folder:{folder}", root=str(folder.parent / "root"), size=8, **settings)


def test_clients_and_their_names_are_those_of_the_folders(shops):
    task = build_task(config(shops))
    assert task.client_names == ("graz", "linz", "wien")
    assert task.class_names == ("bag", "shoe")
    # a fifth of 10, 5, 20 and 2 images, rounded: 2, 1, 4, 0; graz would have no test image and gives one of its two
    # shoes
    assert task.client_counts.tolist() == [[1, 1], [0, 16], [4, 8]]
    assert task.own_tests is not None
    assert [np.bincount(load(task.test.y)[rows], minlength=2).tolist() for rows in task.own_tests] == [
        [0, 1],
        [0, 4],
        [1, 2],
    ]


@pytest.mark.parametrize(("depth", "white"), [(None, 65535), (12, 4095)])
def test_a_bright_pixel_in_one_file_of_16_bits_changes_no_other(tmp_path, depth, white):
    for client in ("linz", "wien"):
        for i in range(6):
            pixels = np.full((8, 8), 3000, np.uint16)
            pixels[0, 0] = 4095 if i % 2 else 3000
            file = tmp_path / "scans" / client / "bone" / f"{i}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(file)
    task = build_task(config(tmp_path / "scans", depth=depth))
    assert {*load(task.test.x)[:, 7, 7].ravel().tolist()} == {int(3000 * 255 / white + 0.5)}
    assert any("data.depth" in note for note in task.notes) == (depth is None)


def test_a_client_s_test_images_are_its_own_and_no_client_trains_on_them(shops):
    task = build_task(config(shops))
    grey = {name: {40 * position + i for i in range(20)} for position, name in enumerate(SHOPS)}
    assert task.own_tests is not None
    for name, shard, rows in zip(task.client_names, task.shards, task.own_tests, strict=True):
        tested = load(task.test.x)[rows][:, 0, 0, 0].tolist()
        trained = load(shard.x)[:, 0, 0, 0].tolist()
        assert {*trained, *tested} <= grey[name]
    every = np.concatenate([*task.split.clients, *(task.split.test or ())])
    assert sorted(every.tolist()) == list(range(38))


def test_the_test_part_is_seeded_sealed_and_in_the_file(shops, tmp_path):
    task = build_task(config(shops))
    task.split.save(tmp_path / "split.json")
    again = Split.load(tmp_path / "split.json")
    assert again.as_text() == task.split.as_text()
    assert again.test_share == 0.2
    assert again.client_names == task.client_names
    more = build_task(config(shops, test=0.5))
    assert [len(rows) for rows in more.split.test or ()] == [1, 10, 8]  # half of 2, half of 20, and half of 10 and of 5
    other = build_task(config(shops, seed=1))
    assert len({split.seal for split in (task.split, more.split, other.split)}) == 3
    changed = replace(task.split, test=tuple(rows[:-1] for rows in task.split.test or ()))
    assert changed.seal != task.split.seal
    tree = json.loads((tmp_path / "split.json").read_text())
    tree["test"][1].pop()
    with refused("data.split-changed", DataError, field="seal"):
        Split.from_json(json.dumps(tree))
    # a resumed run takes the test images of its split, whatever the setting says
    taken_up = build_task(config(shops, seed=1), again)
    assert (load(taken_up.test.x) == load(task.test.x)).all()


def test_pixels_are_normalised_by_what_is_trained_on(shops):
    task = build_task(config(shops))
    trained = np.concatenate([load(shard.x) for shard in task.shards])
    assert task.mean == pytest.approx((trained / 255).mean((0, 1, 2)))


@pytest.mark.parametrize("given", [{}, {"clients": 3}, {"partition": "by_id"}])
def test_neither_clients_nor_partition_need_to_be_named(shops, given):
    task = build_task(config(shops, **given))
    known = complete(config(shops, **given), task.split)
    assert (known.clients, known.partition, known.imbalance, known.test) == (3, "by_id", 1.0, 0.2)


def test_a_number_of_clients_that_the_folders_contradict_is_named(shops):
    with refused("config.conflict", DataError, key="data.clients", value=7, ids=3):
        build_task(config(shops, clients=7))


def test_images_may_be_partitioned_again_and_then_belong_to_no_recorded_client(shops):
    task = build_task(config(shops, partition="iid", clients=4))
    assert task.client_names == ("0", "1", "2", "3")
    assert task.own_tests is None
    assert task.split.client_names is None


def test_clients_with_a_test_part_keep_it(tmp_path):
    write(tmp_path / "it/train", SHOPS)
    write(tmp_path / "it/test", {"wien": {"bag": 2, "shoe": 1}, "graz": {"shoe": 3}})
    task = build_task(config(tmp_path / "it"))
    assert task.sizes.tolist() == [3, 20, 15]
    assert task.own_tests is not None
    assert [len(rows) for rows in task.own_tests] == [3, 0, 3]
    assert load(task.test.y)[task.own_tests[2]].tolist() == [0, 0, 1]
    assert task.split.test is None
    assert "clients of test images" in hash_data(task)
    with refused("config.conflict", DataError, key="data.test", value=0.3):
        build_task(config(tmp_path / "it", test=0.3))


def test_clients_below_train_alone_are_split(tmp_path):
    write(tmp_path / "it/train", SHOPS)
    assert [len(rows) for rows in build_task(config(tmp_path / "it")).own_tests or ()] == [1, 4, 3]


def test_a_thinned_client_stays_and_keeps_its_name(shops):
    task = build_task(config(shops, imbalance=2))
    assert task.client_names == ("graz", "linz", "wien")
    used, every = task.sizes.sum(), 38 - 8
    assert other_notes(task) == (
        f"{every - used} of {every} training images ({(every - used) / every:.0%}) are left out: the "
        "split is drawn with data.imbalance = 2; data.imbalance=1 keeps all",
    )


POOLED = {"cat": 10, "dog": 5, "owl": 1}


@pytest.mark.parametrize("below", ["", "train"])
def test_classes_without_clients_are_one_pool_that_is_dealt(tmp_path, below):
    write(tmp_path / "pets" / below, POOLED)
    task = build_task(config(tmp_path / "pets", clients=3, partition="iid"))
    assert task.class_names == ("cat", "dog", "owl")
    assert (task.client_names, task.own_tests) == (("0", "1", "2"), None)
    # a fifth of each class, but never its last image
    assert np.bincount(load(task.test.y), minlength=3).tolist() == [2, 1, 0]
    assert task.counts.tolist() == [8, 4, 1]
    assert {*task.sizes.tolist()} == {4, 5}
    trained = [row for rows in task.split.clients for row in rows.tolist()]
    assert task.split.test is not None
    assert sorted([*trained, *task.split.test[0].tolist()]) == list(range(16))


def test_the_share_of_a_pooled_test_set_is_a_setting_and_is_recorded(tmp_path):
    write(tmp_path / "pets", {"cat": 10, "dog": 10})
    settings = config(tmp_path / "pets", clients=2, test_share=0.4)
    task = build_task(settings)
    assert np.bincount(load(task.test.y)).tolist() == [4, 4]
    task.split.save(tmp_path / "split.json")
    again = build_task(config(tmp_path / "pets", split=str(tmp_path / "split.json")))
    assert again.split.seal == task.split.seal
    assert again.split.test_pooled
    assert complete(config(tmp_path / "pets"), again.split).test_share == 0.4
    other = build_task(settings.model_copy(update={"seed": 1}))
    assert other.split.test is not None
    assert task.split.test is not None
    assert other.split.test[0].tolist() != task.split.test[0].tolist()


@pytest.mark.parametrize(
    ("layout", "settings", "key"),
    [
        ({"cat": 3, "dog": 3}, {"test": 0.3}, "data.test"),
        ({"wien": {"cat": 3}, "linz": {"cat": 3}}, {"test_share": 0.3}, "data.test_share"),
        ({"cat": 3, "test": {"cat": 3}}, {"test_share": 0.3}, "data.test_share"),
    ],
)
def test_a_share_that_does_not_apply_is_refused(tmp_path, layout, settings, key):
    write(tmp_path / "it", layout)
    with refused("config.conflict", key=key, value=0.3):
        build_task(config(tmp_path / "it", **settings))


@pytest.mark.parametrize(
    ("layout", "settings", "tested"),
    [
        ({"cat": 3, "dog": 3, "test": {"cat": 2, "dog": 1}}, {}, [2, 1]),
        ({"cat": 3, "dog": 3, "val": {"cat": 2, "dog": 1}}, {"test_part": "val"}, [2, 1]),
        ({"train": {"cat": 3, "dog": 3}, "val": {"cat": 2, "dog": 1}}, {}, [2, 1]),
        ({"train": {"cat": 3}, "test": {"cat": 1}, "val": {"cat": 2}}, {"test_part": "val"}, [2]),
        ({"train": {"cat": 3}, "test": {"cat": 1}, "val": {"cat": 2}}, {}, [1]),
        ({"train": {"cat": 3}, "held": {"cat": 2}}, {"test_part": "held"}, [2]),
    ],
)
def test_the_folder_of_test_images_can_be_named(tmp_path, layout, settings, tested):
    write(tmp_path / "it", layout)
    task = build_task(config(tmp_path / "it", clients=2, partition="iid", **settings))
    assert np.bincount(load(task.test.y)).tolist() == tested
    assert task.counts.sum() == 3 * len(tested)


def test_a_part_that_is_not_there_is_refused(tmp_path):
    write(tmp_path / "it", {"train": {"cat": 3}})
    with refused("config.unknown-name", key="data.test_part", value="val"):
        build_task(config(tmp_path / "it", test_part="val"))


def test_nothing_is_left_out_unasked(shops):
    task = build_task(config(shops))
    assert other_notes(task) == ()
    assert task.sizes.sum() + len(task.test) == 38


def test_a_class_without_test_images_is_named(tmp_path):
    write(tmp_path / "it/train", {"cat": 3, "dog": 2})
    write(tmp_path / "it/test", {"cat": 1})
    assert other_notes(build_task(config(tmp_path / "it", clients=2))) == (
        "no test image shows 1 of 2 classes, which are never evaluated: dog",
    )


def test_a_folder_of_one_class_gets_a_notice(tmp_path):
    write(tmp_path / "it", {"cat": 5})
    assert other_notes(build_task(config(tmp_path / "it", clients=2))) == (
        "all labels are of one class (cat), so every accuracy is 100 %",
    )


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"train": {"a": {"x": 1}}, "wien": {"x": 1}}, "folders train and wien"),
        ({"test": {"a": 1}}, "has a folder test and no folder train"),
        ({"train": {"a": {"x": {"y": 1}}}}, r"images lie at another depth, such as a/x/y/0\.png"),
        ({"test": {"wien": {"a": 1}}, "wien": {"a": 1}}, r"images lie at another depth, such as wien/a/0\.png"),
        ({"wien": {"a": 1}, "linz": {"a": {"b": 1}}}, r"different depths, such as wien/a/0\.png and linz/a/b/0\.png"),
        ({"train": {"a": 1}, "test": {"a": {"b": 1}}}, r"images lie at another depth, such as a/b/0\.png"),
        ({"train": {"a": {"x": 1}}, "test": {"b": {"x": 1}}}, r"no training images \(b\)\."),
        ({"a": {"x": 0}}, "no images in its folders"),
    ],
)
def test_a_layout_that_is_none_of_the_four_is_explained_in_one_line(tmp_path, layout, message):
    write(tmp_path / "it", layout)
    with refused("data.wrong-layout", DataError) as caught:
        build_task(config(tmp_path / "it"))
    assert re.search(message, str(caught.value))
    assert "\n" not in str(caught.value)


def test_what_is_no_image_is_left_out_and_counted(shops):
    (shops / "readme.txt").write_text("of the shops")
    (shops / "wien/shoe/Thumbs.db").write_bytes(b"\0" * 20)
    (shops / "wien/shoe/notes.txt").write_text("")
    (shops / "wien/shoe/.DS_Store").write_bytes(b"\0")
    (shops / "wien/hat").mkdir()
    (shops / "wien/.cache").mkdir()
    (shops / "wien/.cache/0.png").write_bytes(b"")
    os.symlink(shops / "wien", shops / "wien/shoe/again")
    # a file without a suffix is recognised by its first bytes
    (shops / "linz/shoe/0.png").rename(shops / "linz/shoe/picture")
    task = build_task(config(shops))
    assert task.sizes.sum() + len(task.test) == 38
    assert other_notes(task) == (
        "5 files are not images and were left out: 2 .txt, 1 .db, 1 hidden, 1 links to a folder above",
        f"1 folder holds no image and was left out: {shops}/wien/hat",
        f"1 folder is hidden and was left out: {shops}/wien/.cache",
    )


def test_names_are_the_same_in_whatever_form_a_system_wrote_them(tmp_path):
    composed, decomposed = (unicodedata.normalize(form, "Schuhgröße 42") for form in ("NFC", "NFD"))
    write(tmp_path / "it", {"Köln Süd": {composed: 5}, "Linz": {decomposed: 5}})
    task = build_task(config(tmp_path / "it"))
    assert task.class_names == (composed,)
    assert task.client_names == ("Köln Süd", "Linz")


def test_an_npz_records_clients_of_test_images_and_their_names(tmp_path):
    x = np.arange(6, dtype=np.uint8).repeat(4).reshape(6, 2, 2)
    arrays = {
        "x_train": x,
        "y_train": [0, 1, 0, 1, 0, 1],
        "x_test": x[:4],
        "y_test": [0, 1, 0, 1],
        "class_names": ["a", "b"],
        "id_train": [7, 5, 5, 7, 9, 7],
        "id_test": [9, 7, 9, 5],
    }
    np.savez(tmp_path / "it.npz", **arrays, client_names=["linz", "wien", "graz"])
    task = build_task(DataConfig(source=f"npz:{tmp_path / 'it.npz'}"))
    assert task.client_names == ("linz", "wien", "graz")
    assert task.own_tests is not None
    assert [rows.tolist() for rows in task.own_tests] == [[3], [1], [0, 2]]
    assert task.sizes.tolist() == [2, 3, 1]
    for changes, array, message in (
        ({"client_names": ["a", "b"]}, "client_names", "2 names for 3 different ids"),
        ({"client_names": ["a", "b", "a"]}, "client_names", "a name twice"),
        ({"id_test": [9, 7, 9, 1]}, "id_test", "an id that is not in id_train (1)"),
        ({"id_test": [9, 7]}, "id_test", "one id for each of the 4 images"),
        ({"id_train": None}, "id_train", "needs id_train"),
    ):
        changed = {key: value for key, value in (arrays | changes).items() if value is not None}
        np.savez(tmp_path / "it.npz", **changed)
        with refused("data.malformed", DataError, array=array) as caught:
            build_task(DataConfig(source=f"npz:{tmp_path / 'it.npz'}"))
        assert message in str(caught.value)


def test_ids_that_are_texts_are_names(tmp_path):
    x = np.zeros((4, 2, 2), np.uint8)
    np.savez(
        tmp_path / "it.npz",
        x_train=x,
        y_train=[0, 1, 0, 1],
        x_test=x,
        y_test=[0, 1, 0, 1],
        class_names=["a", "b"],
        id_train=["wien", "linz", "wien", "linz"],
    )
    assert build_task(DataConfig(source=f"npz:{tmp_path / 'it.npz'}")).client_names == ("linz", "wien")


def test_a_tail_that_is_cut_begins_with_the_largest_class(tmp_path):
    write(tmp_path / "it", {"wien": {"bag": 5, "hat": 10, "shoe": 20}, "linz": {"bag": 5, "hat": 10, "shoe": 20}})
    task = build_task(config(tmp_path / "it", imbalance=10))
    # a fifth of each class is for the test, so 8, 16 and 32 remain. 10^(-c/2) of n_max = 32: 32, 10, 3
    assert dict(zip(task.class_names, task.counts.tolist(), strict=True)) == {"shoe": 32, "hat": 10, "bag": 3}


def test_ten_of_the_untrained_clients_are_named(tmp_path):
    test = [f"shop {k:02}" for k in range(14)]
    with refused("data.wrong-layout", DataError, name="shop 02") as caught:
        check_same_names(tmp_path, "client", [*test[:2], "trained only"], test)
    assert "12 client folders of the test part have no training images (shop 02, shop 03, " in str(caught.value)
    assert "shop 11, ..)" in str(caught.value)
    assert "trained only" not in str(caught.value)
    check_same_names(tmp_path, "client", test, test[:3])
