"""Data sets of the `datasets` library that are saved in a folder."""

import io
import os
import sys
from types import SimpleNamespace

import pytest
from PIL import Image
from refusals import refused

from raylt.config import DataConfig
from raylt.data.images.cache import load
from raylt.data.sources.huggingface import _notes_on, class_codes, name_codes
from raylt.data.sources.sources import open_source
from raylt.data.task import build_task
from raylt.errors import ConfigError, DataError


def test_without_the_library_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with refused("config.missing-package", ConfigError, package="datasets"):
        open_source(DataConfig(source="hf:x@1"))


@pytest.fixture
def saved(tmp_path):
    """Return `save`, which saves two parts of red images, each with a class and a shop."""
    datasets = pytest.importorskip("datasets")

    def png(level):
        stream = io.BytesIO()
        Image.new("RGB", (12, 10), (level, 0, 0)).save(stream, "PNG")
        return {"bytes": stream.getvalue(), "path": None}

    def save(parts=("train", "test"), broken=None, **columns):
        made = {}
        for part, n in zip(parts, (12, 4), strict=False):
            rows = {
                "photo": [png(10 * i + (part == "test")) for i in range(n)],
                "kind": [i % 3 for i in range(n)],
                "shop": [("wien", "linz")[i % 2] for i in range(n)],
            } | columns
            if broken is not None and part == "train":
                rows["photo"][broken] = {"bytes": b"no image", "path": None}
            features = datasets.Features(
                {
                    "photo": datasets.Image(),
                    "shop": datasets.Value("string"),
                    "kind": datasets.ClassLabel(names=["shoe", "bag", "hat"]),
                }
            )
            made[part] = datasets.Dataset.from_dict(rows, features=features)
        datasets.DatasetDict(made).save_to_disk(str(tmp_path / "saved"))
        return tmp_path / "saved"

    return save


def config(folder, **settings):
    return DataConfig(source=f"hf:{folder}", root=str(folder.parent / "root"), size=8, **settings)


def test_images_classes_and_clients_are_those_of_the_columns(saved):
    task = build_task(config(saved(), client_column="shop"))
    assert task.class_names == ("shoe", "bag", "hat")  # in the order of the data set
    assert task.client_names == ("linz", "wien")
    assert [load(shard.x)[:, 0, 0, 0].tolist() for shard in task.shards] == [
        [10, 30, 50, 70, 90, 110],
        [0, 20, 40, 60, 80, 100],
    ]
    assert load(task.shards[0].y).tolist() == [1, 0, 2, 1, 0, 2]
    assert task.own_tests is not None
    assert [load(task.test.x)[rows][:, 0, 0, 0].tolist() for rows in task.own_tests] == [[11, 31], [1, 21]]


def test_without_a_column_of_clients_the_images_are_dealt(saved):
    task = build_task(config(saved(), clients=3, partition="iid"))
    assert task.sizes.tolist() == [4, 4, 4]
    assert task.own_tests is None


def test_without_a_test_part_one_is_split_off_for_each_client(saved):
    task = build_task(config(saved(("train",)), client_column="shop", test=0.5))
    assert task.own_tests is not None
    assert [len(rows) for rows in task.own_tests] == [3, 3]


@pytest.mark.parametrize(
    ("parts", "settings", "tested", "notes"),
    [
        (("train", "validation"), {}, 0, 1),
        (("train", "test"), {}, 1, 0),
        (("train", "dev"), {"test_part": "dev"}, 0, 0),
    ],
)
def test_the_part_that_is_judged_can_be_another(saved, parts, settings, tested, notes):
    source = open_source(config(saved(parts), **settings))
    assert load(source.x_test)[:, 0, 0, 0].tolist() == [10 * i + tested for i in range(4)]
    assert len(source.notes) == notes


def test_a_part_without_labels_gives_way_to_validation(saved):
    datasets = pytest.importorskip("datasets")
    folder = saved(("train", "validation"))
    parts = datasets.load_from_disk(str(folder))
    unlabelled = parts["validation"].map(lambda row: {"kind": -1}, features=parts["validation"].features)
    datasets.DatasetDict({**parts, "test": unlabelled}).save_to_disk(str(folder.parent / "three"))
    source = open_source(config(folder.parent / "three"))
    assert source.y_test.tolist() == [0, 1, 2, 0]
    assert "validation" in source.notes[0]


@pytest.mark.parametrize(
    ("parts", "test", "note"),
    [
        ("train test", "test", None),
        ("train eval probe", None, "hf:x@1: only train is read, not eval, probe; data.test_part names"),
        ("train test validation", "test", "hf:x@1: only train and test are read, not validation; data.test_part names"),
    ],
)
def test_parts_that_are_not_read_are_named(parts, test, note):
    notes = _notes_on(DataConfig(source="hf:x@1"), dict.fromkeys(parts.split()), test)
    assert [text.startswith(note or "") for text in notes] == [True] * (note is not None)


def test_a_part_that_is_not_there_is_named(saved):
    with refused("config.unknown-name", ConfigError, key="data.test_part", value="dev"):
        open_source(config(saved(), test_part="dev"))


@pytest.mark.parametrize("column", ["bytes", "file"])
def test_columns_of_bytes_are_images(saved, column):
    datasets = pytest.importorskip("datasets")
    folder = saved()
    made = {}
    for name, part in datasets.load_from_disk(str(folder)).items():
        photos = part.cast_column("photo", datasets.Image(decode=False))["photo"]
        files = [photo["bytes"] if column == "bytes" else {"bytes": photo["bytes"], "path": "x"} for photo in photos]
        kind = datasets.Value("binary")
        features = datasets.Features(
            {
                "photo": kind if column == "bytes" else {"bytes": kind, "path": datasets.Value("string")},
                "kind": part.features["kind"],
            }
        )
        made[name] = datasets.Dataset.from_dict({"photo": files, "kind": part["kind"]}, features=features)
    datasets.DatasetDict(made).save_to_disk(str(folder.parent / "raw"))
    assert load(open_source(config(folder.parent / "raw")).x_train)[:, 0, 0, 0].tolist() == [10 * i for i in range(12)]


def test_damaged_rows_are_named_by_their_number(saved):
    folder = saved(broken=5)
    with refused("data.undecodable", DataError, count=1) as caught:
        open_source(config(folder))
    assert "row 5 (not an image, or" in str(caught.value)
    assert len(open_source(config(folder, bad="skip")).x_train) == 11


@pytest.mark.parametrize(
    ("settings", "column"),
    [({"label_column": "sort"}, "sort"), ({"client_column": "who"}, "who")],
)
def test_columns_that_there_are_not_are_named(saved, settings, column):
    with refused("config.unknown-name", ConfigError, column=column):
        open_source(config(saved(), **settings))


def test_a_name_needs_a_revision(tmp_path):
    pytest.importorskip("datasets")
    with refused("config.wrong-type", ConfigError, key="data.source", value="hf:somebody/shops"):
        open_source(DataConfig(source="hf:somebody/shops"))


def test_a_folder_that_is_no_saved_data_set_is_refused_in_one_line(tmp_path):
    pytest.importorskip("datasets")
    with refused("data.not-found", DataError, value=f"hf:{tmp_path}") as caught:
        open_source(DataConfig(source=f"hf:{tmp_path}"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("label", [-1, 3, None])
def test_an_image_without_a_label_is_of_no_class(label):
    names, codes = class_codes([2, 0], ["shoe", "bag", "hat"], "hf:x")
    assert (names, codes.tolist()) == (["shoe", "bag", "hat"], [2, 0])
    assert class_codes([-1, 3], None, "hf:x")[0] == ["-1", "3"]  # numbers without names
    with refused("data.malformed", DataError, value="hf:x", label=label):
        class_codes([label], ["shoe", "bag", "hat"], "hf:x")


@pytest.mark.parametrize(
    ("values", "names", "codes"),
    [
        ([10, 2, 0, 10, 1], ["0", "1", "2", "10"], [3, 2, 0, 3, 1]),
        (["10", "2", "b"], ["10", "2", "b"], [0, 1, 2]),  # texts have the order of the alphabet
        ([True, False], ["False", "True"], [1, 0]),
    ],
)
def test_whole_numbers_have_the_order_of_numbers(values, names, codes):
    for found in (name_codes("data.client_column", "hf:x", values), class_codes(values, None, "hf:x")):
        assert found[0] == names
        assert found[1].tolist() == codes


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (None, "data.malformed"),
        ("", "data.malformed"),
        (float("nan"), "data.malformed"),
        ([1], "data.malformed"),
        (" ", "data.bad-name"),
        ("a\x1b[2J", "data.bad-name"),
    ],
)
def test_clients_and_classes_without_a_name_are_refused(value, code):
    with refused(code, DataError, key="data.client_column", value="hf:x"):
        name_codes("data.client_column", "hf:x", ["wien", value])
    with refused(code, DataError, key="data.label_column", value="hf:x"):
        class_codes(["cat", value], None, "hf:x")


@pytest.mark.parametrize("download", [False, True])
def test_the_network_is_closed_only_while_a_data_set_is_loaded(monkeypatch, download):
    offline = []

    def load_dataset(name, revision):
        offline.append([config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE])
        raise ConnectionError("no such data set")

    config, constants = SimpleNamespace(HF_HUB_OFFLINE=False), SimpleNamespace(HF_HUB_OFFLINE=False)
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    monkeypatch.setitem(sys.modules, "datasets.config", config)
    monkeypatch.setitem(sys.modules, "huggingface_hub.constants", constants)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with refused("data.not-found", DataError, value="hf:somebody/shops@1"):
        open_source(DataConfig(source="hf:somebody/shops@1", download=download))
    assert offline == [[not download] * 2]
    assert not config.HF_HUB_OFFLINE
    assert not constants.HF_HUB_OFFLINE
    assert "HF_HUB_OFFLINE" not in os.environ
