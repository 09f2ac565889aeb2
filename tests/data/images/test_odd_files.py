"""Odd and damaged files in image folders are shown as a viewer shows them, left out and counted, or refused by name."""

import io
import json
import os
import re
import struct
import zlib

import numpy as np
import pytest
from PIL import Image
from refusals import refused

from raylt.config import DataConfig
from raylt.data.images import decoding
from raylt.data.images.cache import load
from raylt.data.images.decoding import fitted_image, flat_image
from raylt.data.sources.sources import open_source
from raylt.errors import DataError

RAMP = np.linspace(0, 255, 64).astype(np.uint8).reshape(8, 8)


def encoded(image, kind, **how):
    stream = io.BytesIO()
    image.save(stream, kind, **how)
    return stream.getvalue()


RED = Image.new("RGB", (32, 32), (255, 0, 0))
NOISE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8))
PNG, JPEG = encoded(NOISE, "PNG"), encoded(NOISE, "JPEG")


def chunk(name, data):
    """Return a chunk of a PNG."""
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def bomb():
    """Return a PNG of a few bytes that claims to have 60,000 x 60,000 pixels."""
    head = struct.pack(">IIBBBBB", 60_000, 60_000, 1, 0, 0, 0, 0)
    chunks = ((b"IHDR", head), (b"IDAT", zlib.compress(b"\0" * 100)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(name, data) for name, data in chunks)


DAMAGED = {
    "truncated.jpg": (JPEG[: len(JPEG) // 2], "truncated"),
    "truncated.png": (PNG[: len(PNG) // 2], "truncated|broken|cut"),
    "truncated.gif": (encoded(NOISE.quantize(), "GIF")[:400], "."),
    "truncated.bmp": (encoded(NOISE, "BMP")[:500], "truncated"),
    "truncated.tif": (encoded(NOISE, "TIFF")[:300], "."),
    "truncated.webp": (encoded(NOISE, "WEBP", lossless=True)[:200], "."),
    "header only.jpg": (JPEG[:2], "not an image"),
    "empty.png": (b"", "is empty"),
    "zeros.jpg": (b"\0" * 5000, "not an image"),
    "a page.jpg": (b"<html><title>404 Not Found</title></html>", "not an image"),
    "really a pdf.png": (b"%PDF-1.7\n%", "not an image"),
    "huge.png": (bomb(), "pixels|decompression bomb"),
    "flipped.png": (PNG[:60] + bytes([PNG[60] ^ 255]) + PNG[61:], "."),
    "really a heic.jpg": (
        b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + b"\0" * 500,
        "not an image, or of an unsupported format",
    ),
    "really a zip.png": (b"PK\x03\x04" + b"\0" * 500, "not an image, or of an"),
    "really a drawing.png": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "not an image, or of an"),
    "not a number.tif": (encoded(Image.fromarray(np.full((8, 8), np.nan, np.float32)), "TIFF"), "NaN or infinite"),
    "no pixels.png": (PNG[:16] + b"\0" * 8 + PNG[24:], "."),
    "text of megabytes.png": (
        PNG[:33] + chunk(b"zTXt", b"a\0\0" + zlib.compress(b"x" * 2**21)) + PNG[33:],
        "too large",
    ),
    "negative.tif": (encoded(Image.fromarray(np.full((8, 8), -5, np.int32)), "TIFF"), "greys from -5 to -5"),
}


@pytest.fixture
def shops(tmp_path):
    folder = tmp_path / "shops"
    for client in ("linz", "wien"):
        for name in ("bag", "shoe"):
            (folder / client / name).mkdir(parents=True)
            for i in range(3):
                RED.save(folder / client / name / f"{i}.png")
    return folder


def config(folder, **settings):
    return DataConfig(source=f"folder:{folder}", root=str(folder.parent / "root"), size=8, **settings)


def test_all_damaged_files_are_named_at_once_each_with_its_reason(shops):
    for name, (content, _) in DAMAGED.items():
        (shops / "wien/shoe" / name).write_bytes(content)
    (shops / "wien/shoe/dangling.png").symlink_to("nowhere.png")
    (shops / "wien/shoe/loop.png").symlink_to("loop.png")
    os.mkfifo(shops / "wien/shoe/fifo.png")
    with refused("data.undecodable", DataError) as caught:
        open_source(config(shops))
    message = str(caught.value)
    assert caught.value.details["count"] == len(DAMAGED) + 3
    assert "data.bad=skip" in message
    assert "\n" not in message
    (listed,) = shops.parent.rglob("images.bad.json")
    lines = [line.rpartition("/")[2].removesuffix(")") for line in json.loads(listed.read_text()).values()]
    reasons = dict(line.split(" (", 1) for line in lines)
    assert {*reasons} == {*DAMAGED, "dangling.png", "loop.png", "fifo.png"}
    for name, (_, reason) in DAMAGED.items():
        assert re.search(reason, reasons[name], re.IGNORECASE), (name, reasons[name])
    assert (reasons["dangling.png"], reasons["fifo.png"]) == ("No such file or directory", "is not a plain file")
    assert reasons["loop.png"] == "Too many levels of symbolic links"


def test_damaged_files_are_left_out_where_that_is_asked_for(shops):
    (shops / "linz/bag/1.png").write_bytes(b"")
    (shops / "wien/shoe/0.png").write_bytes(JPEG[:99])
    source = open_source(config(shops, bad="skip"))
    assert source.y_train.tolist() == [0, 0, 1, 1, 1, 0, 0, 0, 1, 1]
    assert source.ids is not None
    assert source.ids.tolist() == [0] * 5 + [1] * 5
    assert (load(source.x_train) == [255, 0, 0]).all()
    assert len(source.notes) == 1
    assert source.notes[0].startswith("left out: 2 images cannot be decoded: ")


def test_where_all_files_are_damaged_there_is_nothing_to_leave_out(tmp_path):
    (tmp_path / "it/wien/a").mkdir(parents=True)
    (tmp_path / "it/wien/a/0.png").write_bytes(b"")
    with refused("data.undecodable", DataError, count=1):
        open_source(config(tmp_path / "it", bad="skip"))


def test_files_with_odd_names_and_wrong_endings_are_images_all_the_same(shops):
    place = shops / "wien/bag"
    encodings = {
        "a b.JPG": "PNG",
        "größe ✓.jpeg": "JPEG",
        "-rf.png": "GIF",
        "[red].bmp": "BMP",
        "%s$(x).webp": "WEBP",
        "quote'\".tiff": "TIFF",
    }
    for name, kind in encodings.items():
        RED.save(place / name, kind)
    (place / os.fsdecode(b"\xff\xfe.png")).write_bytes(encoded(RED, "PNG"))
    (place / "linked.png").symlink_to(shops / "linz/bag/0.png")
    source = open_source(config(shops))
    assert len(source.x_train) == 12 + len(encodings) + 2
    assert np.abs(load(source.x_train).astype(int) - [255, 0, 0]).max() <= 2


def test_a_file_name_that_is_no_text_is_named_in_the_error(shops):
    (shops / "wien/bag" / os.fsdecode(b"\xff\xfe.png")).write_bytes(b"")
    with pytest.raises(DataError, match=r"wien/bag/��\.png"):
        open_source(config(shops))


def test_what_a_terminal_would_obey_is_not_printed(shops):
    (shops / "wien/bag/a\nb\x1b[31m.png").write_bytes(b"")
    with pytest.raises(DataError, match=r"wien/bag/a\?b\?\[31m\.png \(is empty\)"):
        open_source(config(shops))
    (note,) = open_source(config(shops, bad="skip")).notes
    assert note.isprintable()


def test_what_other_programs_leave_beside_images_is_counted(shops):
    place = shops / "linz/bag"
    for name in ("._0.png", ".DS_Store", "Thumbs.db", "desktop.ini", "0.xmp", "movie.mp4", "photo.heic", "notes"):
        (place / name).write_bytes(b"\0\5\x16\7" + b"\0" * 90)
    (place / "around").symlink_to(shops)  # a link to a folder above
    (place / "itself").symlink_to("itself")
    (shops / "wien/folder.png").mkdir()
    source = open_source(config(shops))
    assert len(source.x_train) == 12
    assert source.notes[0] == (
        "10 files are not images and were left out: 2 hidden, 2 without an ending, 1 .db, 1 .heic, 1 .ini, 1 .mp4, "
        "1 .xmp, 1 links to a folder above"
    )
    assert source.notes[1] == f"1 folder holds no image and was left out: {shops / 'wien/folder.png'}"


def test_an_unreadable_file_is_read_once_it_may_be(shops, monkeypatch):
    real = decoding.os.open

    def refuse(path, *flags, **more):
        if str(path).endswith("wien/bag/1.png"):
            raise PermissionError(13, "Permission denied")
        return real(path, *flags, **more)

    with monkeypatch.context() as patch:
        patch.setattr(decoding.os, "open", refuse)
        with pytest.raises(DataError, match=r"wien/bag/1\.png \(Permission denied\)"):
            open_source(config(shops))
    assert len(open_source(config(shops)).x_train) == 12


# images as a viewer shows them


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_a_picture_is_turned_as_its_exif_says(tmp_path, kind):
    pixels = np.zeros((16, 16, 3), np.uint8)
    pixels[:8] = 255  # the upper half is light
    exif = Image.Exif()
    exif[0x0112] = 6  # the image is shown turned to the right
    Image.fromarray(pixels).save(tmp_path / "it", kind, exif=exif)
    shown = fitted_image(tmp_path / "it", 16)[..., 0]
    assert shown[:, 10:].min() > 200
    assert shown[:, :6].max() < 50


@pytest.mark.parametrize(
    ("pixels", "depth"),
    [
        (RAMP.astype(np.uint16) * 257, None),  # 16 bits: 65535 becomes 255
        (np.minimum(RAMP.astype(np.uint16) * 16 + 15, 4095), 12),  # 12 bits: 4095 becomes 255
        (RAMP.astype(np.float32) / 255, None),
        (RAMP.astype(np.float32) * 257, 16),
        (RAMP.astype(np.int32) * 257, 16),
        (RAMP.astype(np.int32) * (2**24 // 256), 24),
    ],
)
@pytest.mark.parametrize("kind", ["PNG", "TIFF", "PPM"])
def test_greys_of_more_bits_are_scaled_by_their_type_or_by_the_depth(tmp_path, pixels, depth, kind):
    if pixels.dtype != np.uint16:
        kind = "TIFF"
    Image.fromarray(pixels).save(tmp_path / "it", kind)
    shown = fitted_image(tmp_path / "it", 8, None, depth=depth)
    assert shown.shape == (8, 8, 1)
    assert np.abs(shown[..., 0].astype(int) - RAMP).max() <= 1


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "PPM"])
@pytest.mark.parametrize("depth", [None, 14])
def test_one_bright_pixel_leaves_the_others_as_they_are(tmp_path, kind, depth):
    pixels = np.full((8, 8), 3000, np.uint16)
    shown = []
    for brightest in (3000, 4095, 4200, 16383):
        pixels[0, 0] = brightest
        Image.fromarray(pixels).save(tmp_path / "it", kind)
        shown.append(int(fitted_image(tmp_path / "it", 8, None, depth=depth)[7, 7, 0]))
    assert len({*shown}) == 1


@pytest.mark.parametrize(("depth", "grey"), [(None, 128), (12, 128), (16, 8)])
def test_a_pgm_is_scaled_by_the_largest_value_of_its_header_or_by_the_depth(tmp_path, depth, grey):
    binary = b"P5 8 8 4095\n" + np.full(64, 2048, ">u2").tobytes()
    for content in (binary, b"P2 8 8 4095\n" + b"2048 " * 64):
        assert fitted_image(content, 8, None, depth=depth)[0, 0, 0] == grey


@pytest.mark.parametrize(
    ("pixels", "depth", "why"),
    [
        (np.full((8, 8), 4200, np.uint16), 12, "4200"),
        (np.full((8, 8), 3000, np.int32), None, "data.depth"),  # the scale of the type would make the whole image black
        (np.full((8, 8), -5, np.int32), 16, "greys from -5 to -5, of which some are negative: let black be 0"),
        (np.full((8, 8), 1.5, np.float32), None, "1.5"),
        (np.full((8, 8), np.nan, np.float32), 8, "NaN or infinite: replace them"),
        (np.full((8, 8), np.inf, np.float32), None, "NaN or infinite: replace them"),
    ],
)
def test_greys_beyond_the_scale_are_refused_by_name(tmp_path, pixels, depth, why):
    Image.fromarray(pixels).save(tmp_path / "it.tif")
    with refused("data.undecodable", path=str(tmp_path / "it.tif")) as caught:
        fitted_image(tmp_path / "it.tif", 8, None, depth=depth)
    assert why in str(caught.value)


@pytest.mark.parametrize("eight", ["bright/0.png", "dark/7.png"])
def test_a_notice_names_the_dark_images_of_more_than_8_bits(tmp_path, eight):
    """One scanner of 12 bits among others of 16 is dark, although other images are bright."""
    for number in range(12):
        file = tmp_path / "it" / ("bright", "dark")[number % 2] / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((8, 8), 4095 if number in (3, 5) else 60_000 + number, np.uint16)).save(file)
    Image.fromarray(np.full((8, 8), 30, np.uint8)).save(tmp_path / "it" / eight)  # 8 bits
    source = DataConfig(source=f"folder:{tmp_path / 'it'}", root=str(tmp_path / "root"), size=8)
    (note,) = open_source(source).notes
    dark = [str(tmp_path / "it" / "dark" / f"{number}.png") for number in (3, 5)]
    assert note.startswith(f"images of more than 8 bits use less than half of their full scale ({', '.join(dark)}); ")
    assert not open_source(source.model_copy(update={"depth": 16})).notes


def test_a_notice_names_the_full_scales_of_a_folder_if_they_differ(tmp_path):
    light = np.full((8, 8), 60_000, np.uint16)
    contents = {"a.png": light, "b.tif": light.astype(np.float32) / 65535, "c.png": light // 257}
    (tmp_path / "it" / "x").mkdir(parents=True)
    for name, pixels in contents.items():
        Image.fromarray(pixels if name != "c.png" else pixels.astype(np.uint8)).save(tmp_path / "it" / "x" / name)
    for name, maximum in (("d.pgm", 4095), ("e.pgm", 65535)):
        head = f"P5 8 8 {maximum}\n".encode()
        (tmp_path / "it" / "x" / name).write_bytes(head + np.full(64, maximum - 5, ">u2").tobytes())
    source = DataConfig(source=f"folder:{tmp_path / 'it'}", root=str(tmp_path / "root"), size=8)
    (note,) = open_source(source).notes
    where = f"{tmp_path / 'it' / 'x'}/"
    scales = f"1 in {where}b.tif, 4095 in {where}d.pgm, 65535 in {where}a.png"
    assert note.startswith(f"images of more than 8 bits have different full scales ({scales}), ")


def test_dark_colours_of_16_bits_get_the_notice_too(tmp_path):
    (tmp_path / "it" / "x").mkdir(parents=True)
    for number in range(4):
        head = b"P6 8 8 65535\n"
        (tmp_path / "it" / "x" / f"{number}.ppm").write_bytes(head + np.full(192, 3000 + number, ">u2").tobytes())
    (note,) = open_source(DataConfig(source=f"folder:{tmp_path / 'it'}", root=str(tmp_path / "root"), size=8)).notes
    assert "0.ppm" in note


@pytest.mark.parametrize(("colour", "values"), [(2, 3), (4, 2), (6, 4)])
def test_colours_of_16_bits_are_refused_with_a_depth(tmp_path, colour, values):
    head = struct.pack(">IIBBBBB", 1, 1, 16, colour, 0, 0, 0)
    chunks = ((b"IHDR", head), (b"IDAT", zlib.compress(b"\0" + b"\x0b\xb8" * values)), (b"IEND", b""))
    (tmp_path / "it.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*each) for each in chunks))
    assert fitted_image(tmp_path / "it.png", 1).shape == (1, 1, 3)
    with refused("data.undecodable", path=str(tmp_path / "it.png")):
        fitted_image(tmp_path / "it.png", 1, depth=12)


def test_eight_bits_stay_as_they_are_whatever_the_depth(tmp_path):
    Image.fromarray(RAMP).save(tmp_path / "it.png")
    assert (fitted_image(tmp_path / "it.png", 8, None, depth=12)[..., 0] == RAMP).all()


@pytest.mark.parametrize(
    ("image", "shape", "pixel"),
    [
        (Image.new("RGBA", (8, 8), (10, 20, 30, 0)), (8, 8, 3), [255, 255, 255]),
        (Image.new("RGBA", (8, 8), (0, 0, 0, 128)), (8, 8, 3), [127, 127, 127]),
        (Image.new("LA", (8, 8), (10, 0)), (8, 8, 1), [255]),
        (Image.new("1", (8, 8), 1), (8, 8, 1), [255]),
        (Image.new("L", (8, 8), 99), (8, 8, 1), [99]),
        (Image.new("P", (8, 8), 0), (8, 8, 3), [0, 0, 0]),
    ],
)
def test_what_is_transparent_lies_on_white_and_grey_stays_grey(tmp_path, image, shape, pixel):
    image.save(tmp_path / "it.png")
    shown = fitted_image(tmp_path / "it.png", 8, None)
    assert shown.shape == shape
    assert shown[0, 0].tolist() == pixel


def test_a_transparent_colour_of_a_palette_lies_on_white(tmp_path):
    Image.new("P", (8, 8), 0).save(tmp_path / "it.png", transparency=0)
    assert fitted_image(tmp_path / "it.png", 8, None)[0, 0].tolist() == [255, 255, 255]


@pytest.mark.parametrize(
    ("image", "transparency", "shape"),
    [
        (Image.new("L", (8, 8), 0), 0, (8, 8, 1)),
        (Image.new("RGB", (8, 8), (0, 0, 0)), (0, 0, 0), (8, 8, 3)),
        (Image.new("1", (8, 8), 0), 0, (8, 8, 1)),
    ],
)
def test_a_transparent_colour_of_any_png_lies_on_white(tmp_path, image, transparency, shape):
    image.putpixel((0, 0), 1 if image.mode == "1" else 9 if image.mode == "L" else (9, 9, 9))
    image.save(tmp_path / "it.png", transparency=transparency)
    shown = fitted_image(tmp_path / "it.png", 8, None)
    assert shown.shape == shape
    assert (shown[1:] == 255).all()
    assert (shown[0, 0] == (255 if image.mode == "1" else 9)).all()


def test_a_transparent_colour_of_16_bits_lies_on_white(tmp_path):
    head = struct.pack(">IIBBBBB", 2, 1, 16, 2, 0, 0, 0)
    pixels = struct.pack(">6H", 0x1234, 0x5678, 0x9ABC, 0x1111, 0x2222, 0x3333)
    chunks = (
        (b"IHDR", head),
        (b"tRNS", pixels[:6]),
        (b"IDAT", zlib.compress(b"\0" + pixels)),
        (b"IEND", b""),
    )
    (tmp_path / "it.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*each) for each in chunks))
    assert np.asarray(flat_image(tmp_path / "it.png")).tolist() == [[[255] * 3, [0x11, 0x22, 0x33]]]


def test_printing_colours_become_those_of_a_screen(tmp_path):
    for kind in ("JPEG", "TIFF"):
        Image.new("CMYK", (16, 16), (0, 255, 255, 0)).save(tmp_path / kind, kind)
        assert np.abs(fitted_image(tmp_path / kind, 8, None)[0, 0].astype(int) - [255, 0, 0]).max() <= 2, kind


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP", "TIFF"])
def test_of_an_animation_the_first_picture_is_taken(tmp_path, kind):
    RED.save(tmp_path / "it", kind, save_all=True, append_images=[Image.new("RGB", (32, 32), "blue")])
    assert np.abs(fitted_image(tmp_path / "it", 8)[0, 0].astype(int) - [255, 0, 0]).max() <= 2


def test_all_of_a_picture_can_be_kept_with_black_beside(tmp_path):
    Image.new("RGB", (24, 12), "white").save(tmp_path / "it.png")
    shown = fitted_image(tmp_path / "it.png", 8, fit="pad")[..., 0]
    assert (shown[2:6] == 255).all()
    assert (shown[:2] == 0).all()
    assert (shown[6:] == 0).all()
    assert (fitted_image(tmp_path / "it.png", 8) == 255).all()


def test_two_pictures_in_one_file_of_a_phone_are_the_first(tmp_path):
    RED.save(tmp_path / "it.jpg", "MPO", save_all=True, append_images=[Image.new("RGB", (32, 32), "blue")])
    assert np.abs(fitted_image(tmp_path / "it.jpg", 8)[0, 0].astype(int) - [255, 0, 0]).max() <= 2


@pytest.mark.parametrize("how", [{"progressive": True}, {"quality": 1}, {"subsampling": 2}])
def test_jpegs_of_every_making(tmp_path, how):
    RED.save(tmp_path / "it.jpg", **how)
    assert np.abs(fitted_image(tmp_path / "it.jpg", 8)[0, 0].astype(int) - [255, 0, 0]).max() <= 20


@pytest.mark.parametrize("size", [(1, 1), (1, 3000), (3000, 1)])
@pytest.mark.parametrize("fit", ["crop", "pad"])
def test_images_as_thin_as_a_line(tmp_path, size, fit):
    Image.new("RGB", size, "red").save(tmp_path / "it.png")
    shown = fitted_image(tmp_path / "it.png", 8, fit=fit)
    assert shown.shape == (8, 8, 3)
    assert [255, 0, 0] in shown.reshape(-1, 3).tolist()


def test_colours_of_16_bits_are_scaled_too(tmp_path):
    """The file is written by hand, because PIL writes no RGB of 16 bits; each value is multiplied by 257."""
    pixels = np.asarray(NOISE, np.uint16) * 257
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in pixels)
    head = struct.pack(">IIBBBBB", 32, 32, 16, 2, 0, 0, 0)
    (tmp_path / "it.png").write_bytes(
        b"\x89PNG\r\n\x1a\n"
        + b"".join(chunk(*part) for part in ((b"IHDR", head), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")))
    )
    assert (fitted_image(tmp_path / "it.png", 32) == np.asarray(NOISE)).all()


@pytest.mark.parametrize("bytes_at_once", [2**24, 0])
def test_a_large_file_is_not_read_at_once_and_gives_the_same(tmp_path, monkeypatch, bytes_at_once):
    monkeypatch.setattr(decoding, "READ_AT_ONCE", bytes_at_once)
    for name, (content, _) in DAMAGED.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError):
            fitted_image(tmp_path / name, 8)
    NOISE.save(tmp_path / "it.tif", compression="tiff_lzw")
    assert (fitted_image(tmp_path / "it.tif", 32) == np.asarray(NOISE)).all()


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
def test_a_damaged_exif_does_no_harm(tmp_path):
    (tmp_path / "it.jpg").write_bytes(encoded(RED, "JPEG", exif=b"Exif\0\0II*\0\xff\xff\xff\xff"))
    assert fitted_image(tmp_path / "it.jpg", 8).shape == (8, 8, 3)
