"""Images that are left out or missing are reported by name, and no client or class takes the place of another."""

import numpy as np
import pytest
from PIL import Image
from refusals import refused

from raylt.config import DataConfig
from raylt.data.images.cache import load
from raylt.data.task import build_task
from raylt.errors import DataError

LEVELS = {"anna": 10, "bert": 60, "cora": 110}  # the grey level of each client's images


def other_notes(task):
    """Return the task's notes except the one on doubles, since pictures of one colour often look equal."""
    return tuple(note for note in task.notes if "also training images" not in note)


def write(folder, counts, damaged=()):
    """Write PNGs of 8 x 8 pixels, each client's in its own grey; files of `damaged` clients or classes are no
    images."""
    for client, classes in counts.items():
        for name, n in classes.items():
            (folder / client / name).mkdir(parents=True, exist_ok=True)
            for i in range(n):
                file = folder / client / name / f"{i}.png"
                if client in damaged or name in damaged:
                    file.write_bytes(b"no image")
                else:
                    Image.new("L", (8, 8), LEVELS[client] + i).save(file)


def config(folder, **settings):
    return DataConfig(source=f"folder:{folder}", root=str(folder.parent / "root"), size=8, **settings)


def test_who_lost_all_training_images_is_left_out_and_the_others_keep_their_names(tmp_path):
    everyone = {"anna": {"cat": 4, "dog": 4}, "bert": {"cat": 4, "dog": 4}, "cora": {"cat": 12, "dog": 4}}
    write(tmp_path / "it/train", everyone, damaged=("anna",))
    write(tmp_path / "it/test", {name: {"dog" if name == "anna" else "cat": 2} for name in everyone})
    task = build_task(config(tmp_path / "it", bad="skip"))
    assert task.client_names == ("bert", "cora")
    for name, shard, rows in zip(task.client_names, task.shards, task.own_tests, strict=True):
        for levels in (load(shard.x), load(task.test.x)[rows]):
            assert {value // 50 for value in (levels[:, 0, 0, 0].astype(int) - 10).tolist()} == {LEVELS[name] // 50}
    assert len(task.test) == 4
    assert task.test.y.tolist() == [task.class_names.index("cat")] * 4
    assert other_notes(task)[-2] == (
        "1 client has no training image that can be decoded; left out with all test images: anna"
    )


def test_a_notice_names_clients_that_count_as_one(tmp_path):
    """In Unicode e with an accent is one character, or e and the accent."""
    names = {"caf\u00e9": "anna", "cafe\u0301": "bert", "cora": "cora"}
    classes = {"th\u00e9": 4, "lait": 4}  # a class may be written differently at each client
    write(tmp_path / "it", dict.fromkeys(LEVELS, classes))
    for name, client in names.items():
        (tmp_path / "it" / client).rename(tmp_path / "it" / name)
    (tmp_path / "it/cora/th\u00e9").rename(tmp_path / "it/cora/the\u0301")
    task = build_task(config(tmp_path / "it"))
    assert task.client_names == ("caf\u00e9", "cora")
    assert [note for note in task.notes if "Unicode" in note] == [
        f"folders below {tmp_path / 'it'} count as one, since their names differ only in their Unicode form: "
        r"'cafe\u0301', 'caf\xe9'"
    ]


@pytest.mark.parametrize(("part", "kind"), [("train", "training"), ("test", "test")])
def test_a_part_that_is_lost_is_not_made_up_from_the_other(tmp_path, part, kind):
    for name in ("train", "test"):
        write(tmp_path / "it" / name, {"anna": {"cat": 3, "dog": 3}}, damaged=("anna",) if name == part else ())
    with refused("data.undecodable", DataError, part=kind) as caught:
        build_task(config(tmp_path / "it", bad="skip"))
    assert "left out: 6 images" in str(caught.value)


def test_a_class_that_is_lost_is_named_with_what_was_left_out(tmp_path):
    write(tmp_path / "it", {"anna": {"cat": 3, "dog": 3}, "bert": {"dog": 5}}, damaged=("cat",))
    with refused("data.too-few", DataError, classes=["cat"]) as caught:
        build_task(config(tmp_path / "it", bad="skip"))
    assert "left out: 3 images" in str(caught.value)


def test_clients_without_a_test_image_of_their_own_are_named(tmp_path):
    write(tmp_path / "it/train", {name: {"cat": 3, "dog": 1} for name in LEVELS})
    write(tmp_path / "it/test", {"bert": {"cat": 3, "dog": 1}})
    assert other_notes(build_task(config(tmp_path / "it"))) == (
        "2 of 3 clients have no test image of their own: anna, cora",
    )


def test_images_too_deep_are_not_passed_over(tmp_path):
    write(tmp_path / "it", {"anna": {"cat": 3}})
    write(tmp_path / "it/anna/cat/x/y", {"bert": {"z": 1}})
    with refused("data.wrong-layout", DataError, path=str(tmp_path / "it/anna/cat/x/y/bert")):
        build_task(config(tmp_path / "it"))


@pytest.mark.parametrize("name", ["Train", "TEST", "Training", "testing"])
def test_a_part_by_another_name_is_not_taken_for_a_client(tmp_path, name):
    write(tmp_path / "it", {"anna": {"cat": 3}})
    (tmp_path / "it/anna").rename(tmp_path / "it" / name)
    with refused("data.wrong-layout", DataError, name=name):
        build_task(config(tmp_path / "it"))


def test_a_folder_val_is_the_test_set_where_a_test_part_is_missing_and_is_named(tmp_path):
    write(tmp_path, {"anna": {"cat": 3}})
    for part in ("train", "val"):
        (tmp_path / "it" / part / "cat").mkdir(parents=True)
        (tmp_path / "it" / part / "cat/0.png").write_bytes((tmp_path / "anna/cat/0.png").read_bytes())
    task = build_task(config(tmp_path / "it", clients=1))
    assert (len(task.test), task.sizes.tolist()) == (1, [1])
    assert task.notes[0] == f"{tmp_path / 'it'}: has no folder test; its folder val is the test set"


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "it").write_text("")
    with refused("data.wrong-layout", DataError, path=str(tmp_path / "it")):
        build_task(config(tmp_path / "it"))


def test_images_of_a_folder_can_be_looked_at_as_those_of_an_array(tmp_path):
    write(tmp_path / "it", {"anna": {"cat": 10}})
    x = build_task(config(tmp_path / "it")).test.x
    assert x[:1].shape == (1, 8, 8, 1)
    assert (x[np.array([1, 0])] == load(x)[[1, 0]]).all()
    assert (x[1] == load(x)[1]).all()


def pack(path, **changes):
    x = np.arange(6, dtype=np.uint8).repeat(4).reshape(6, 2, 2)
    arrays = {
        "x_train": x,
        "y_train": [0, 1, 0, 1, 0, 1],
        "x_test": x[:2],
        "y_test": [0, 1],
        "class_names": ["a", "b"],
        "id_train": [1, 2, 4, 4, 2, 1],
    }
    np.savez(path, **arrays | changes)
    return DataConfig(source=f"npz:{path}")


def test_numbers_of_clients_are_their_names(tmp_path):
    assert build_task(pack(tmp_path / "it.npz")).client_names == ("1", "2", "4")
    counted = build_task(pack(tmp_path / "from_0.npz", id_train=[0, 1, 2, 2, 1, 0]))
    assert counted.client_names == ("0", "1", "2")
    assert counted.split.client_names is None  # as in splits that were drawn by earlier versions


@pytest.mark.parametrize(
    "changes",
    [
        {"class_names": ["a", "\x1b[31mred"]},
        {"class_names": ["a", ""]},
        {"class_names": ["a", "b\nc"]},
        {"id_train": ["a", "b\x1b", "a", "a", "a", "a"]},
        {"client_names": ["x", " ", "y"]},
    ],
)
def test_names_that_cannot_be_shown_are_refused(tmp_path, changes):
    with refused("data.malformed", DataError, array=next(iter(changes))):
        build_task(pack(tmp_path / "it.npz", **changes))
