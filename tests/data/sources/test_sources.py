import hashlib
import shutil
import sys

import numpy as np
import pytest
from PIL import Image
from refusals import refused

import raylt
from raylt.config import DataConfig
from raylt.data.images.cache import Mapped, load
from raylt.data.sources.arrays import PUBLISHED
from raylt.data.sources.huggingface import class_codes
from raylt.data.sources.sources import (
    _load_digits,
    channel_statistics,
    check_size,
    group_thresholds,
    open_source,
)
from raylt.errors import ConfigError, DataError


def write_tree(folder, counts, size=(12, 10)):
    """Save one-coloured PNGs folder/<class>/<i>.png; image i of the c-th class has the red value 50 * c + i."""
    for c, (name, n) in enumerate(counts.items()):
        (folder / name).mkdir(parents=True)
        for i in range(n):
            Image.new("RGB", size, (50 * c + i, 100, 0)).save(folder / name / f"{i}.png")


@pytest.fixture
def config(tmp_path):
    return DataConfig(source=f"folder:{tmp_path / 'pets'}", root=str(tmp_path / "root"), size=8)


@pytest.fixture
def pets(tmp_path):
    write_tree(tmp_path / "pets/train", {"dog": 3, "cat": 2})
    write_tree(tmp_path / "pets/test", {"dog": 1, "cat": 1})
    return tmp_path / "pets"


ARRAYS = {
    "x_train": np.arange(5 * 4 * 6, dtype=np.uint8).reshape(5, 4, 6),
    "y_train": np.array([0, 1, 1, 0, 1]),
    "x_test": np.zeros((2, 4, 6), dtype=np.uint8),
    "y_test": np.array([0, 1]),
    "class_names": np.array(["a", "b"]),
}


@pytest.fixture
def open_npz(tmp_path):
    def open_changed(depth=None, **changes):
        arrays = {key: value for key, value in (ARRAYS | changes).items() if value is not None}
        np.savez(tmp_path / "it.npz", **arrays)
        return open_source(DataConfig(source=f"npz:{tmp_path / 'it.npz'}", depth=depth))

    return open_changed


def test_digits_are_the_1797_with_30_of_each_class_held_out():
    source = open_source(DataConfig())
    # scikit-learn's classes have 178 182 177 183 181 182 181 179 174 180 images
    assert np.bincount(source.y_train).tolist() == [148, 152, 147, 153, 151, 152, 151, 149, 144, 150]
    assert np.bincount(source.y_test).tolist() == [30] * 10
    assert source.x_train.shape == (1497, 8, 8, 1)
    assert load(source.x_train).max() == 240  # 16 * 15


@pytest.mark.parametrize("found", [True, False])
def test_digits_are_scikit_learns_and_its_package_is_imported_only_where_its_file_is_not_found(monkeypatch, found):
    from sklearn.datasets import load_digits

    expected = load_digits(return_X_y=True)
    if found:
        monkeypatch.setitem(sys.modules, "sklearn.datasets", None)  # importing the module fails
    else:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert all(map(np.array_equal, _load_digits(), expected))


def test_the_test_set_of_digits_does_not_depend_on_the_seed():
    first, second = (open_source(DataConfig(seed=seed)) for seed in (0, 1))
    assert (load(first.x_test) == load(second.x_test)).all()
    # the same as in earlier versions, with which recorded runs were judged
    sha256 = hashlib.sha256(load(first.x_test).tobytes() + load(first.y_test).tobytes()).hexdigest()
    assert sha256[:16] == "64e217fa981da41e"


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "fashion_mnist"])
def test_absent_torchvision_sets_tell_where_they_were_looked_for(name, tmp_path):
    with refused("data.not-found", DataError, value=name, path=str(tmp_path)):
        open_source(DataConfig(source=name, root=str(tmp_path)))


@pytest.fixture
def fashion_mnist(tmp_path):
    raw = tmp_path / "FashionMNIST/raw"
    raw.mkdir(parents=True)
    for part, n in (("train", 3), ("t10k", 2)):
        # IDX: two zero bytes, 8 for uint8, the number of axes, each axis as big-endian int32, then the bytes
        images = b"\0\0\x08\x03" + np.array([n, 28, 28], ">i4").tobytes() + bytes(range(n)) * 784
        (raw / f"{part}-images-idx3-ubyte").write_bytes(images)
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(
            b"\0\0\x08\x01" + np.array([n], ">i4").tobytes() + bytes(range(n))
        )
    return DataConfig(source="fashion_mnist", root=str(tmp_path))


def test_a_torchvision_set_is_read_as_it_is(fashion_mnist):
    source = open_source(fashion_mnist)
    assert source.x_train.shape == (3, 28, 28, 1)
    assert source.y_train.tolist() == [0, 1, 2]
    assert len(source.y_test) == 2
    assert (len(source.class_names), source.mean, source.std) == (10, (0.2860,), (0.3530,))


def test_a_damaged_torchvision_set_is_refused(fashion_mnist, tmp_path):
    path = tmp_path / "FashionMNIST/raw/train-images-idx3-ubyte"
    path.write_bytes(path.read_bytes()[:-5])
    with refused("data.not-found", DataError, value="fashion_mnist"):
        open_source(fashion_mnist)


@pytest.mark.parametrize(
    ("part", "labels", "words"),
    [
        ("train", [0, 1], "training part: 2 labels for 3 images"),
        ("t10k", [0, 1, 2], "test part: 3 labels for 2 images"),
        ("train", [0, 255, 1], "labels from 0 to 255 for 10 classes"),
    ],
)
def test_a_torchvision_set_whose_labels_do_not_fit_its_images_is_refused(fashion_mnist, tmp_path, part, labels, words):
    header = b"\0\0\x08\x01" + np.array([len(labels)], ">i4").tobytes()
    (tmp_path / f"FashionMNIST/raw/{part}-labels-idx1-ubyte").write_bytes(header + bytes(labels))
    with refused("data.malformed", DataError, value="fashion_mnist") as caught:
        open_source(fashion_mnist)
    assert words in str(caught.value)


def test_classes_of_a_folder_are_sorted_and_its_images_mapped(config, pets):
    source = open_source(config)
    assert source.class_names == ("cat", "dog")
    assert source.y_train.tolist() == [0, 0, 1, 1, 1]
    assert source.y_test.tolist() == [0, 1]
    assert isinstance(source.x_train, Mapped)
    assert source.x_train.shape == (5, 8, 8, 3)
    assert load(source.x_train)[:, 0, 0, 0].tolist() == [50, 51, 0, 1, 2]  # the folders are written as dog, cat
    # green is 100 everywhere, so its deviation is 0; red has the mean (50 + 51 + 0 + 1 + 2) / 5 = 20.8
    assert source.mean == pytest.approx((20.8 / 255, 100 / 255, 0))
    assert source.std[1] == 1 / 255


def test_a_broken_image_in_a_folder_is_named(config, pets):
    (pets / "train/cat/1.png").write_bytes(b"")
    with refused("data.undecodable", DataError, count=1) as caught:
        open_source(config)
    assert "train/cat/1.png (is empty)" in str(caught.value)


def test_a_folder_that_is_not_there_is_named(config):
    with refused("data.not-found", DataError, path=config.source.removeprefix("folder:")):
        open_source(config)


def test_a_folder_without_classes_is_refused(config, pets):
    shutil.rmtree(pets / "train")
    (pets / "train").mkdir()
    with refused("data.wrong-layout", DataError, path=str(pets / "train")):
        open_source(config)


def test_a_folder_whose_classes_are_empty_is_refused(config, pets):
    for file in (pets / "test").rglob("*.png"):
        file.unlink()
    with refused("data.wrong-layout", DataError, path=str(pets / "test")):
        open_source(config)


def test_a_folder_whose_test_set_has_other_classes_is_refused(config, pets):
    (pets / "test/cat").rename(pets / "test/cow")
    with refused("data.wrong-layout", DataError, path=str(pets), name="cow"):
        open_source(config)


def test_cinic10_is_read_at_its_own_size_and_normalised_as_published(tmp_path):
    for part in ("train", "test", "valid"):
        write_tree(tmp_path / "cinic10" / part, {"airplane": 2, "bird": 1}, size=(32, 32))
    source = open_source(DataConfig(source="cinic10", root=str(tmp_path)))
    assert source.x_train.shape == (3, 32, 32, 3)
    assert source.y_train.tolist() == [0, 0, 1]
    assert source.mean[0] == 0.47889522


@pytest.fixture
def imagenet_lt(tmp_path):
    folder = tmp_path / "imagenet_lt"
    write_tree(folder / "train", {"n07": 2, "n02": 1})
    write_tree(folder / "val", {"n07": 1, "n02": 1})
    (folder / "ImageNet_LT_train.txt").write_text("train/n07/1.png 0\ntrain/n02/0.png 1\ntrain/n07/0.png 0\n")
    (folder / "ImageNet_LT_test.txt").write_text("val/n02/0.png 1\nval/n07/0.png 0\n")
    return DataConfig(source="imagenet_lt", root=str(tmp_path), size=8, imbalance=1)


def test_imagenet_lt_follows_its_lists(imagenet_lt):
    source = open_source(imagenet_lt)
    assert source.class_names == ("n07", "n02")
    assert source.y_train.tolist() == [0, 1, 0]
    assert load(source.x_train)[:, 0, 0, 0].tolist() == [1, 50, 0]
    assert source.y_test.tolist() == [1, 0]
    assert source.mean == (0.485, 0.456, 0.406)


def test_imagenet_lt_is_never_thinned(imagenet_lt):
    with refused("config.conflict", DataError, key="data.imbalance", value=20):
        open_source(imagenet_lt.model_copy(update={"imbalance": 20.0}))


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        (None, "data.not-found", "cannot be read"),
        ("", "data.malformed", "empty"),
        ("train/n07/1.png 0\nnonsense\n", "data.malformed", "line 2"),
        ("train/n07/1.png 0\ntrain/n02/0.png 2\n", "data.malformed", "must be 0..C-1"),
        ("train/n07/1.png 0\n", "data.malformed", "cover the labels of ImageNet_LT_test.txt"),
    ],
)
def test_damaged_lists_of_imagenet_lt_are_refused(imagenet_lt, tmp_path, text, code, words):
    path = tmp_path / "imagenet_lt/ImageNet_LT_train.txt"
    path.unlink()
    if text is not None:
        path.write_text(text)
    with refused(code, DataError) as caught:
        open_source(imagenet_lt)
    assert words in str(caught.value)


def test_an_npz_of_grey_images_gets_a_channel_axis(open_npz):
    source = open_npz()
    assert source.x_train.shape == (5, 4, 6, 1)
    assert source.class_names == ("a", "b")
    assert source.ids is None
    # pixels are 0..119: mean 59.5, variance (120^2 - 1) / 12
    assert source.mean == pytest.approx((59.5 / 255,))
    assert source.std == pytest.approx((np.sqrt((120**2 - 1) / 12) / 255,))


@pytest.mark.parametrize(
    ("kind", "depth", "factor"),
    [("u2", None, 257), ("u2", 12, 4095 / 255), ("i8", 8, 1), ("f4", None, 1 / 255), ("f8", 8, 1)],
)
def test_an_npz_of_deeper_images_is_scaled_by_its_type_or_by_the_depth(open_npz, kind, depth, factor):
    scaled = {key: ARRAYS[key].astype(float) * factor for key in ("x_train", "x_test")}
    if factor > 1:
        scaled = {key: np.floor(value + 0.5) for key, value in scaled.items()}
    source = open_npz(depth, **{key: value.astype(kind) for key, value in scaled.items()})
    assert source.x_train[..., 0].tolist() == ARRAYS["x_train"].tolist()


def test_an_npz_of_deeper_images_gets_a_notice_of_dark_images_and_of_different_types(open_npz):
    light = np.full((3, 4, 6), 60_000, np.uint16)
    dark = np.concatenate([light, np.full((2, 4, 6), 4095, np.uint16)])
    (note,) = open_npz(x_train=dark, x_test=light[:2]).notes
    assert note.startswith("2 of 5 images of x_train use less than half of the full scale of uint16; set data.depth")
    assert not open_npz(16, x_train=dark, x_test=light[:2]).notes
    assert not open_npz(x_train=dark[[0, 1, 2, 0, 1]].astype(">u2"), x_test=light[:2]).notes
    assert not open_npz().notes
    (note,) = open_npz(x_train=dark[[0, 1, 2, 0, 1]]).notes
    assert note.startswith("x_train is uint16 and x_test is uint8, ")
    white = np.ones((5, 4, 6))
    assert not open_npz(x_train=white.astype("f4"), x_test=white[:2]).notes  # both types have white at 1


def test_an_npz_of_wide_integers_without_a_depth_is_refused(open_npz):
    with refused("data.malformed", DataError, array="x_train") as caught:
        open_npz(x_train=ARRAYS["x_train"].astype(np.int64))
    assert "data.depth" in str(caught.value)


def test_an_npz_may_record_ids_and_use_small_integers(open_npz):
    source = open_npz(id_train=np.array([3, 3, 9, 9, 3]), y_train=ARRAYS["y_train"].astype(np.uint8))
    assert source.ids is not None
    assert source.ids.tolist() == [3, 3, 9, 9, 3]
    assert source.y_train.dtype == np.int64


@pytest.mark.parametrize(
    ("changes", "array", "words"),
    [
        ({"y_test": None, "x_test": None}, "x_test", "has no x_test, y_test."),
        (
            {"x_train": ARRAYS["x_train"].astype(np.float32)},
            "x_train",
            "x_train is float32 and has greys from 0 to 119",
        ),
        ({"x_train": np.zeros((5, 3, 32, 32), np.uint8)}, "x_train", "at most 4 channels"),
        ({"x_train": np.zeros((0, 4, 6), np.uint8), "y_train": np.zeros(0, int)}, "x_train", "at least one image"),
        ({"x_test": np.zeros((2, 4, 5), np.uint8)}, "x_test", "x_train are [4, 6, 1], images of x_test [4, 5, 1]"),
        ({"y_train": np.array([0, 1])}, "y_train", "y_train is int64 [2]. Give one integer label for each of the 5"),
        ({"y_test": np.array([0.0, 1.0])}, "y_test", "y_test is float64"),
        ({"y_train": np.array([0, 1, 2, 0, 1])}, "y_train", "labels from 0 to 2, class_names has 2 names"),
        ({"y_test": np.array([0, -1])}, "y_test", "labels from -1 to 0"),
        ({"class_names": np.array([1, 2])}, "class_names", "class_names is int64 [2]"),
        ({"class_names": np.array(["a", "b"], dtype=object)}, None, "without Python objects"),
        ({"id_train": np.arange(4)}, "id_train", "id_train is [4]. Give one id for each of the 5"),
    ],
)
def test_a_damaged_npz_is_refused(open_npz, changes, array, words):
    with refused("data.malformed", DataError, array=array) as caught:
        open_npz(**changes)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_npz_that_cannot_be_read_is_named(open_npz, tmp_path):
    open_npz()
    whole = (tmp_path / "it.npz").read_bytes()
    np.save(tmp_path / "single.npy", np.arange(3))
    flipped = bytearray(whole)
    flipped[whole.index(b"x_train.npy") + 200] ^= 255
    broken = {
        "cut": whole[: len(whole) // 2],
        "text": b"hello",
        "empty": b"",
        "flipped": bytes(flipped),
        "single": (tmp_path / "single.npy").read_bytes(),
    }
    for name, content in broken.items():
        (tmp_path / name).write_bytes(content)
    for name in [*broken, "absent"]:
        code = "data.not-found" if name == "absent" else "data.malformed"
        with refused(code, DataError, path=str(tmp_path / name)):
            open_source(DataConfig(source=f"npz:{tmp_path / name}"))


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("cifar1O", "Did you mean cifar10?"),
        ("folders:/x", "Did you mean folder?"),
        ("quux", "There are: digits, "),
        ("npz:", "Write npz:PATH"),
        ("folder", "Write folder:PATH"),
        ("digits:/x", "digits takes no path"),
    ],
)
def test_unknown_sources_are_refused_with_the_remedy(source, words):
    with refused("config.unknown-name", ConfigError, key="data.source", value=source) as caught:
        open_source(DataConfig(source=source))
    assert words in str(caught.value)


def test_statistics_are_those_of_a_direct_computation():
    x = np.random.default_rng(0).integers(0, 256, (5000, 3, 2, 3), dtype=np.uint8)
    mean, std = channel_statistics(x)
    assert mean == pytest.approx((x / 255).mean((0, 1, 2)), abs=1e-12)
    assert std == pytest.approx((x / 255).std((0, 1, 2)), abs=1e-12)


def test_statistics_of_mapped_images_are_those_of_two_thousand_from_the_first_to_the_last(tmp_path):
    x = (np.arange(5000) ** 2 // 98_100).astype(np.uint8)[:, None, None, None]
    np.save(tmp_path / "x.npy", x)
    read = x[[i * 4999 // 1999 for i in range(2000)]] / 255
    mean, std = channel_statistics(Mapped(str(tmp_path / "x.npy"), np.arange(5000)))
    assert mean == pytest.approx(read.mean((0, 1, 2)), abs=1e-12)
    assert std == pytest.approx(read.std((0, 1, 2)), abs=1e-12)
    assert (mean, std) != channel_statistics(x)


def test_published_means_and_deviations_are_those_of_the_list():
    """No equation has these numbers: another digit would shift all pixels of a run and change no other test."""
    cifar = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
    imagenet = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    assert {
        "cifar10": cifar,
        "cifar100": cifar,
        "fashion_mnist": ((0.2860,), (0.3530,)),
        "cinic10": ((0.47889522, 0.47227842, 0.43047404), (0.24205776, 0.23828046, 0.25874835)),
        "imagenet_lt": imagenet,
        "camvid": imagenet,
        "cityscapes": imagenet,
    } == PUBLISHED


def test_group_thresholds_are_the_literature_s_unless_configured():
    assert group_thresholds(DataConfig(), 5000) == (200, 1000)
    assert group_thresholds(DataConfig(), 153) == (20, 60)
    assert group_thresholds(DataConfig(), 500) == group_thresholds(DataConfig(), 1280) == (20, 100)
    assert group_thresholds(DataConfig(groups=(3, 4)), 5000) == (3, 4)


@pytest.mark.parametrize(
    ("groups", "remedy"),
    [((9, 4), "Put the smaller number first."), ((-5, 19), "Give numbers from 0."), ((3, -1), "smaller number first")],
)
def test_group_thresholds_that_are_out_of_order_or_negative_are_refused(groups, remedy):
    with refused("config.out-of-range", ConfigError, key="data.groups", value=[*groups]) as caught:
        group_thresholds(DataConfig(groups=groups), 100)
    assert remedy in str(caught.value)


def test_imagenet_lt_is_fitted_as_the_settings_say(imagenet_lt):
    cropped, padded = (
        load(open_source(imagenet_lt.model_copy(update={"fit": fit})).x_train)[0, :, :, 1] for fit in ("crop", "pad")
    )
    assert (cropped == 100).all()
    assert (padded == 0).any()  # the image of 12 x 10 pixels is padded below


@pytest.mark.parametrize(
    ("changes", "array"),
    [
        ({"y_train": np.eye(4, dtype=np.int64)[:, :3]}, "y_train"),  # several labels for each image
        ({"y_train": np.eye(4, dtype=bool)}, "y_train"),
        ({"y_test": np.array([0.5, 1.5])}, "y_test"),  # regression
        ({"x_train": np.zeros((4, 7), np.float32)}, "x_train"),  # a table
        ({"x_train": np.array(["a sentence"] * 4)}, "x_train"),  # text
    ],
)
def test_problems_that_are_not_of_images_and_classes_are_refused_by_name(changes, array, tmp_path):
    arrays = {
        "x_train": np.zeros((4, 8, 8), np.uint8),
        "y_train": np.array([0, 1, 0, 1]),
        "x_test": np.zeros((2, 8, 8), np.uint8),
        "y_test": np.array([0, 1]),
        "class_names": np.array(["a", "b"]),
    }
    np.savez(tmp_path / "it.npz", **arrays | changes)
    with refused("data.malformed", DataError, array=array) as caught:
        open_source(DataConfig(source=f"npz:{tmp_path / 'it.npz'}"))
    assert "raylt does image classification and segmentation" in str(caught.value)


@pytest.mark.parametrize("label", [[1, 0, 1], 0.5, {"box": 1}])
def test_labels_of_a_hub_that_are_no_classes_are_refused(label):
    with refused("data.malformed", DataError, key="data.label_column"):
        class_codes([label], None, "hf:it@1")


def test_a_size_that_arrays_would_ignore_is_refused_before_a_run():
    for source in ("digits", "npz:it.npz"):
        with refused("config.conflict", ConfigError, key="data.size", value=32):
            check_size(DataConfig(source=source, size=32))
        check_size(DataConfig(source=source))
    check_size(DataConfig(source="folder:shops", size=32))
    with refused("config.conflict", ConfigError, key="data.size", value=32):
        raylt.run("fedavg", data="digits", overrides=["data.size=32"], fleet="local")
