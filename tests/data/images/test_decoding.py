"""Files that claim a false size or are no images are refused by name, before memory is allocated."""

import io
import os
import time
import zipfile

import numpy as np
import pytest
from PIL import Image
from refusals import refused

from raylt.data.images import decoding
from raylt.data.images.decoding import Undecodable, eight_bits, fitted_image, open_image, read_npz
from raylt.errors import DataError


def npz_of(path, header, data=b"", claimed=None, method=zipfile.ZIP_STORED):
    """Write an archive with one array x_train and the given header."""
    content = io.BytesIO()
    np.lib.format.write_array_header_1_0(content, header)
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.writestr("x_train.npy", content.getvalue() + data)
    if claimed is not None:  # change the size in the archive's directory, which is near its end
        raw = bytearray(path.read_bytes())
        at = raw.index(b"PK\x01\x02") + 24
        raw[at : at + 4] = claimed.to_bytes(4, "little")
        path.write_bytes(raw)
    return path


HUGE = {"descr": "|u1", "fortran_order": False, "shape": (2**20, 2**20)}


@pytest.mark.parametrize(
    ("claimed", "method"), [(None, zipfile.ZIP_STORED), (None, zipfile.ZIP_DEFLATED), (2**32 - 2, zipfile.ZIP_DEFLATED)]
)
def test_a_header_that_claims_what_the_archive_cannot_hold_is_refused_at_once(tmp_path, claimed, method):
    header = HUGE if claimed is None else HUGE | {"shape": (2**31,)}
    path = npz_of(tmp_path / "it.npz", header, b"\0" * 100, claimed, method)
    began = time.monotonic()
    with refused("data.malformed", DataError, path=str(path)) as caught:
        read_npz(path, ["x_train"])
    assert "x_train.npy declares" in str(caught.value)
    assert time.monotonic() - began < 1


def test_what_is_larger_than_the_memory_is_refused(tmp_path, monkeypatch):
    np.savez_compressed(tmp_path / "it.npz", x_train=np.zeros(2**20, np.uint8), other=np.zeros(2**20, np.uint8))
    monkeypatch.setattr(decoding, "total_memory", lambda: 2**20)
    assert read_npz(tmp_path / "it.npz", ["x_train"])["x_train"].shape == (2**20,)
    monkeypatch.setattr(decoding, "total_memory", lambda: 2**20 - 1)
    with refused("data.malformed", DataError, path=str(tmp_path / "it.npz")) as caught:
        read_npz(tmp_path / "it.npz", ["x_train"])
    assert "1,048,576 bytes, this machine has 1,048,575" in str(caught.value)


@pytest.mark.parametrize("shape", [(-1,), (2**70,), (0, 2**62, 2**62)])
def test_strange_shapes_are_refused_or_empty(tmp_path, shape):
    path = npz_of(tmp_path / "it.npz", HUGE | {"shape": shape})
    with refused("data.malformed", DataError, path=str(path)):
        read_npz(path, ["x_train"])


@pytest.mark.parametrize("read", [open_image, lambda file: fitted_image(file, 8), lambda file: read_npz(file, ["x"])])
def test_a_fifo_is_not_waited_for(tmp_path, read):
    os.mkfifo(tmp_path / "it.png")
    with pytest.raises(DataError, match=r"it\.png: .*is not a plain file"):
        read(tmp_path / "it.png")


def test_links_to_images_are_followed(tmp_path):
    Image.new("RGB", (9, 7), "red").save(tmp_path / "there.png")
    (tmp_path / "here.png").symlink_to("there.png")
    assert open_image(tmp_path / "here.png").size == (9, 7)
    assert fitted_image(tmp_path / "here.png", 4)[0, 0].tolist() == [255, 0, 0]


@pytest.mark.parametrize("read", [open_image, lambda file: fitted_image(file, 8)])
def test_an_image_of_too_many_pixels_is_refused_with_its_name(tmp_path, read, monkeypatch):
    Image.new("1", (100, 90)).save(tmp_path / "wide.png")
    monkeypatch.setattr(decoding, "PIXELS", 8999)
    with refused("data.undecodable", Undecodable, path=str(tmp_path / "wide.png")) as caught:
        read(tmp_path / "wide.png")
    assert caught.value.details["cause"] == "100x90 pixels, more than 8,999 in all"


def test_an_image_that_unpacks_to_gigabytes_is_refused_before_it_is_unpacked(tmp_path):
    small = io.BytesIO()
    Image.new("1", (8, 8)).save(small, "PNG")
    raw = bytearray(small.getvalue())
    raw[16:24] = (60_000).to_bytes(4, "big") * 2
    (tmp_path / "bomb.png").write_bytes(raw)
    with refused("data.undecodable", Undecodable, path=str(tmp_path / "bomb.png")):
        open_image(tmp_path / "bomb.png")


@pytest.mark.parametrize("kind", ["EPS", "PDF", "ICNS", "DDS"])
def test_only_kinds_of_images_that_data_sets_have_are_opened(tmp_path, kind):
    Image.new("RGB", (32, 32)).save(tmp_path / "it", kind)
    with refused("data.undecodable", Undecodable, path=str(tmp_path / "it")):
        open_image(tmp_path / "it")


@pytest.mark.parametrize(("kind", "white"), [("u2", 65535), ("i2", 32767), ("f4", 1.0)])
def test_the_full_scale_of_a_type_is_white(kind, white):
    assert eight_bits(np.array([0, white / 3, white]).astype(kind), None).tolist() == [0, 85, 255]


@pytest.mark.parametrize("deep", [False, True])
def test_greys_of_which_zero_is_white_are_inverted(tmp_path, deep):
    greys = np.full((4, 4), 200, dtype=np.uint16) * 257 if deep else np.full((4, 4), 200, dtype=np.uint8)
    content = io.BytesIO()
    Image.fromarray(greys).save(content, "TIFF")
    black_is_zero = b"\x06\x01\x03\x00\x01\x00\x00\x00\x01\x00"  # tag 262, one short integer: 1
    assert content.getvalue().count(black_is_zero) == 1
    white_is_zero = content.getvalue().replace(black_is_zero, black_is_zero[:-2] + b"\x00\x00")
    assert (fitted_image(content.getvalue(), 4) == 200).all()
    assert (fitted_image(white_is_zero, 4) == 55).all()
