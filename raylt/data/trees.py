"""Trees of image files, decoded once."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from raylt.data.cache import Mapped
from raylt.data.decoding import NO_IMAGE, REMEDY, Fit, Fitted
from raylt.data.listing import shown_name
from raylt.data.packing import pack, place_of
from raylt.errors import DataError

LISTED = 20             # damaged files that an error names one by one
FORMAT = 2              # of what is decoded how; another one is another cache

Channels = Literal["auto", 1, 3]
Bad = Literal["stop", "skip"]


@dataclass(frozen=True)
class How:
    """How images are decoded.

    Args:
        size: side in pixels.
        channels: 1 for grey, 3 for RGB, auto for grey where all are.
        fit: see `fitted_image`.
        bad: whether files that cannot be decoded end it, or are left out.
    """

    size: int
    channels: Channels = 3
    fit: Fit = "crop"
    bad: Bad = "stop"


def decode_tree(name: str, folder: Path, files: Sequence[str], how: How,
                cache: Path) -> tuple[Mapped, np.ndarray, tuple[str, ...]]:
    """Images as uint8 [N, size, size, channels].

    The cache is of these files, as their sizes and times say: one that was replaced is decoded again.

    Args:
        name: how the cache's folder begins.
        folder: what `files` are relative to.
        files: at least one.
        cache: folder of all caches.

    Returns:
        The images that can be decoded, their places in `files`, and what to tell of the others.

    Raises:
        DataError: files cannot be decoded, and `how` does not say that they are left out, or none is left; or the cache
            does not fit on the disk.
    """
    root = str(folder.resolve())
    paths = [os.path.join(root, file) for file in files]
    key = [FORMAT, root, how.size, how.channels, how.fit, [(file, *_stamp(path))
                                                           for file, path in zip(files, paths, strict=True)]]
    path = place_of(name, key, cache) / "images.npy"
    about = {"of": shown_name(root), "images": len(files), "size": how.size}
    return decode_all(path, len(files), lambda row: paths[row], how, about)


def decode_all(path: Path, count: int, file: Callable[[int], str | bytes], how: How,
               about: Mapping[str, Any]) -> tuple[Mapped, np.ndarray, tuple[str, ...]]:
    """The same of images that are files or contents of such.

    Args:
        path: of the array in its cache.
        count: N.
        file: row -> path or content.
        about: see `pack`.
    """
    wanted = None if how.channels == "auto" else how.channels
    bad = pack(path, (count, how.size, how.size, wanted or 3), file, Fitted(how.size, wanted, how.fit), about,
               grey=wanted is None, whole=how.bad == "stop")
    rows = np.setdiff1d(np.arange(count), list(bad))
    if bad and (how.bad == "stop" or not len(rows)):
        raise DataError(f"{_told(bad, path)}; replace or remove them, or set data.bad=skip")
    return Mapped(str(path), rows), rows, (f"left out: {_told(bad, path)}",) if bad else ()


def _stamp(path: str) -> tuple[int, int]:
    try:
        status = os.stat(path)
    except OSError:                             # told when it is decoded
        return -1, -1
    return status.st_size, status.st_mtime_ns


def _told(bad: dict[int, str], path: Path) -> str:
    """All damaged files in one line."""
    reasons = []
    for row, reason in sorted(bad.items()):
        for words in (REMEDY, NO_IMAGE):
            reason = reason.replace(words, "")
        reasons.append(reason.replace("an image in a pack", f"row {row}"))
    more = f"; and {len(reasons) - LISTED} more, listed in {path.with_name('images.bad.json')}"
    return (f"{len(reasons)} images cannot be decoded: {'; '.join(reasons[:LISTED])}"
            + more * (len(reasons) > LISTED))
