"""Files of others, decoded: images and npz archives. What they claim is held against limits before memory is taken."""

import math
import os
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from raylt.errors import DataError
from raylt.store import Folder

if TYPE_CHECKING:
    from PIL import Image

FORMATS = ("JPEG", "PNG", "BMP", "GIF", "PPM", "TIFF", "WEBP")
PIXELS = 2**27              # of one image; the largest photographs have half of that
DEFLATED = 1040             # times that deflate, at its best, makes something smaller


def open_image(file: Path) -> "Image.Image":
    """An image file, decoded, in the colours it was written in.

    Raises:
        DataError: it cannot be decoded, is of a kind that is not in FORMATS, or has more than PIXELS.
    """
    with _image(file) as image:
        image.load()
        return image


def fitted_image(file: Path, size: int) -> np.ndarray:
    """An image file as RGB, uint8 [size, size, 3]: the shorter side is resized to `size`, the centre is kept.

    Raises:
        DataError: as of `open_image`.
    """
    from PIL import Image, ImageOps

    with _image(file) as image:
        image.draft("RGB", (size, size))    # a JPEG is decoded at the smallest scale that still covers the crop
        return np.asarray(ImageOps.fit(image.convert("RGB"), (size, size), Image.Resampling.BILINEAR))


@contextmanager
def _image(file: Path) -> "Iterator[Image.Image]":
    from PIL import Image

    try:
        with _opened(file) as stream, Image.open(stream, formats=FORMATS) as image:
            if image.width * image.height > PIXELS:
                raise ValueError(f"{image.width}x{image.height} pixels, more than {PIXELS:,} in all")
            yield image
    except Exception as error:                  # PIL's decoders raise whatever they trip over
        raise DataError(f"{file}: not an image that can be decoded ({' '.join(str(error).split())}); replace or "
                        "remove it") from None


@contextmanager
def _opened(file: Path) -> Iterator[BinaryIO]:
    """A plain file; links are followed, as data sets are often made of them, a FIFO is not waited for."""
    path = file.resolve()
    with Folder.open(path.parent) as folder, folder.stream(path.name) as stream:
        yield stream


def read_npz(path: Path, keys: Sequence[str]) -> dict[str, np.ndarray]:
    """The arrays of these names that a npz file has.

    Raises:
        DataError: not such a file, damaged, or larger than what it is made of or than this machine's memory.
    """
    try:
        with _opened(path) as stream:
            _check_sizes(stream, keys)
            with np.load(stream, allow_pickle=False) as file:
                return {key: file[key] for key in keys if key in file}
    except Exception as error:                  # numpy and zipfile raise whatever they trip over
        cause = "no such file" if not path.exists() else " ".join(str(error).split())
        raise DataError(f"{path.resolve()}: not a readable npz file ({cause}); write it with numpy.savez_compressed "
                        "and without Python objects") from None


def _check_sizes(stream: BinaryIO, keys: Sequence[str]) -> None:
    """Raises a ValueError where an array would take more memory than the archive can hold, or than there is."""
    needed = 0
    with zipfile.ZipFile(stream) as archive:
        for entry in archive.infolist():
            if entry.filename.removesuffix(".npy") not in keys:
                continue
            with archive.open(entry) as member:
                shape, dtype = _header(member)
            size = math.prod(shape) * dtype.itemsize
            if size > entry.file_size or entry.file_size > DEFLATED * (entry.compress_size + 64):
                raise ValueError(f"{entry.filename} claims {size:,} bytes and has {entry.compress_size:,} in the "
                                 "archive")
            needed += size
    if needed > (there := _memory()):
        raise ValueError(f"its arrays take {needed:,} bytes, this machine has {there:,}")
    stream.seek(0)


def _header(member: Any) -> tuple[tuple[int, ...], np.dtype]:
    version = np.lib.format.read_magic(member)
    if version == (1, 0):
        shape, _, dtype = np.lib.format.read_array_header_1_0(member)
    else:
        shape, _, dtype = np.lib.format.read_array_header_2_0(member)
    return shape, dtype


def _memory() -> int:
    """Bytes of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
