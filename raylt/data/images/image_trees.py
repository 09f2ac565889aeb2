"""Decoding of folders of image files into cached arrays; each file is decoded once."""

import functools
import hashlib
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np

from raylt.data.images.cache import Mapped, take
from raylt.data.images.cache_builder import pack, place_of
from raylt.data.images.decoding import Fit, Fitted, full_scale, grouped_by_cause
from raylt.data.images.image_files import shown_name
from raylt.disk import is_file
from raylt.errors import CheckpointError, DataError, count_of, first_names

LOOKED_AT = 200  # number of files whose full scale is read for notices
FORMAT = 5  # version of the decoding; each version has its own cache

Channels = Literal["auto", 1, 3]
Bad = Literal["stop", "skip"]


@dataclass(frozen=True)
class How:
    """Settings for decoding images.

    Args:
        size: Side of the images in pixels.
        channels: 1 for grey, 3 for RGB, auto for grey if all images are grey.
        fit: See `fitted_image`.
        bad: Stop at files that cannot be decoded, or skip them.
        depth: `data.depth`.
    """

    size: int
    channels: Channels = 3
    fit: Fit = "crop"
    bad: Bad = "stop"
    depth: int | None = None


def decode_tree(
    name: str, folder: Path, files: Sequence[str], how: How, cache: Path
) -> tuple[Mapped, np.ndarray, tuple[str, ...]]:
    """Decode image files below a folder to uint8 [N, size, size, channels], through a cache on disk.

    The cache's key contains the files' sizes and modification times, so a replaced file is decoded again. Folders that
    agree in all names, sizes and times differ in the key by the content of their first file.

    Args:
        name: Prefix of the name of the cache's folder.
        folder: The folder that contains the files.
        files: Paths of the files relative to `folder`, at least one.
        how: Settings for decoding.
        cache: Folder of all caches.

    Returns:
        The images that can be decoded, their positions in `files`, and a note on the others.

    Raises:
        DataError: Files cannot be decoded and `how` does not skip them, no file can be decoded, or the cache does not
            fit on the disk.
    """
    root = str(folder.resolve())
    paths = [os.path.join(root, file) for file in files]
    stamps = [(file, *file_stamp(path)) for file, path in zip(files, paths, strict=True)]
    key = [FORMAT, root, how.size, how.channels, how.fit, how.depth, stamps]
    if alike := _hashes_of_alike(root, stamps):
        key.append(alike)
    path = place_of(name, key, cache) / "images.npy"
    about = {"of": shown_name(root), "images": len(files), "size": how.size}
    return decode_all(path, len(files), lambda row: paths[row], how, about)


def decode_all(
    path: Path, count: int, file: Callable[[int], str | bytes], how: How, about: Mapping[str, Any]
) -> tuple[Mapped, np.ndarray, tuple[str, ...]]:
    """Decode images, given as paths or as file contents, through a cache; return the same as `decode_tree`.

    Args:
        path: Path of the array in its cache.
        count: The number of images, N.
        file: Row -> path or content.
        how: Settings for decoding.
        about: Description of the cache, see `pack`.
    """
    channels = None if how.channels == "auto" else how.channels
    bad = pack(
        path,
        (count, how.size, how.size, channels or 3),
        file,
        Fitted(how.size, channels, how.fit, how.depth),
        about,
        grey=channels is None,
        whole=how.bad == "stop",
    )
    scale = functools.cache(lambda row: full_scale(file(row)))
    x, rows, notes = usable(
        path, count, bad, how, lambda row: scale(row) is not None, lambda row: _name(row, file(row))
    )
    if how.depth is None:
        notes += _scales_note(rows, scale, lambda row: _name(row, file(row)))
    return x, rows, notes


def _name(row: int, file: str | bytes) -> str:
    return f"row {row}" if isinstance(file, bytes) else shown_name(file)


def usable(
    path: Path,
    count: int,
    bad: dict[int, str],
    how: How,
    deep: Callable[[int], bool],
    name: Callable[[int], str] = "row {}".format,
) -> tuple[Mapped, np.ndarray, tuple[str, ...]]:
    """Return a cache's images, except those that could not be decoded; see `decode_tree`.

    Args:
        path: Path of the array in its cache.
        count: The number of all images, N.
        bad: The rows that could not be decoded, with the reason.
        how: Settings for decoding.
        deep: Row -> whether its file has more than 8 bits; called for LOOKED_AT usable rows and dark ones.
        name: Row -> name of the image in a notice.

    Raises:
        DataError: Images could not be decoded and `how` does not skip them, or no image could be decoded.
    """
    rows = np.setdiff1d(np.arange(count), list(bad))
    if bad and (how.bad == "stop" or not len(rows)):
        raise undecodable(bad, path)
    x = Mapped(str(path), rows)
    notes = (f"left out: {_describe(bad, path)}",) if bad else ()
    if how.depth is None and any(map(deep, _spread(rows, LOOKED_AT).tolist())):
        notes += _dark_note(x, deep, name)
    return x, rows, notes


def undecodable(bad: dict[int, str], path: Path) -> DataError:
    """Return the error about the images that cannot be decoded.

    Args:
        bad: The rows of these images, with the reason.
        path: Path of the array in its cache.
    """
    return DataError(
        f"{_describe(bad, path)}. Replace or remove them, or set data.bad=skip.",
        code="data.undecodable",
        count=len(bad),
        path=str(path),
    )


def _spread(rows: np.ndarray, most: int) -> np.ndarray:
    """Return at most `most` evenly spaced rows."""
    return rows[np.linspace(0, len(rows) - 1, min(len(rows), most)).astype(np.int64)]


def _dark_note(x: Mapped, deep: Callable[[int], bool], name: Callable[[int], str]) -> tuple[str, ...]:
    """Return a notice of images of more than 8 bits that use less than half of their range and would look dark.

    At most 2,000 evenly spaced images are read.
    """
    sample = take(x, _spread(np.arange(len(x)), 2000))
    assert isinstance(sample, Mapped)
    dark = sample.rows[sample.load().max((1, 2, 3)) <= 127]
    names = [name(row) for row in islice(filter(deep, dark.tolist()), 4)]
    if not names:
        return ()
    return (
        f"images of more than 8 bits use less than half of their full scale ({first_names(names, 3)}); if they have "
        "fewer bits than their files, set data.depth for greys, and convert colours to 8 bits",
    )


def _scales_note(rows: np.ndarray, scale: Callable[[int], float | None], name: Callable[[int], str]) -> tuple[str, ...]:
    """Return a notice if images of more than 8 bits have different full scales, for LOOKED_AT evenly spaced rows."""
    examples: dict[float, str] = {}
    for row in _spread(rows, LOOKED_AT).tolist():
        if (white := scale(row)) is not None:
            examples.setdefault(white, name(row))
    if len(examples) < 2:
        return ()
    scales = [f"{white:.15g} in {file}" for white, file in sorted(examples.items())]
    return (
        f"images of more than 8 bits have different full scales ({first_names(scales, 3)}), so the same grey differs "
        "between them; data.depth gives greys one scale",
    )


def file_stamp(path: str | Path) -> tuple[int, int]:
    """Return the size and the modification time in ns of a file, for the key of a cache; -1 if there is no file."""
    try:
        status = os.stat(path)
    except OSError:  # reported when the file is decoded
        return -1, -1
    return status.st_size, status.st_mtime_ns


def _hashes_of_alike(root: str, stamps: Sequence[tuple[str, int, int]]) -> list[tuple[str, str]]:
    """Return the folders whose files have the stamps of another folder's files, with a hash of their first file.

    When two such folders exchange their names, no path, size or time changes. Uncompressed images that an archive gave
    one time are an example.

    Args:
        root: The folder that contains the files.
        stamps: Path below `root`, size and modification time of each file.
    """
    listings: defaultdict[str, list[tuple[str, int, int]]] = defaultdict(list)
    for file, size, time in stamps:
        folder, name = os.path.split(file)
        listings[folder].append((name, size, time))
    counts = Counter(map(tuple, listings.values()))
    return [
        (folder, _hash_of(Path(root, folder, listing[0][0])))
        for folder, listing in listings.items()
        if counts[tuple(listing)] > 1
    ]


def _hash_of(file: Path) -> str:
    """Return the SHA-256 of a plain file; an empty string for others, which are reported when they are decoded."""
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest() if is_file(file) else ""
    except (OSError, CheckpointError):
        return ""


def _describe(bad: dict[int, str], path: Path) -> str:
    """Describe the damaged files and their faults in one line."""
    text, all_named = grouped_by_cause(reason for _, reason in sorted(bad.items()))
    listed = "" if all_named else f"; {path.with_name('images.bad.json')} lists all"
    return f"{count_of(len(bad), 'image')} cannot be decoded: {text}{listed}"
