import shutil

import numpy as np
import pytest
from PIL import Image

from raylt.config import DataConfig
from raylt.data.cache import Mapped, load
from raylt.data.sources import channel_statistics, group_thresholds, open_source
from raylt.errors import ConfigError, DataError


def write_tree(folder, counts, size=(12, 10)):
    """One-coloured PNGs folder/<class>/<i>.png; the red value of image i of the c-th class is 50 * c + i."""
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
    def open_changed(**changes):
        arrays = {key: value for key, value in (ARRAYS | changes).items() if value is not None}
        np.savez(tmp_path / "it.npz", **arrays)
        return open_source(DataConfig(source=f"npz:{tmp_path / 'it.npz'}"))

    return open_changed


def test_digits_are_the_1797_with_30_of_each_class_held_out():
    source = open_source(DataConfig())
    # scikit-learn's classes have 178 182 177 183 181 182 181 179 174 180 images
    assert np.bincount(source.y_train).tolist() == [148, 152, 147, 153, 151, 152, 151, 149, 144, 150]
    assert np.bincount(source.y_test).tolist() == [30] * 10
    assert source.x_train.shape == (1497, 8, 8, 1)
    assert load(source.x_train).max() == 240       # 16 * 15


def test_the_test_set_of_digits_does_not_depend_on_the_seed():
    first, second = (load(open_source(DataConfig(seed=seed)).x_test) for seed in (0, 1))
    assert (first == second).all()


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "fashion_mnist"])
def test_absent_torchvision_sets_tell_where_they_were_looked_for(name, tmp_path):
    with pytest.raises(DataError, match=rf"{name}: no intact copy under {tmp_path}; set data\.download=true"):
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
            b"\0\0\x08\x01" + np.array([n], ">i4").tobytes() + bytes(range(n)))
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
    with pytest.raises(DataError, match="no intact copy"):
        open_source(fashion_mnist)


def test_classes_of_a_folder_are_sorted_and_its_images_mapped(config, pets):
    source = open_source(config)
    assert source.class_names == ("cat", "dog")
    assert source.y_train.tolist() == [0, 0, 1, 1, 1]
    assert source.y_test.tolist() == [0, 1]
    assert isinstance(source.x_train, Mapped)
    assert source.x_train.shape == (5, 8, 8, 3)
    assert load(source.x_train)[:, 0, 0, 0].tolist() == [50, 51, 0, 1, 2]     # written as dog, cat
    # green is 100 everywhere, so its deviation would be 0; red has the mean (50 + 51 + 0 + 1 + 2) / 5 = 20.8
    assert source.mean == pytest.approx((20.8 / 255, 100 / 255, 0))
    assert source.std[1] == 1 / 255


def test_a_broken_image_in_a_folder_is_named(config, pets):
    (pets / "train/cat/1.png").write_bytes(b"")
    with pytest.raises(DataError, match=r"1 images cannot be decoded: .*train/cat/1\.png \(is empty\)"):
        open_source(config)


def test_a_folder_that_is_not_there_is_named(config):
    with pytest.raises(DataError, match=r"pets: no such folder; expected are <client>/<class>"):
        open_source(config)


def test_a_folder_without_classes_is_refused(config, pets):
    shutil.rmtree(pets / "train")
    (pets / "train").mkdir()
    with pytest.raises(DataError, match="pets/train: no images in its folders"):
        open_source(config)


def test_a_folder_whose_classes_are_empty_is_refused(config, pets):
    for file in (pets / "test").rglob("*.png"):
        file.unlink()
    with pytest.raises(DataError, match="pets/test: no images"):
        open_source(config)


def test_a_folder_whose_test_set_has_other_classes_is_refused(config, pets):
    (pets / "test/cat").rename(pets / "test/cow")
    with pytest.raises(DataError, match=r"differ in \['cat', 'cow'\]"):
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
    with pytest.raises(DataError, match=r"data\.imbalance = 20: .* set data\.imbalance=1"):
        open_source(imagenet_lt.model_copy(update={"imbalance": 20.0}))


@pytest.mark.parametrize(("text", "message"), [
    (None, "cannot be read"),
    ("", "empty"),
    ("train/n07/1.png 0\nnonsense\n", r"line 2: 'nonsense' is not"),
    ("train/n07/1.png 0\ntrain/n02/0.png 2\n", r"must be 0\.\.C-1"),
    ("train/n07/1.png 0\n", r"cover those of ImageNet_LT_test\.txt"),
])
def test_damaged_lists_of_imagenet_lt_are_refused(imagenet_lt, tmp_path, text, message):
    path = tmp_path / "imagenet_lt/ImageNet_LT_train.txt"
    path.unlink()
    if text is not None:
        path.write_text(text)
    with pytest.raises(DataError, match=message):
        open_source(imagenet_lt)


def test_an_npz_of_grey_images_gets_a_channel_axis(open_npz):
    source = open_npz()
    assert source.x_train.shape == (5, 4, 6, 1)
    assert source.class_names == ("a", "b")
    assert source.ids is None
    # pixels are 0..119: mean 59.5, variance (120^2 - 1) / 12
    assert source.mean == pytest.approx((59.5 / 255,))
    assert source.std == pytest.approx((np.sqrt((120**2 - 1) / 12) / 255,))


def test_an_npz_may_record_ids_and_use_small_integers(open_npz):
    source = open_npz(id_train=np.array([3, 3, 9, 9, 3]), y_train=ARRAYS["y_train"].astype(np.uint8))
    assert source.ids is not None
    assert source.ids.tolist() == [3, 3, 9, 9, 3]
    assert source.y_train.dtype == np.int64


@pytest.mark.parametrize(("changes", "message"), [
    ({"y_test": None, "x_test": None}, "has no x_test, y_test;"),
    ({"x_train": ARRAYS["x_train"].astype(np.float32)}, r"x_train is float32 \[5, 4, 6\]; uint8"),
    ({"x_train": np.zeros((5, 3, 32, 32), np.uint8)}, r"x_train is uint8 \[5, 3, 32, 32\].* at most 4 channels"),
    ({"x_train": np.zeros((0, 4, 6), np.uint8), "y_train": np.zeros(0, int)}, "at least one image"),
    ({"x_test": np.zeros((2, 4, 5), np.uint8)}, r"x_train are \[4, 6, 1\], of x_test \[4, 5, 1\]"),
    ({"y_train": np.array([0, 1])}, r"y_train is int64 \[2\]; one integer label for each of the 5 images"),
    ({"y_test": np.array([0.0, 1.0])}, "y_test is float64"),
    ({"y_train": np.array([0, 1, 2, 0, 1])}, "labels from 0 to 2; class_names has 2 names, so 0 to 1"),
    ({"y_test": np.array([0, -1])}, "y_test holds labels from -1 to 0"),
    ({"class_names": np.array([1, 2])}, r"class_names is int64 \[2\]; a row of strings"),
    ({"class_names": np.array(["a", "b"], dtype=object)}, "without Python objects"),
    ({"id_train": np.arange(4)}, r"id_train is \[4\]; one id for each of the 5"),
])
def test_a_damaged_npz_is_refused(open_npz, changes, message):
    with pytest.raises(DataError, match=message) as caught:
        open_npz(**changes)
    assert "\n" not in str(caught.value)


def test_an_npz_that_cannot_be_read_is_named(open_npz, tmp_path):
    open_npz()
    whole = (tmp_path / "it.npz").read_bytes()
    np.save(tmp_path / "single.npy", np.arange(3))
    flipped = bytearray(whole)
    flipped[whole.index(b"x_train.npy") + 200] ^= 255
    broken = {"cut": whole[:len(whole) // 2], "text": b"hello", "empty": b"", "flipped": bytes(flipped),
              "single": (tmp_path / "single.npy").read_bytes()}
    for name, content in broken.items():
        (tmp_path / name).write_bytes(content)
    for name in [*broken, "absent"]:
        with pytest.raises(DataError, match=f"{name}: not a readable npz file"):
            open_source(DataConfig(source=f"npz:{tmp_path / name}"))


@pytest.mark.parametrize(("source", "message"), [
    ("cifar1O", "no such source; did you mean cifar10"),
    ("folders:/x", "did you mean folder"),
    ("quux", "no such source; There are: digits, "),
    ("npz:", "write npz:PATH"),
    ("folder", "write folder:PATH"),
    ("digits:/x", "digits takes no path"),
])
def test_unknown_sources_are_refused_with_the_remedy(source, message):
    with pytest.raises(ConfigError, match=message):
        open_source(DataConfig(source=source))


def test_statistics_are_those_of_a_direct_computation():
    x = np.random.default_rng(0).integers(0, 256, (5000, 3, 2, 3), dtype=np.uint8)
    mean, std = channel_statistics(x)
    assert mean == pytest.approx((x / 255).mean((0, 1, 2)), abs=1e-12)
    assert std == pytest.approx((x / 255).std((0, 1, 2)), abs=1e-12)


def test_group_thresholds_are_the_literature_s_unless_configured():
    assert group_thresholds(DataConfig(source="cifar10")) == (200, 1000)
    assert group_thresholds(DataConfig(source="digits")) == (20, 60)
    assert group_thresholds(DataConfig(source="cifar100")) == (20, 100)
    assert group_thresholds(DataConfig(groups=(3, 4))) == (3, 4)
    with pytest.raises(ConfigError, match=r"data\.groups = \[9, 4\]"):
        group_thresholds(DataConfig(groups=(9, 4)))


def test_imagenet_lt_is_fitted_as_the_settings_say(imagenet_lt):
    cropped, padded = (load(open_source(imagenet_lt.model_copy(update={"fit": fit})).x_train)[0, :, :, 1]
                       for fit in ("crop", "pad"))
    assert (cropped == 100).all()
    assert (padded == 0).any()                  # of 12 by 10 pixels: below a wide image there is nothing
