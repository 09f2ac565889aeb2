"""A source of the user's own is checked, and converted where nothing is lost."""

import numpy as np
import pytest
from refusals import refused

import raylt
from raylt.config import DataConfig
from raylt.data import label_maps
from raylt.data.images.cache import Mapped
from raylt.data.label_maps import VOID
from raylt.data.sources.own import checked_source
from raylt.data.sources.sources import open_source
from raylt.errors import DataError


def source(**changes):
    """Return a source of 6 training and 4 test images of 2 classes, with some arguments changed."""
    draws = np.random.default_rng(0)
    arguments = {
        "name": "made",
        "x_train": draws.integers(0, 256, (6, 4, 5, 1), dtype=np.uint8),
        "y_train": np.arange(6) % 2,
        "x_test": draws.integers(0, 256, (4, 4, 5, 1), dtype=np.uint8),
        "y_test": np.arange(4) % 2,
        "class_names": ("a", "b"),
        "mean": (0.5,),
        "std": (0.25,),
    }
    return raylt.Source(**arguments | changes)


def maps(n, value=1, dtype=np.uint8):
    return np.full((n, 4, 5), value, dtype=dtype)


IDS = {"ids": np.arange(6) % 3, "test_ids": np.arange(4) % 3}


@pytest.mark.parametrize(
    ("changes", "array", "words"),
    [
        ({"x_train": np.zeros((6, 4, 5, 1), np.float32)}, "x_train", "x_train is float32 [6, 4, 5, 1]. Return uint8"),
        ({"x_test": np.zeros((4, 4, 5, 1), np.uint16)}, "x_test", "x_test is uint16"),
        ({"x_train": np.zeros((6, 4, 5), np.uint8)}, "x_train", "x_train is uint8 [6, 4, 5]."),
        ({"x_train": [[0]]}, "x_train", "x_train is a list. Return a numpy array."),
        ({"x_train": np.zeros((0, 4, 5, 1), np.uint8), "y_train": np.arange(0)}, "x_train", "x_train has no image"),
        ({"x_test": np.zeros((4, 3, 5, 1), np.uint8)}, "x_test", "images of x_test [3, 5, 1]"),
        ({"y_train": np.arange(5) % 2}, "y_train", "y_train is int64 [5]. Give one integer label for each of the 6"),
        ({"y_test": np.arange(3) % 2}, "y_test", "y_test is int64 [3]."),
        ({"y_train": np.arange(6) % 2 - 1}, "y_train", "labels from -1 to 0, class_names has 2 names"),
        ({"y_test": np.arange(4)}, "y_test", "labels from 0 to 3, class_names has 2 names"),
        ({"y_train": np.array([0, 2**64 - 1] * 3, np.uint64)}, "y_train", "to 18446744073709551615"),
        ({"y_train": [0, 1] * 3}, "y_train", "y_train is a list"),
        ({"y_train": maps(6)}, "y_test", "Give labels of images in both, or label maps in both."),
        ({"y_train": maps(6, 2), "y_test": maps(4)}, "y_train", "labels from 2 to 2"),
        ({"y_train": maps(6), "y_test": maps(4, VOID)}, "y_test", "has no labelled pixel"),
        ({"y_train": maps(6, dtype=np.int64)}, "y_train", "y_train is int64 [6, 4, 5]."),
        ({"class_names": ("a", "a")}, "class_names", "a name twice ('a')"),
        ({"class_names": ("a", "\x1b[31m")}, "class_names", "cannot be printed"),
        ({"class_names": (1, 2)}, "class_names", "a name that is not a string (1)"),
        ({"class_names": "ab"}, "class_names", "class_names is a str ('ab'). Return a tuple of names"),
        ({"class_names": np.array("a")}, "class_names", "class_names is a ndarray"),
        ({"mean": np.array(0.5)}, "mean", "mean is array(0.5)."),
        ({**IDS, "test_ids": np.array(["0", "1", "2", "0"])}, "test_ids", "Give ids of one type."),
        ({"class_names": ("a",)}, "y_train", "class_names has 1 names"),
        ({"mean": (float("nan"),)}, "mean", "mean is (nan,). Return a finite number for each channel"),
        ({"mean": (0.5, 0.5)}, "mean", "of the images (1)."),
        ({"mean": 0.5}, "mean", "mean is 0.5."),
        ({"std": (0,)}, "std", "std is (0,). Return a finite number above 0"),
        ({"std": (-1.0,)}, "std", "std is (-1.0,)"),
        ({"std": (float("inf"),)}, "std", "std is (inf,)"),
        ({**IDS, "ids": np.arange(5)}, "ids", "ids is [5]. Give one id for each of the 6"),
        ({**IDS, "ids": np.arange(6) / 2}, "ids", "ids is float64"),
        ({**IDS, "ids": list(range(6))}, "ids", "ids is a list"),
        ({**IDS, "test_ids": np.array([0, 1, 2, 9])}, "test_ids", "an id that is not in ids (9)"),
        ({**IDS, "test_ids": np.arange(3)}, "test_ids", "test_ids is [3]."),
        ({"test_ids": np.arange(4)}, "ids", "test_ids needs ids"),
        ({**IDS, "client_names": ("x", "x", "y")}, "client_names", "a name twice ('x')"),
        ({**IDS, "client_names": ("x", "y")}, "client_names", "2 names for 3 different ids"),
        ({"notes": "hello"}, "notes", "notes is not a tuple of sentences ('hello')"),
        ({"name": None}, "name", "not a string (None)"),
    ],
)
def test_unusable_data_are_refused_with_the_name_of_their_part(no_guests, changes, array, words):
    raylt.register(lambda config: source(**changes), "mine", kind="source")
    with refused("data.malformed", DataError, key="data.source", value="mine", array=array) as caught:
        open_source(DataConfig(source="mine"))
    assert str(caught.value).startswith("data.source: the source mine returned ")
    assert words in str(caught.value)


def test_a_function_that_returns_nothing_is_refused():
    with refused("data.malformed", DataError, value="mine") as caught:
        checked_source("mine", None)
    assert "Return a raylt.Source" in str(caught.value)


@pytest.mark.parametrize("dtype", ["u1", "i4", ">i8", "u8"])
def test_labels_of_other_integer_types_become_int64(dtype):
    checked = checked_source("mine", source(y_train=(np.arange(6) % 2).astype(dtype)))
    assert checked.y_train.dtype == np.dtype(np.int64)
    assert checked.y_train.tolist() == [0, 1, 0, 1, 0, 1]


def test_lists_become_tuples_and_numpy_s_numbers_floats():
    checked = checked_source(
        "mine",
        source(
            class_names=["a", "b"], mean=np.array([0.5]), std=[1], notes=["A note."], **IDS, client_names=list("xyz")
        ),
    )
    assert (checked.class_names, checked.client_names, checked.notes) == (("a", "b"), ("x", "y", "z"), ("A note.",))
    assert (checked.mean, checked.std) == ((0.5,), (1.0,))
    assert type(checked.mean[0]) is type(checked.std[0]) is float


@pytest.mark.parametrize("values", [["x", "y"], [4, 7]])
def test_strings_or_integers_in_an_array_of_objects_are_ids(values):
    checked = checked_source("mine", source(ids=np.array(values * 3, dtype=object)))
    assert checked.ids is not None
    assert checked.ids.dtype.kind in "iU"
    assert checked.ids.tolist() == values * 3


def test_a_source_without_test_images_gives_empty_arrays():
    whole = source()
    checked = checked_source("mine", source(x_test=whole.x_train[:0], y_test=whole.y_train[:0]))
    assert checked.x_test.shape == (0, 4, 5, 1)


def test_mapped_label_maps_are_checked_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(label_maps, "CHUNK_SIZE", 40)  # two maps
    y = maps(6, VOID)
    y[5] = 2
    np.save(tmp_path / "y.npy", y)
    read = []
    monkeypatch.setattr(Mapped, "load", lambda part: read.append(len(part)) or part[:])
    with refused("data.malformed", DataError, array="y_train") as caught:
        checked_source("mine", source(y_train=Mapped(str(tmp_path / "y.npy"), np.arange(6)), y_test=maps(4)))
    assert "labels from 2 to 2" in str(caught.value)
    assert max(read) <= 2
