"""Decoders of image files and npz archives. They check the declared sizes before they allocate memory."""

import errno
import io
import math
import os
import stat
import warnings
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

import numpy as np

from raylt.data.images.image_files import shown_name
from raylt.disk import exists
from raylt.errors import DataError, RayltError
from raylt.machine import total_memory

if TYPE_CHECKING:
    from PIL import Image

FORMATS = ("JPEG", "PNG", "BMP", "GIF", "PPM", "TIFF", "WEBP")
PIXELS = 2**27  # maximum number of pixels of an image; the largest photographs have half as many
Fit = Literal["crop", "pad"]
TURNING = {"exif", "Raw profile type exif", "XML:com.adobe.xmp", "xmp"}  # PIL's names of metadata that may rotate
READ_AT_ONCE = 2**24  # files up to this size are read at once, because PIL reads a few bytes forty times
MAX_DEFLATE_RATIO = 1040  # maximum compression ratio of deflate
MAX_CAUSES = 20  # causes that a message about files that cannot be decoded gives
MAX_NAMES = 3  # files that it names for each cause
PPM_CODECS = ("ppm", "ppm_plain")  # Pillow's codecs that scale the largest value of a file's header to full scale


# Errors of the machine, not of a file: data.bad=skip must not skip a file because of them.
OF_THE_MACHINE = {
    errno.EIO,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
    errno.ESTALE,
    errno.ETIMEDOUT,
}


class Undecodable(DataError):
    """Raised when a file cannot be decoded as an image.

    Args:
        name: Printable name of the image.
        cause: Reason in a few words.
    """

    def __init__(self, name: str, cause: str):
        super().__init__(
            f"{name}: not an image that can be decoded ({cause}). Replace or remove it.",
            code="data.undecodable",
            path=name,
            cause=cause,
        )
        self.name = name
        self.cause = cause

    @property
    def reason(self) -> str:
        """Return the file's name, followed by the cause of the failure in brackets."""
        return f"{self.name} ({self.cause})"


def grouped_by_cause(reasons: Iterable[str]) -> tuple[str, bool]:
    """Describe files that cannot be decoded: each cause once, most frequent first, with the first files' names.

    Args:
        reasons: `Undecodable.reason` of each file, or another description of its failure.

    Returns:
        The description in one line, and whether it names all files.
    """
    names: dict[str, list[str]] = {}
    for reason in reasons:
        name, cause = _name_and_cause(reason)
        names.setdefault(cause, []).append(name)
    groups = sorted(names.items(), key=lambda group: -len(group[1]))
    texts = []
    for cause, files in groups[:MAX_CAUSES]:
        more = f" and {len(files) - MAX_NAMES} more" if len(files) > MAX_NAMES else ""
        texts.append(f"{', '.join(files[:MAX_NAMES])}{more}{cause}")
    if others := sum(len(files) for _, files in groups[MAX_CAUSES:]):
        texts.append(f"and {others} for other causes")
    return "; ".join(texts), not others and all(len(files) <= MAX_NAMES for _, files in groups)


def _name_and_cause(reason: str) -> tuple[str, str]:
    """Divide a reason before the last pair of brackets, with the causes' own brackets inside; "" without a cause."""
    nested = 0
    for position in range(len(reason) - 1, -1, -1):
        nested += {")": 1, "(": -1}.get(reason[position], 0)
        if not nested:
            return (reason[: position - 1], reason[position - 1 :]) if reason.endswith(")") else (reason, "")
    return reason, ""


def open_image(file: Path) -> "Image.Image":
    """Open an image file without converting its colours.

    Raises:
        Undecodable: The file cannot be decoded, has a format that is not in FORMATS, or more than PIXELS pixels.
        RayltError: This machine cannot read the file at present, for a reason that is not in the file.
    """
    with _image(file) as image:
        image.load()
        return image


def flat_image(file: Path | str | bytes, depth: int | None = None) -> "Image.Image":
    """Decode an image file at its original size in mode L or RGB.

    `eight_bits` scales greys of more than 8 bits.

    Args:
        file: Path or content.
        depth: `data.depth`.

    Raises:
        Undecodable: See `open_image`; or a grey level exceeds the depth.
    """
    with _image(file) as image:
        _keep_greys(image, depth)
        image.load()
        return _flat(image, depth)


def fitted_image(
    file: Path | str | bytes,
    size: int,
    channels: int | None = 3,
    fit: Fit = "crop",
    depth: int | None = None,
) -> np.ndarray:
    """Decode an image file and fit it to `size`, with the orientation and colours that an image viewer shows.

    The image is rotated according to its EXIF data, and transparent pixels are blended with white. Of an animation, the
    first frame is used. Greys of more than 8 bits are scaled equally in all files of the same type, see `eight_bits`.

    Args:
        file: Path or content.
        size: Side of the result in pixels.
        channels: 1 for grey, 3 for RGB; None: 1 for a file without colour, otherwise 3.
        fit: "crop" resizes the shorter side and keeps the centre; "pad" resizes the longer side and adds black.
        depth: `data.depth`.

    Returns:
        uint8 [size, size, channels].

    Raises:
        Undecodable: See `flat_image`.
    """
    from PIL import Image, ImageOps

    with _image(file) as image:
        _keep_greys(image, depth)
        image.draft(None, (size, size))  # a JPEG is decoded at the smallest scale that still covers the crop
        flat = _flat(_upright(image), depth)
        mode = flat.mode if channels is None else "L" if channels == 1 else "RGB"
        flat = flat if flat.mode == mode else flat.convert(mode)
        if fit == "pad" and 2 * size * min(flat.size) < max(flat.size):  # the shorter side would round to 0 pixels
            sides = [max(1, round(side * size / max(flat.size))) for side in flat.size]
            flat = flat.resize(sides, Image.Resampling.BILINEAR)
        fitted = (ImageOps.fit if fit == "crop" else ImageOps.pad)(flat, (size, size), Image.Resampling.BILINEAR)
        return np.asarray(fitted).reshape(size, size, -1)


@dataclass(frozen=True)
class Fitted:
    """`fitted_image` as a picklable function, for `pack`."""

    size: int
    channels: int | None
    fit: Fit
    depth: int | None = None

    def __call__(self, row: int, file: str | bytes) -> np.ndarray:
        try:
            return fitted_image(file, self.size, self.channels, self.fit, self.depth)
        except Undecodable as error:
            if isinstance(file, bytes):
                raise Undecodable(f"row {row}", error.cause) from None
            raise


ArrayHeaders = dict[str, tuple[tuple[int, ...], np.dtype]]  # shape and type by name


def read_npz(
    path: Path, keys: Sequence[str], check: Callable[[ArrayHeaders], None] | None = None
) -> dict[str, np.ndarray]:
    """Read the arrays with the given names from an npz file. Names that are not in the file are skipped.

    Args:
        path: Path of the file.
        keys: Names of the arrays.
        check: Called with the shapes and types before any array is loaded; raises a ValueError if one is wrong.

    Raises:
        DataError: The file is not an npz file, is damaged, or declares more bytes than the archive can contain or this
            machine's memory can hold.
    """
    try:
        with _opened(path) as stream:
            headers = _check_sizes(stream, keys)
            if check is not None:
                check(headers)
            with np.load(stream, allow_pickle=False) as file:
                return {key: file[key] for key in keys if key in file}
    except Exception as error:  # numpy and zipfile raise many types for a damaged file
        if not exists(path):
            raise DataError(
                f"{path.absolute()}: no such file. Check the path.", code="data.not-found", path=str(path)
            ) from None
        raise DataError(
            f"{path.absolute()}: not a readable npz file ({' '.join(str(error).split())}). Write it with "
            "numpy.savez_compressed and without Python objects.",
            code="data.malformed",
            path=str(path),
        ) from None


def _upright(image: "Image.Image") -> "Image.Image":
    from PIL import ImageOps

    image.load()
    if image.format == "TIFF" or not image.info.keys().isdisjoint(TURNING):
        with suppress(Exception):  # the image may be intact even if its EXIF data is damaged
            ImageOps.exif_transpose(image, in_place=True)
    return image


def _flat(image: "Image.Image", depth: int | None) -> "Image.Image":
    """Convert an image to mode L or RGB."""
    from PIL import Image

    transparent = "transparency" in image.info
    if image.mode in ("L", "RGB") and not transparent:
        return image
    if image.mode[0] in "IF":
        greys = eight_bits(np.asarray(image), depth, _bits_of(image))
        return Image.fromarray(255 - greys if _is_negative(image) else greys)
    if image.mode == "RGB" and max(image.info["transparency"]) > 255:  # 16 bits, while pixels keep the upper 8
        image.info["transparency"] = tuple(level >> 8 for level in image.info["transparency"])
    if image.mode in ("1", "L", "LA", "La"):
        image = image.convert("LA")
        mode = "L"
    elif image.mode in ("RGBA", "RGBa", "PA") or transparent:
        image = image.convert("RGBA")
        mode = "RGB"
    else:
        return image.convert("RGB")
    white = Image.new(mode, image.size, "white")
    white.paste(image.convert(mode), mask=image.getchannel("A"))
    return white


def eight_bits(pixels: np.ndarray, depth: int | None, bits: int | None = None) -> np.ndarray:
    """Scale greys of more than 8 bits to uint8. The white level does not depend on the image.

    White is 2^depth - 1. Without a depth it depends on the type: 1 for floats, 2^bits - 1 for integers of up to 16
    bits. Integers of 32 bits and more need a depth, because their full scale would turn most data black.

    Args:
        pixels: Array of any shape and numeric type.
        depth: `data.depth`.
        bits: Number of bits of the integers; by default that of the type.

    Returns:
        uint8 of the same shape.

    Raises:
        ValueError: A value is negative, not finite or greater than white, or the integers need a depth.
    """
    bits = (8 * pixels.dtype.itemsize - (pixels.dtype.kind == "i")) if bits is None else bits
    low = float(pixels.min())
    high = float(pixels.max())
    if not math.isfinite(low + high):
        raise ValueError("pixels that are NaN or infinite: replace them by numbers")
    if low < 0:
        raise ValueError(f"greys from {low:g} to {high:g}, of which some are negative: let black be 0")
    if depth is None and pixels.dtype.kind != "f" and bits > 16:
        raise ValueError(
            "a type of more than 16 bits, which has no usual full scale: set data.depth to the bits of a pixel"
        )
    usual_white = 1.0 if pixels.dtype.kind == "f" else float(2**bits - 1)
    white = usual_white if depth is None else float(2**depth - 1)
    if high > white:
        raise ValueError(
            f"greys from {low:g} to {high:g}, outside of 0..{white:g}: set data.depth to the bits of a pixel"
        )
    return (pixels * (255 / white) + 0.5).astype(np.uint8)


def full_scale(file: Path | str | bytes) -> float | None:
    """Return the level that becomes white in an image file of more than 8 bits if no depth is set.

    Only the head of the file is read. None stands for a file of 8 bits or less, and for one that cannot be read.
    """
    try:
        with _image(file, read_at_once=0) as image:
            codec, raw_mode, maximum = _coding(image)
            if maximum > 255 and codec in PPM_CODECS:
                return float(maximum)
            if image.mode[0] in "IF":
                return 1.0 if image.mode == "F" else float(2 ** (_bits_of(image) or 16) - 1)
            return 65535.0 if ";16" in raw_mode else None
    except Undecodable:
        return None


def _bits_of(image: "Image.Image") -> int | None:
    """Return the bits per pixel that the image's file states; None if the pixel type alone determines them."""
    if image.format == "TIFF":
        tags: Any = image.getexif()
        bits = tags.get(258, 16)  # BitsPerSample
        bits = bits[0] if isinstance(bits, tuple) else bits
        formats = tags.get(339, 1)  # SampleFormat: 2 is a signed integer
        return bits - (2 in (formats if isinstance(formats, tuple) else (formats,)))
    return 16 if image.mode == "I" else None  # PNG and PGM have 16 bits, which Pillow may hold in 32


def _is_negative(image: "Image.Image") -> bool:
    """Return whether 0 is white in the pixels of an image of more than 8 bits, which Pillow does not invert."""
    tags: Any = image.getexif() if image.format == "TIFF" else {}
    return tags.get(262) == 0  # PhotometricInterpretation: WhiteIsZero


def _keep_greys(image: Any, depth: int | None) -> None:
    """Keep Pillow from scaling the greys of a PGM file by the maximum in its header, if a depth is set.

    Called before the pixels are loaded.

    Raises:
        ValueError: A depth is set, and Pillow keeps only the upper 8 of 16 bits, as it does with colours.
    """
    if depth is None:
        return
    codec, raw_mode, maximum = _coding(image)
    scaled = codec in PPM_CODECS and maximum > 255
    if image.mode[0] not in "IF" and (scaled or ";16" in raw_mode):
        raise ValueError(
            "its colours or its transparency have 16 bits, and data.depth scales only greys: convert it to 8 bits"
        )
    if scaled:
        image.tile = [tile._replace(args=(raw_mode, 65535)) for tile in image.tile]  # 65535 keeps greys as they are


def _coding(image: Any) -> tuple[str, str, int]:
    """Return the codec, the raw mode and, for PPM_CODECS, the largest value in the header of an image before loading.

    Without a codec, the text is empty and the number 0.
    """
    if not image.tile:
        return "", "", 0
    codec = image.tile[0].codec_name
    raw_mode, *others = [*image.tile[0].args] if isinstance(image.tile[0].args, tuple) else [image.tile[0].args]
    return codec, str(raw_mode), others[0] if codec in PPM_CODECS and others else 0


@contextmanager
def _image(file: Path | str | bytes, read_at_once: int = READ_AT_ONCE) -> "Iterator[Image.Image]":
    from PIL import Image

    try:
        with _unwarned(), _opened(file, read_at_once) as stream, Image.open(stream, formats=FORMATS) as image:
            if image.width * image.height > PIXELS:
                raise ValueError(f"{image.width}x{image.height} pixels, more than {PIXELS:,} in all")
            yield image
    except MemoryError:
        raise
    except Exception as error:  # PIL's decoders raise many types for a damaged file
        name = "an image without a file" if isinstance(file, bytes) else shown_name(file)
        if isinstance(error, OSError) and error.errno in OF_THE_MACHINE:
            raise RayltError(
                f"{name}: cannot be read at present ({error.strerror}). Fix this, and run the command again.",
                code="file.unreadable",
                path=name,
                cause=error.strerror,
            ) from None
        raise Undecodable(name, _cause(error)) from None


@contextmanager
def _unwarned() -> Iterator[None]:
    """Suppress PIL's warnings about odd image metadata."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _cause(error: Exception) -> str:
    from PIL import UnidentifiedImageError

    if isinstance(error, UnidentifiedImageError):
        return "not an image, or of an unsupported format"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return " ".join(str(error).split())


@contextmanager
def _opened(file: Path | str | bytes, read_at_once: int = READ_AT_ONCE) -> Iterator[BinaryIO]:
    """Open a regular file, or content that is already in memory, as a binary stream.

    Links are followed, because many data sets consist of them. Opening a FIFO does not block.
    """
    if isinstance(file, bytes):
        yield io.BytesIO(file)
        return
    handle = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("is not a plain file")
        if not status.st_size:
            raise ValueError("is empty")
        if status.st_size <= read_at_once:
            yield io.BytesIO(_content(handle, status.st_size))
        else:
            with os.fdopen(handle, "rb", closefd=False) as stream:
                yield stream
    finally:
        os.close(handle)


def _content(handle: int, size: int) -> bytes:
    content = os.read(handle, size)
    while len(content) < size:
        more = os.read(handle, size - len(content))
        if not more:
            break
        content += more
    return content


def _check_sizes(stream: BinaryIO, keys: Sequence[str]) -> ArrayHeaders:
    """Raise an error if arrays declare more bytes than the archive can contain or the machine's memory can hold.

    Returns:
        The shape and type of each array.

    Raises:
        ValueError: A declared size is too large.
    """
    needed = 0
    headers: ArrayHeaders = {}
    with zipfile.ZipFile(stream) as archive:
        for entry in archive.infolist():
            if entry.filename.removesuffix(".npy") not in keys:
                continue
            with archive.open(entry) as member:
                shape, dtype = _header(member)
            size = math.prod(shape) * dtype.itemsize
            if size > entry.file_size or entry.file_size > MAX_DEFLATE_RATIO * (entry.compress_size + 64):
                raise ValueError(
                    f"{entry.filename} declares {size:,} bytes and has {entry.compress_size:,} in the archive"
                )
            needed += size
            headers[entry.filename.removesuffix(".npy")] = shape, dtype
    memory = total_memory()
    if needed > memory:
        raise ValueError(f"its arrays take {needed:,} bytes, this machine has {memory:,}")
    stream.seek(0)
    return headers


def _header(member: Any) -> tuple[tuple[int, ...], np.dtype]:
    version = np.lib.format.read_magic(member)
    if version == (1, 0):
        shape, _, dtype = np.lib.format.read_array_header_1_0(member)
    else:
        shape, _, dtype = np.lib.format.read_array_header_2_0(member)
    return shape, dtype
