"""Decoded images in memory-mapped arrays, and the cache folders below data.root that hold the arrays."""

import os
import secrets
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import numpy as np
from pydantic import TypeAdapter
from typing_extensions import TypedDict

from raylt.data.images.cache_builder import ABOUT
from raylt.errors import ConfigError, DataError, RayltError
from raylt.store import Folder


@dataclass(frozen=True, eq=False)
class Mapped:
    """Selected rows of a memory-mapped array of decoded images or label maps.

    It is pickled as a path and row numbers, so every process reads its own rows and no image is sent.

    Args:
        path: Absolute path of a .npy that every node can read: images uint8 [N, H, W, channels] or maps [N, H, W].
        rows: Numbers of the rows, int64 [n].
    """

    path: str
    rows: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape that the rows have in memory."""
        return (len(self.rows), *self._open().shape[1:])

    @property
    def dtype(self) -> np.dtype:
        """Return the type of the array."""
        return self._open().dtype

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, rows: int | slice | np.ndarray) -> np.ndarray:
        """Copy the indexed rows into memory, like indexing of a NumPy array."""
        return np.array(self._open()[self.rows[rows]])

    def take(self, indices: np.ndarray) -> "Mapped":
        """Return the rows at the given indices, without a copy."""
        return Mapped(self.path, self.rows[indices])

    def load(self) -> np.ndarray:
        """Copy the rows into memory, uint8 [n, H, W, channels] or [n, H, W]."""
        return self[:]

    def _open(self) -> np.ndarray:
        try:
            return np.load(self.path, mmap_mode="r")
        except (OSError, ValueError) as error:
            raise DataError(
                f"data.root: the cache of decoded images {self.path} cannot be read ({error}). "
                "Set data.root to a folder that every node sees; if the cache was removed, run the same command again.",
                code="data.cache-unreadable",
                key="data.root",
                path=self.path,
            ) from None


Stored = np.ndarray | Mapped


def take(x: Stored, rows: np.ndarray) -> Stored:
    """Return the rows of `x` at the given indices."""
    return x.take(rows) if isinstance(x, Mapped) else x[rows]


def cut(x: Stored, start: int, end: int) -> Stored:
    """Return the rows of `x` from `start` to `end`, without a copy."""
    return Mapped(x.path, x.rows[start:end]) if isinstance(x, Mapped) else x[start:end]


def load(x: Stored) -> np.ndarray:
    """Return `x` as an array in memory."""
    return x.load() if isinstance(x, Mapped) else x


def pixel_rows(x: Stored, line: int) -> np.ndarray:
    """Return the pixel row `line` of every image, uint8 [n, W, channels]. Only these rows of mapped images are read."""
    return x._open()[x.rows, line] if isinstance(x, Mapped) else x[:, line]


class Cache(NamedTuple):
    """Description of a cache of decoded images, as `raylt data --cache` lists it.

    Attributes:
        name: Name of the cache's folder.
        of: The folder of images or the data set from which the cache was made.
        images: Number of images; None if the cache is unfinished or was made by an older raylt.
        side: Side of the images in pixels; None in the same cases.
        size: Size on disk in bytes.
        made: Date of the last write.
    """

    name: str
    of: str
    images: int | None
    side: int | None
    size: int
    made: str


class _About(TypedDict):
    """The content of a cache's about.json."""

    of: str
    images: int
    size: int


_ABOUT = TypeAdapter(_About)


def caches(root: Path) -> list[Cache]:
    """List all caches of decoded images below `root`, by name.

    Args:
        root: `data.root`.
    """
    parent = root.expanduser() / "cache"
    if not parent.is_dir():
        return []
    listed = []
    with Folder.open(parent) as folder:
        for name in folder.names():
            with suppress(RayltError), folder.inner(name) as inner:
                cache = _describe(inner, parent / name)
                if cache is not None:
                    listed.append(cache)
    return listed


def clear(root: Path, name: str) -> list[Cache]:
    """Delete the cache with this name, or all caches if the name is `all`.

    Returns:
        The removed caches.

    Raises:
        ConfigError: No cache has this name, or a process is writing it.
    """
    chosen = [cache for cache in caches(root) if name in (cache.name, "all")]
    parent = root.expanduser() / "cache"
    if not chosen and name != "all":
        raise ConfigError(
            f"--clear-cache: no cache in {parent} has this name ({name!r}). List the caches with raylt data --cache.",
            code="data.unknown-cache",
            name=name,
            path=str(parent),
        )
    for cache in chosen:
        with Folder.open(parent) as folder:
            _remove(folder, cache.name)
    return chosen


def _remove(folder: Folder, name: str) -> None:
    """Delete a cache, unless a process is writing it.

    The folder is renamed under its lock, so a process that waits for the lock notices that the cache is gone.
    """
    with folder.inner(name) as inner:
        lock = inner.lock("lock")
    if lock is None:
        raise ConfigError(
            f"{folder.path / name}: a process is decoding images into it. Wait until it ends.",
            code="data.cache-busy",
            name=name,
            path=str(folder.path),
        )
    removed = f"{name}.{secrets.token_hex(8)}"
    try:
        folder.rename(name, removed)
    finally:
        os.close(lock)
    folder.remove(removed)


def _describe(folder: Folder, path: Path) -> Cache | None:
    """Describe the cache in a folder; return None if the folder holds no cache."""
    names = folder.names()
    if not any(file.startswith(("images.", "labels.", "features.")) for file in names):
        return None
    about: _About | None = None
    with suppress(RayltError):
        about = folder.read_json(ABOUT, _ABOUT)
    if about is not None:
        origin = about["of"]
    else:
        finished = any(file.endswith(".npy") for file in names)
        origin = "made by an older raylt" if finished else "unfinished"
    stats = [os.stat(path / file, follow_symlinks=False) for file in names]
    return Cache(
        name=path.name,
        of=origin,
        images=about and about["images"],
        side=about and about["size"],
        size=sum(stat.st_size for stat in stats),
        made=f"{datetime.fromtimestamp(max(stat.st_mtime for stat in stats)):%Y-%m-%d %H:%M}",
    )
