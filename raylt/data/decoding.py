"""Files of others, decoded: images and npz archives. What they claim is held against limits before memory is taken."""

import io
import math
import os
import stat
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

import numpy as np

from raylt.data.listing import shown_name
from raylt.errors import DataError

if TYPE_CHECKING:
    from PIL import Image

FORMATS = ("JPEG", "PNG", "BMP", "GIF", "PPM", "TIFF", "WEBP")
PIXELS = 2**27              # of one image; the largest photographs have half of that
NO_IMAGE, REMEDY = ": not an image that can be decoded", "; replace or remove it"
Fit = Literal["crop", "pad"]
TURNING = {"exif", "Raw profile type exif", "XML:com.adobe.xmp", "xmp"}     # what PIL tells may turn; of TIFF, tags
WHOLE = 2**24               # bytes of a file that is read at once: PIL asks for a few bytes forty times
DEFLATED = 1040             # times that deflate, at its best, makes something smaller


def open_image(file: Path) -> "Image.Image":
    """An image file, decoded, in the colours it was written in.

    Raises:
        DataError: it cannot be decoded, is of a kind that is not in FORMATS, or has more than PIXELS.
    """
    with _image(file) as image:
        image.load()
        return image


def fitted_image(file: Path | str | bytes, size: int, channels: int | None = 3, fit: Fit = "crop") -> np.ndarray:
    """An image file at `size`, as a person sees it: turned as its EXIF says, on white where it is transparent, of an
    animation the first picture; 16-bit greys by their range, see `_eight_bits`.

    Args:
        file: its path, or its content.
        channels: 1 for grey, 3 for RGB; None: 1 where the file holds no colour, otherwise 3.
        fit: crop resizes the shorter side and keeps the centre; pad resizes the longer side and adds black.

    Returns:
        uint8 [size, size, channels].

    Raises:
        DataError: as of `open_image`.
    """
    from PIL import Image, ImageOps

    with _image(file) as image:
        image.draft(None, (size, size))     # a JPEG is decoded at the smallest scale that still covers the crop
        flat = _flat(_upright(image))
        mode = flat.mode if channels is None else "L" if channels == 1 else "RGB"
        flat = flat if flat.mode == mode else flat.convert(mode)
        if fit == "pad" and 2 * size * min(flat.size) < max(flat.size):     # of which no pixel would be left
            flat = flat.resize([max(1, round(side * size / max(flat.size))) for side in flat.size],
                               Image.Resampling.BILINEAR)
        fitted = (ImageOps.fit if fit == "crop" else ImageOps.pad)(flat, (size, size), Image.Resampling.BILINEAR)
        return np.asarray(fitted).reshape(size, size, -1)


@dataclass(frozen=True)
class Fitted:
    """`fitted_image` as a value, for `pack`."""

    size: int
    channels: int | None
    fit: Fit

    def __call__(self, row: int, file: str | bytes) -> np.ndarray:
        return fitted_image(file, self.size, self.channels, self.fit)


def _upright(image: "Image.Image") -> "Image.Image":
    from PIL import ImageOps

    image.load()
    if image.format == "TIFF" or not image.info.keys().isdisjoint(TURNING):
        with suppress(Exception):           # a damaged EXIF says nothing; the picture may be whole
            ImageOps.exif_transpose(image, in_place=True)
    return image


def _flat(image: "Image.Image") -> "Image.Image":
    """An image of mode L or RGB."""
    from PIL import Image

    if image.mode in ("L", "RGB"):
        return image
    if image.mode[0] in "IF":
        return Image.fromarray(_eight_bits(np.asarray(image)))
    if image.mode in ("1", "LA", "La"):
        image, mode = image.convert("LA"), "L"
    elif image.mode in ("RGBA", "RGBa", "PA") or "transparency" in image.info:
        image, mode = image.convert("RGBA"), "RGB"
    else:
        return image.convert("RGB")
    white = Image.new(mode, image.size, "white")
    white.paste(image.convert(mode), mask=image.getchannel("A"))
    return white


def _eight_bits(pixels: np.ndarray) -> np.ndarray:
    """Greys of more than 8 bits as uint8: of 16 bits by 65535; by 4095 where none is above, which is what cameras of 12
    bits write; numbers with a point by 1."""
    low, high = float(pixels.min()), float(pixels.max())
    most = 1.0 if pixels.dtype.kind == "f" else 4095.0 if high <= 4095 else 65535.0
    if not 0 <= low <= high <= most:
        raise ValueError(f"greys from {low:g} to {high:g}, which are neither of 12 or 16 bits nor from 0 to 1")
    return (pixels * (255 / most) + 0.5).astype(np.uint8)


@contextmanager
def _image(file: Path | str | bytes) -> "Iterator[Image.Image]":
    from PIL import Image

    try:
        with _opened(file) as stream, Image.open(stream, formats=FORMATS) as image:
            if image.width * image.height > PIXELS:
                raise ValueError(f"{image.width}x{image.height} pixels, more than {PIXELS:,} in all")
            yield image
    except Exception as error:                  # PIL's decoders raise whatever they trip over
        name = "an image in a pack" if isinstance(file, bytes) else shown_name(file)
        raise DataError(f"{name}{NO_IMAGE} ({_cause(error)}){REMEDY}") from None


def _cause(error: Exception) -> str:
    from PIL import UnidentifiedImageError

    if isinstance(error, UnidentifiedImageError):
        return "it is none, or of a kind that is not read"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return " ".join(str(error).split())


@contextmanager
def _opened(file: Path | str | bytes) -> Iterator[BinaryIO]:
    """A content, or a plain file; links are followed, as data sets are often made of them, a FIFO is not waited for."""
    if isinstance(file, bytes):
        yield io.BytesIO(file)
        return
    handle = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG((status := os.fstat(handle)).st_mode):
            raise ValueError("is no plain file")
        if not status.st_size:
            raise ValueError("is empty")
        if status.st_size <= WHOLE:
            yield io.BytesIO(_content(handle, status.st_size))
        else:
            with os.fdopen(handle, "rb", closefd=False) as stream:
                yield stream
    finally:
        os.close(handle)


def _content(handle: int, size: int) -> bytes:
    content = os.read(handle, size)
    while len(content) < size and (more := os.read(handle, size - len(content))):
        content += more
    return content


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
