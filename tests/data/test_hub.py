"""Data sets of the `datasets` library, saved in a folder."""

import io
import sys

import pytest
from PIL import Image

from raylt.config import DataConfig
from raylt.data.cache import load
from raylt.data.hub import class_of
from raylt.data.sources import open_source
from raylt.data.task import build_task
from raylt.errors import ConfigError, DataError


def test_without_the_library_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"hf:x@1: needs the datasets library; pip install raylt\[hf\]"):
        open_source(DataConfig(source="hf:x@1"))


@pytest.fixture
def saved(tmp_path):
    """Two parts of red images, class and shop with each; saved by what `save` gets."""
    datasets = pytest.importorskip("datasets")

    def png(level):
        stream = io.BytesIO()
        Image.new("RGB", (12, 10), (level, 0, 0)).save(stream, "PNG")
        return {"bytes": stream.getvalue(), "path": None}

    def save(parts=("train", "test"), broken=None, **columns):
        made = {}
        for part, n in zip(parts, (12, 4), strict=False):
            rows = {"photo": [png(10 * i + (part == "test")) for i in range(n)], "kind": [i % 3 for i in range(n)],
                    "shop": [("wien", "linz")[i % 2] for i in range(n)]} | columns
            if broken is not None and part == "train":
                rows["photo"][broken] = {"bytes": b"no image", "path": None}
            features = datasets.Features({"photo": datasets.Image(), "shop": datasets.Value("string"),
                                          "kind": datasets.ClassLabel(names=["shoe", "bag", "hat"])})
            made[part] = datasets.Dataset.from_dict(rows, features=features)
        datasets.DatasetDict(made).save_to_disk(str(tmp_path / "saved"))
        return tmp_path / "saved"

    return save


def config(folder, **settings):
    return DataConfig(source=f"hf:{folder}", root=str(folder.parent / "root"), size=8, **settings)


def test_images_classes_and_clients_are_those_of_the_columns(saved):
    task = build_task(config(saved(), client_column="shop"))
    assert task.class_names == ("shoe", "bag", "hat")           # in the order of the data set
    assert task.client_names == ("linz", "wien")
    assert [load(shard.x)[:, 0, 0, 0].tolist() for shard in task.shards] == [
        [10, 30, 50, 70, 90, 110], [0, 20, 40, 60, 80, 100]]
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


def test_damaged_rows_are_told_by_their_number(saved):
    folder = saved(broken=5)
    with pytest.raises(DataError, match=r"1 images cannot be decoded: row 5 \(it is none, or"):
        open_source(config(folder))
    assert len(open_source(config(folder, bad="skip")).x_train) == 11


@pytest.mark.parametrize(("settings", "message"), [
    ({"label_column": "sort"}, "has no column 'sort'; there are photo, kind, shop"),
    ({"client_column": "who"}, "has no column 'who'"),
])
def test_columns_that_there_are_not_are_named(saved, settings, message):
    with pytest.raises(ConfigError, match=message):
        open_source(config(saved(), **settings))


def test_a_name_needs_a_revision(tmp_path):
    pytest.importorskip("datasets")
    with pytest.raises(ConfigError, match="write hf:NAME@REVISION"):
        open_source(DataConfig(source="hf:somebody/shops"))


def test_a_folder_that_is_no_saved_data_set_is_refused_in_one_line(tmp_path):
    pytest.importorskip("datasets")
    with pytest.raises(DataError, match=f"hf:{tmp_path}: cannot be loaded") as caught:
        open_source(DataConfig(source=f"hf:{tmp_path}"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("label", [-1, 3, None])
def test_an_image_without_a_label_is_of_no_class(label):
    assert class_of(2, ["shoe", "bag", "hat"], "hf:x") == "hat"
    assert class_of(-1, None, "hf:x") == "-1"               # a plain number
    with pytest.raises(DataError, match=f"hf:x: an image has the label {label}, which is none of its 3 classes"):
        class_of(label, ["shoe", "bag", "hat"], "hf:x")
