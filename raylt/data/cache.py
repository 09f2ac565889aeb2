"""Images and label maps decoded once into memory-mapped uint8 arrays, from which every process copies its rows."""

import hashlib
import json
import math
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from raylt.data.decoding import fitted_image
from raylt.errors import DataError
from raylt.store import folder_for

if TYPE_CHECKING:
    from PIL import Image

PARTIAL = "partial.npy"         # what is being decoded


@dataclass(frozen=True, eq=False)
class Mapped:
    """Rows of an array on disk. Pickles as a path and row numbers, so that images travel to no other process.

    Args:
        path: absolute path of a .npy that every node can read: images uint8 [N, H, W, channels] or maps [N, H, W].
        rows: int64 [n].
    """

    path: str
    rows: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.rows), *self._open().shape[1:])

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, indices: np.ndarray) -> "Mapped":
        return Mapped(self.path, self.rows[indices])

    def load(self) -> np.ndarray:
        """A copy of the rows in memory, uint8 [n, H, W, channels] or [n, H, W]."""
        return np.array(self._open()[self.rows])

    def _open(self) -> np.ndarray:
        try:
            return np.load(self.path, mmap_mode="r")
        except (OSError, ValueError) as error:
            raise DataError(f"{self.path}: the cache of decoded images cannot be read ({error}); "
                            "data.root must be a folder that every node sees") from None


Stored = np.ndarray | Mapped


def take(x: Stored, rows: np.ndarray) -> Stored:
    """The given rows of `x`."""
    return x.take(rows) if isinstance(x, Mapped) else x[rows]


def load(x: Stored) -> np.ndarray:
    """`x` in memory."""
    return x.load() if isinstance(x, Mapped) else x


def decode_tree(name: str, folder: Path, files: Sequence[str], size: int, cache: Path) -> Mapped:
    """Images as uint8 RGB [N, size, size, 3]: the shorter side is resized to `size`, the centre is kept.

    A second call with the same folder, file names and size opens the cache; it does not look into the files again.

    Args:
        name: how the cache's folder begins.
        folder: what `files` are relative to.
        files: at least one.
        size: side in pixels.
        cache: folder of all caches.

    Raises:
        DataError: a file cannot be decoded, or the cache does not fit on the disk.
    """
    place = _place(name, [str(folder.resolve()), size, list(files)], cache)
    return _decoded(place / "images.npy", (len(files), size, size, 3),
                    lambda row: fitted_image(folder / files[row], size))


@dataclass(frozen=True)
class Frames:
    """Pictures of one size and their label maps, as they lie on disk.

    Args:
        key: what identifies them, as JSON; another key is another cache.
        count: N, at least one.
        image: row -> RGB image.
        labels: row -> uint8 [H, W].
    """

    key: Any
    count: int
    image: "Callable[[int], Image.Image]"
    labels: Callable[[int], np.ndarray]


def decode_frames(name: str, frames: Frames, height: int, cache: Path) -> tuple[Mapped, Mapped]:
    """Images uint8 [N, height, W, 3] and label maps uint8 [N, height, W]; W keeps the ratio of the first image.

    Images are resized with antialiasing, of a map the nearest label is taken. A second call with the same key and
    height opens the cache.

    Raises:
        DataError: a frame is unlike the first or its map, cannot be decoded, or the cache does not fit on the disk.
    """
    from PIL import Image

    place = _place(name, [frames.key, height], cache)
    paths = place / "images.npy", place / "labels.npy"
    if all(path.exists() for path in paths):
        return Mapped(str(paths[0]), np.arange(frames.count)), Mapped(str(paths[1]), np.arange(frames.count))
    wide, tall = frames.image(0).size
    width = max(1, round(wide * height / tall))

    def image(row: int) -> np.ndarray:
        found = frames.image(row)
        if found.size != (wide, tall):
            raise DataError(f"{name}: image {row} is {found.size[0]}x{found.size[1]}, the first {wide}x{tall}; "
                            "all must be of one size")
        return np.asarray(found.resize((width, height), Image.Resampling.BILINEAR))

    def labels(row: int) -> np.ndarray:
        found = frames.labels(row)
        if found.shape != (tall, wide):
            raise DataError(f"{name}: label map {row} is {list(found.shape)}, one index for each of {tall}x{wide} "
                            "pixels is expected; colours must be turned into indices")
        return np.asarray(Image.fromarray(found).resize((width, height), Image.Resampling.NEAREST))

    return (_decoded(paths[0], (frames.count, height, width, 3), image),
            _decoded(paths[1], (frames.count, height, width), labels))


def _place(name: str, key: Any, cache: Path) -> Path:
    return cache.resolve() / f"{name}-{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]}"


def _decoded(path: Path, shape: tuple[int, ...], decode: Callable[[int], np.ndarray]) -> Mapped:
    if not path.exists():
        # trials that start together decode once; what a killed process left is removed under the same lock
        with folder_for(path.parent) as folder:
            lock = folder.lock("lock", wait=True)
            assert lock is not None
            try:
                if not path.exists():
                    folder.remove(PARTIAL)
                    _decode_all(decode, shape, path.with_name(PARTIAL))
                    folder.rename(PARTIAL, path.name)
            finally:
                os.close(lock)
    return Mapped(str(path), np.arange(shape[0]))


def _decode_all(decode: Callable[[int], np.ndarray], shape: tuple[int, ...], path: Path) -> None:
    from rich.console import Console
    from rich.progress import track

    needed, free = math.prod(shape), shutil.disk_usage(path.parent).free
    if needed > free:           # writing past the end of the disk through a memory map would kill the process
        raise DataError(f"{path.parent}: the cache of {shape[0]} images at data.size = {shape[1]} takes "
                        f"{needed / 1e9:.1f} GB, {free / 1e9:.1f} are free; lower data.size or move data.root")
    rows = np.lib.format.open_memmap(path, "w+", np.uint8, shape)

    def write(row: int) -> None:
        rows[row] = decode(row)

    try:
        with ThreadPoolExecutor() as pool:      # PIL decodes outside the interpreter lock
            for _ in track(pool.map(write, range(shape[0])), f"decoding {shape[0]} images", shape[0],
                           console=Console(stderr=True), disable=not sys.stderr.isatty()):
                pass
        rows.flush()
    except BaseException:
        path.unlink()
        raise
