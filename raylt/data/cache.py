"""Image files decoded once into a memory-mapped uint8 array, from which every process copies the rows it needs."""

import fcntl
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from raylt.errors import DataError


@dataclass(frozen=True, eq=False)
class Mapped:
    """Rows of an array on disk. Pickles as a path and row numbers, so that images travel to no other process.

    Args:
        path: absolute path of an images.npy, uint8 [N, H, W, channels], that every node can read.
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
        """A copy of the rows in memory, uint8 [n, H, W, channels]."""
        return np.array(self._open()[self.rows])

    def _open(self) -> np.ndarray:
        try:
            return np.load(self.path, mmap_mode="r")
        except (OSError, ValueError) as error:
            raise DataError(f"{self.path}: the cache of decoded images cannot be read ({error}); "
                            "data.root must be a folder that every node sees") from None


Images = np.ndarray | Mapped


def take(x: Images, rows: np.ndarray) -> Images:
    """The given rows of `x`."""
    return x.take(rows) if isinstance(x, Mapped) else x[rows]


def load(x: Images) -> np.ndarray:
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
    key = json.dumps([str(folder.resolve()), size, list(files)])
    place = cache.resolve() / f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    path = place / "images.npy"
    if not path.exists():
        place.mkdir(parents=True, exist_ok=True)
        # trials that start together decode once; what a killed process left is overwritten under the same lock
        with (place / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                _decode_all([folder / file for file in files], size, place / "partial.npy")
                os.replace(place / "partial.npy", path)
    return Mapped(str(path), np.arange(len(files)))


def _decode_all(files: list[Path], size: int, path: Path) -> None:
    from rich.console import Console
    from rich.progress import track

    path.unlink(missing_ok=True)
    needed, free = len(files) * size * size * 3, shutil.disk_usage(path.parent).free
    if needed > free:           # writing past the end of the disk through a memory map would kill the process
        raise DataError(f"{path.parent}: the cache of {len(files)} images at data.size = {size} takes "
                        f"{needed / 1e9:.1f} GB, {free / 1e9:.1f} are free; lower data.size or move data.root")
    images = np.lib.format.open_memmap(path, "w+", np.uint8, (len(files), size, size, 3))

    def decode(row: int) -> None:
        images[row] = _decode(files[row], size)

    try:
        with ThreadPoolExecutor() as pool:      # PIL decodes outside the interpreter lock
            for _ in track(pool.map(decode, range(len(files))), f"decoding {len(files)} images", len(files),
                           console=Console(stderr=True), disable=not sys.stderr.isatty()):
                pass
        images.flush()
    except BaseException:
        path.unlink()
        raise


def _decode(file: Path, size: int) -> np.ndarray:
    from PIL import Image, ImageOps

    try:
        with Image.open(file) as image:
            image.draft("RGB", (size, size))    # a JPEG is decoded at the smallest scale that still covers the crop
            return np.asarray(ImageOps.fit(image.convert("RGB"), (size, size), Image.Resampling.BILINEAR))
    except Exception as error:                  # PIL's decoders raise whatever they trip over
        raise DataError(f"{file}: not an image that can be decoded ({' '.join(str(error).split())}); "
                        "replace or remove it") from None
