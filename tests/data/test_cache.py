import pickle
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from raylt.data.cache import Mapped, decode_tree, load, take
from raylt.errors import DataError


@pytest.fixture
def tree(tmp_path):
    """Six one-coloured PNGs, 20 x 12; image i has the red value 40 * i."""
    folder = tmp_path / "images"
    folder.mkdir()
    for i in range(6):
        Image.new("RGB", (20, 12), (40 * i, 10, 200)).save(folder / f"{i}.png")
    return folder


FILES = [f"{i}.png" for i in range(6)]


def test_images_are_decoded_in_order_to_the_asked_size(tree, tmp_path):
    x = decode_tree("it", tree, FILES, 8, tmp_path / "cache")
    assert x.shape == (6, 8, 8, 3)
    assert x.load()[:, 0, 0].tolist() == [[40 * i, 10, 200] for i in range(6)]


def test_the_centre_is_kept(tmp_path):
    # 24 x 8: columns 8..15, the centre square, are white
    pixels = np.zeros((8, 24, 3), dtype=np.uint8)
    pixels[:, 8:16] = 255
    Image.fromarray(pixels).save(tmp_path / "wide.png")
    assert (decode_tree("it", tmp_path, ["wide.png"], 8, tmp_path / "cache").load() == 255).all()


@pytest.mark.parametrize(("mode", "name"), [("L", "grey.png"), ("P", "palette.gif"), ("RGB", "photo.jpg")])
def test_every_kind_of_image_becomes_rgb(tmp_path, mode, name):
    Image.new("RGB", (64, 48), (102, 102, 102)).convert(mode).save(tmp_path / name)
    image = decode_tree("it", tmp_path, [name], 16, tmp_path / "cache").load()
    assert image.shape == (1, 16, 16, 3)
    assert np.abs(image.astype(int) - 102).max() <= 3


def test_a_second_opening_does_not_look_into_the_files(tree, tmp_path):
    first = decode_tree("it", tree, FILES, 8, tmp_path / "cache")
    for file in FILES:
        (tree / file).unlink()
    second = decode_tree("it", tree, FILES, 8, tmp_path / "cache")
    assert second.path == first.path
    assert (second.load() == first.load()).all()


def test_another_size_folder_or_list_has_a_cache_of_its_own(tree, tmp_path):
    other = tmp_path / "other"
    caches = [decode_tree("it", tree, FILES, 8, tmp_path / "cache"),
                 decode_tree("it", tree, FILES, 9, tmp_path / "cache"),
                 decode_tree("it", tree, FILES[1:], 8, tmp_path / "cache")]
    tree.rename(other)
    caches.append(decode_tree("it", other, FILES, 8, tmp_path / "cache"))
    assert len({x.path for x in caches}) == 4


def test_a_broken_image_is_named_and_leaves_no_cache(tree, tmp_path):
    (tree / "3.png").write_bytes(b"not a picture")
    with pytest.raises(DataError, match=r"3\.png: not an image that can be decoded"):
        decode_tree("it", tree, FILES, 8, tmp_path / "cache")
    assert not list((tmp_path / "cache").rglob("*.npy"))
    Image.new("RGB", (20, 12)).save(tree / "3.png")
    assert len(decode_tree("it", tree, FILES, 8, tmp_path / "cache")) == 6


def test_a_half_made_cache_of_a_killed_process_is_made_anew(tree, tmp_path):
    x = decode_tree("it", tree, FILES, 8, tmp_path / "cache")
    path, whole = Path(x.path), x.load()
    path.rename(path.with_name("partial.npy"))
    path.with_name("partial.npy").write_bytes(path.with_name("partial.npy").read_bytes()[:300])
    assert (decode_tree("it", tree, FILES, 8, tmp_path / "cache").load() == whole).all()


def test_a_cache_larger_than_the_disk_is_refused(tree, tmp_path):
    with pytest.raises(DataError, match=r"data\.size = 10000000 takes .* lower data\.size"):
        decode_tree("it", tree, FILES, 10_000_000, tmp_path / "cache")


def test_rows_are_taken_alike_from_arrays_and_mapped_images(tree, tmp_path):
    mapped = decode_tree("it", tree, FILES, 8, tmp_path / "cache")
    array, rows = mapped.load(), np.array([4, 1, 1])
    for x in (array, mapped):
        taken = take(take(x, rows), np.array([0, 2]))
        assert len(taken) == 2
        assert load(taken)[:, 0, 0, 0].tolist() == [160, 40]
    assert load(take(mapped, np.array([], dtype=np.int64))).shape == (0, 8, 8, 3)


def test_mapped_images_travel_as_a_path(tree, tmp_path):
    mapped = decode_tree("it", tree, FILES, 64, tmp_path / "cache")
    letter = pickle.dumps(mapped)
    assert len(letter) < 1000
    assert (pickle.loads(letter).load() == mapped.load()).all()


def test_a_cache_that_this_node_cannot_see_is_explained(tmp_path):
    with pytest.raises(DataError, match="every node sees"):
        Mapped(str(tmp_path / "gone.npy"), np.arange(3)).load()
