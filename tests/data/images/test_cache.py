import errno
import json
import os
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from refusals import refused

from raylt.data.images import cache_builder, decoding, image_trees
from raylt.data.images.cache import Mapped, load, take
from raylt.data.images.decoding import fitted_image, grouped_by_cause
from raylt.data.images.image_trees import How, decode_tree
from raylt.errors import DataError, DiskFull, RayltError


@pytest.fixture
def tree(tmp_path):
    """Save six one-coloured PNGs of 20 x 12 pixels; image i has the red value 40 * i."""
    folder = tmp_path / "images"
    folder.mkdir()
    for i in range(6):
        Image.new("RGB", (20, 12), (40 * i, 10, 200)).save(folder / f"{i}.png")
    return folder


FILES = [f"{i}.png" for i in range(6)]


def decode(name, folder, files, size, cache, **how):
    return decode_tree(name, folder, files, How(size, **how), cache)[0]


@pytest.mark.parametrize("share", [2, 64])
def test_images_are_decoded_in_order_to_the_asked_size(tree, tmp_path, monkeypatch, share):
    monkeypatch.setattr(cache_builder, "SHARE", share)
    x = decode("it", tree, FILES, 8, tmp_path / "cache")
    assert x.shape == (6, 8, 8, 3)
    assert x.load()[:, 0, 0].tolist() == [[40 * i, 10, 200] for i in range(6)]


def test_rows_that_do_not_follow_each_other_are_written_at_their_places(tmp_path):
    filling = cache_builder.Filling(lambda row, given: np.full(2, row, np.uint8), (10, 2), 3, grey=False)
    with (tmp_path / "it").open("w+b") as stream:
        states, reasons = filling.fill(stream.fileno(), [1, 2, 5, 9], [None] * 4)
    content = np.frombuffer((tmp_path / "it").read_bytes(), np.uint8)
    assert content[3:].reshape(10, 2).tolist() == [[row if row in (1, 2, 5, 9) else 0] * 2 for row in range(10)]
    assert (states, reasons) == ([cache_builder.COLOUR] * 4, {})


def test_the_centre_is_kept(tmp_path):
    # 24 x 8: columns 8..15, the centre square, are white
    pixels = np.zeros((8, 24, 3), dtype=np.uint8)
    pixels[:, 8:16] = 255
    Image.fromarray(pixels).save(tmp_path / "wide.png")
    assert (decode("it", tmp_path, ["wide.png"], 8, tmp_path / "cache").load() == 255).all()


@pytest.mark.parametrize(("mode", "name"), [("L", "grey.png"), ("P", "palette.gif"), ("RGB", "photo.jpg")])
def test_every_kind_of_image_becomes_rgb(tmp_path, mode, name):
    Image.new("RGB", (64, 48), (102, 102, 102)).convert(mode).save(tmp_path / name)
    image = decode("it", tmp_path, [name], 16, tmp_path / "cache").load()
    assert image.shape == (1, 16, 16, 3)
    assert np.abs(image.astype(int) - 102).max() <= 3


def test_a_second_opening_does_not_decode_again(tree, tmp_path, monkeypatch):
    first = decode("it", tree, FILES, 8, tmp_path / "cache")
    monkeypatch.setattr(decoding, "fitted_image", None)  # a call would fail
    second = decode("it", tree, FILES, 8, tmp_path / "cache")
    assert second.path == first.path
    assert (second.load() == first.load()).all()


@pytest.mark.parametrize("keep_time", [True, False])
def test_an_image_that_was_replaced_is_decoded_again(tree, tmp_path, keep_time):
    before = decode("it", tree, FILES, 8, tmp_path / "cache").load()
    status = (tree / "2.png").stat()
    Image.new("RGB", (20, 13), (255, 10, 200)).save(tree / "2.png")
    if keep_time:
        with (tree / "2.png").open("ab") as file:
            file.write(b"longer")
        os.utime(tree / "2.png", ns=(status.st_atime_ns, status.st_mtime_ns))
    after = decode("it", tree, FILES, 8, tmp_path / "cache").load()
    assert [row for row in range(6) if (before[row] != after[row]).any()] == [2]


@pytest.mark.parametrize("depth", ["cat", "shop/cat"])
def test_folders_of_equal_stamps_that_exchange_names_are_decoded_again(tmp_path, depth):
    first, second = tmp_path / "images" / depth, tmp_path / "images" / depth.replace("cat", "dog")
    for folder, grey in ((first, 10), (second, 200)):
        folder.mkdir(parents=True)
        for name in ("0.pgm", "1.pgm"):
            Image.new("L", (8, 8), grey).save(folder / name)
            os.utime(folder / name, ns=(0, 0))
    files = [os.path.relpath(file, tmp_path / "images") for file in sorted((tmp_path / "images").rglob("*.pgm"))]

    def decoded():
        return decode("it", tmp_path / "images", files, 8, tmp_path / "cache").load()[:, 0, 0, 0].tolist()

    assert decoded() == [10, 10, 200, 200]
    first.rename(tmp_path / "aside")
    second.rename(first)
    (tmp_path / "aside").rename(second)
    assert decoded() == [200, 200, 10, 10]


def test_images_that_are_decoded_in_another_way_have_a_cache_of_their_own(tree, tmp_path, monkeypatch):
    ways = ({}, {"channels": 1}, {"channels": "auto"}, {"fit": "pad"}, {"depth": 12})
    paths = [decode("it", tree, FILES, 8, tmp_path / "cache", **way).path for way in ways]
    monkeypatch.setattr(image_trees, "FORMAT", 0)  # of another version
    paths.append(decode("it", tree, FILES, 8, tmp_path / "cache").path)
    assert len(set(paths)) == 6


def test_another_size_folder_or_list_has_a_cache_of_its_own(tree, tmp_path):
    other = tmp_path / "other"
    caches = [
        decode("it", tree, FILES, 8, tmp_path / "cache"),
        decode("it", tree, FILES, 9, tmp_path / "cache"),
        decode("it", tree, FILES[1:], 8, tmp_path / "cache"),
    ]
    tree.rename(other)
    caches.append(decode("it", other, FILES, 8, tmp_path / "cache"))
    assert len({x.path for x in caches}) == 4


def test_broken_images_are_all_named_and_leave_no_cache(tree, tmp_path):
    (tree / "3.png").write_bytes(b"not a picture")
    (tree / "1.png").write_bytes(b"")
    with refused("data.undecodable", DataError, count=2) as caught:
        decode("it", tree, FILES, 8, tmp_path / "cache")
    assert re.search(r"1\.png \(is empty\); .*3\.png \(not an image, or .*data\.bad=skip", str(caught.value))
    assert not list((tmp_path / "cache").rglob("*.npy"))
    with refused("data.undecodable", DataError, count=2):  # the second time no less
        decode("it", tree, FILES, 8, tmp_path / "cache")
    for name in ("1.png", "3.png"):
        Image.new("RGB", (20, 12)).save(tree / name)
    assert len(decode("it", tree, FILES, 8, tmp_path / "cache")) == 6


def test_of_very_many_broken_images_the_first_are_named_for_each_cause_and_all_are_listed(tree, tmp_path):
    files = [f"no{i:02}.png" for i in range(30)]
    (tree / "a (1).png").write_bytes(b"")
    with refused("data.undecodable", DataError, count=31) as caught:
        decode("it", tree, [*FILES, "a (1).png", *files], 8, tmp_path / "cache")
    (listed,) = (tmp_path / "cache").rglob("images.bad.json")
    message = str(caught.value).replace(f"{tree}/", "")
    absent = "no00.png, no01.png, no02.png and 27 more (No such file or directory)"
    assert message.startswith(f"31 images cannot be decoded: {absent}; a (1).png (is empty); {listed} lists all. ")
    assert sorted(map(int, json.loads(listed.read_text()))) == list(range(6, 37))


def test_brackets_in_names_and_causes_do_not_divide_images_of_one_cause():
    text, all_named = grouped_by_cause([f"a ({i}).png (cut off (3 bytes missing))" for i in range(5)] + ["odd"])
    assert text == "a (0).png, a (1).png, a (2).png and 2 more (cut off (3 bytes missing)); odd"
    assert not all_named
    assert grouped_by_cause(f"{i} (cause {i})" for i in range(22))[0].endswith("; and 2 for other causes")


def test_broken_images_can_be_left_out(tree, tmp_path):
    (tree / "3.png").write_bytes(b"not a picture")
    for _ in range(2):  # the second time reads the cache
        x, rows, notes = decode_tree("it", tree, FILES, How(8, bad="skip"), tmp_path / "cache")
        assert rows.tolist() == [0, 1, 2, 4, 5]
        assert x.load()[:, 0, 0, 0].tolist() == [0, 40, 80, 160, 200]
        assert notes == (
            f"left out: 1 image cannot be decoded: {tree}/3.png (not an image, or of an unsupported format)",
        )


@pytest.mark.parametrize("problem", [OSError(errno.EMFILE, "Too many open files"), MemoryError()])
def test_an_image_that_this_machine_cannot_read_at_present_is_not_left_out(tree, tmp_path, monkeypatch, problem):
    def opened(path, *rest, **options):
        if str(path).endswith("3.png"):
            raise problem
        return os_open(path, *rest, **options)

    os_open = os.open
    monkeypatch.setattr(decoding.os, "open", opened)
    with pytest.raises((RayltError, MemoryError)) as caught:
        decode_tree("it", tree, FILES, How(8, bad="skip"), tmp_path / "cache")
    if not isinstance(problem, MemoryError):
        assert caught.value.code == "file.unreadable"
        assert "3.png" in str(caught.value)
    monkeypatch.undo()
    x, rows, notes = decode_tree("it", tree, FILES, How(8, bad="skip"), tmp_path / "cache")
    assert (len(rows), notes) == (6, ())
    assert x.load()[:, 0, 0, 0].tolist() == [0, 40, 80, 120, 160, 200]


def test_grey_stays_grey_where_all_images_are(tree, tmp_path):
    for i in range(3):
        Image.new("L", (20, 12), 40 * i).save(tree / f"grey{i}.png")
    Image.new("LA", (20, 12), (7, 255)).save(tree / "grey3.png")
    greys = [f"grey{i}.png" for i in range(4)]
    assert decode("it", tree, greys, 8, tmp_path / "cache", channels="auto").load()[:, 0, 0].tolist() == [
        [0],
        [40],
        [80],
        [7],
    ]
    mixed = decode("it", tree, [*greys, "1.png"], 8, tmp_path / "cache", channels="auto")
    assert mixed.load()[:, 0, 0].tolist() == [[0] * 3, [40] * 3, [80] * 3, [7] * 3, [40, 10, 200]]
    assert decode("it", tree, greys, 8, tmp_path / "cache").shape == (4, 8, 8, 3)
    # 0.299 * 40 + 0.587 * 10 + 0.114 * 200 = 40.63
    assert decode("it", tree, ["1.png"], 8, tmp_path / "cache", channels=1).load()[0, 0, 0].tolist() == [41]


def test_a_killed_process_s_rows_are_not_decoded_again(tree, tmp_path, monkeypatch):
    monkeypatch.setattr(cache_builder, "SHARE", 2)
    whole = decode("other", tree, FILES, 8, tmp_path / "cache").load()
    decoded = []

    def counted(path, *how):
        if len(decoded) == 4:
            raise KeyboardInterrupt
        decoded.append(Path(path).name)
        return fitted_image(path, *how)

    monkeypatch.setattr(decoding, "fitted_image", counted)
    with pytest.raises(KeyboardInterrupt):
        decode("it", tree, FILES, 8, tmp_path / "cache")
    assert sorted(decoded) == FILES[:4]
    monkeypatch.setattr(
        decoding, "fitted_image", lambda path, *how: decoded.append(Path(path).name) or fitted_image(path, *how)
    )
    assert (decode("it", tree, FILES, 8, tmp_path / "cache").load() == whole).all()
    assert sorted(decoded) == FILES


def test_a_half_made_cache_of_another_size_is_replaced(tree, tmp_path):
    x = decode("it", tree, FILES, 8, tmp_path / "cache")
    path, whole = Path(x.path), x.load()
    path.with_name("images.partial").write_bytes(path.read_bytes()[:300])
    path.with_name("images.state").write_bytes(bytes([1] * 6))
    path.unlink()
    assert (decode("it", tree, FILES, 8, tmp_path / "cache").load() == whole).all()
    assert sorted(file.name for file in path.parent.iterdir()) == ["about.json", "images.npy", "lock"]


def test_a_cache_larger_than_the_disk_is_refused(tree, tmp_path):
    with refused("disk.full", DataError, key="data.size", value=10_000_000):
        decode("it", tree, FILES, 10_000_000, tmp_path / "cache")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("call", ["posix_fallocate", "pwrite"])
def test_a_disk_that_fills_up_is_named(tree, tmp_path, monkeypatch, call, code):
    def fail(*_):
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(cache_builder.os, call, fail)
        with refused("disk.full", DiskFull):
            decode("it", tree, FILES, 8, tmp_path / "cache")
    if call == "posix_fallocate":
        assert not list((tmp_path / "cache").rglob("images.partial"))  # its space is free again
    assert len(decode("it", tree, FILES, 8, tmp_path / "cache")) == 6


def test_a_file_system_that_cannot_allocate_is_used(tree, tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(errno.EOPNOTSUPP, "not supported")

    monkeypatch.setattr(cache_builder.os, "posix_fallocate", fail)
    assert len(decode("it", tree, FILES, 8, tmp_path / "cache")) == 6


def test_a_disk_that_fills_up_while_channels_are_dropped_keeps_no_copy(tmp_path, monkeypatch):
    path = tmp_path / "images.partial"
    path.write_bytes(cache_builder._header((2, 4, 4, 3)) + bytes(96))
    real = Path.open

    def full(file, *how):
        stream = real(file, *how)
        if file.suffix == ".narrow":
            stream.close()
            raise OSError(errno.ENOSPC, "full")
        return stream

    monkeypatch.setattr(Path, "open", full)
    with refused("disk.full", DiskFull):
        cache_builder._drop_channels(path, (2, 4, 4, 3))
    assert [file.name for file in tmp_path.iterdir()] == ["images.partial"]


def test_rows_are_taken_alike_from_arrays_and_mapped_images(tree, tmp_path):
    mapped = decode("it", tree, FILES, 8, tmp_path / "cache")
    array, rows = mapped.load(), np.array([4, 1, 1])
    for x in (array, mapped):
        taken = take(take(x, rows), np.array([0, 2]))
        assert len(taken) == 2
        assert load(taken)[:, 0, 0, 0].tolist() == [160, 40]
    assert load(take(mapped, np.array([], dtype=np.int64))).shape == (0, 8, 8, 3)


def test_mapped_images_travel_as_a_path(tree, tmp_path):
    mapped = decode("it", tree, FILES, 64, tmp_path / "cache")
    letter = pickle.dumps(mapped)
    assert len(letter) < 1000
    assert (pickle.loads(letter).load() == mapped.load()).all()


def test_a_cache_that_this_node_cannot_see_is_explained(tmp_path):
    with refused("data.cache-unreadable", DataError, path=str(tmp_path / "gone.npy")) as caught:
        Mapped(str(tmp_path / "gone.npy"), np.arange(3)).load()
    assert "if the cache was removed, run the same command again" in str(caught.value)
