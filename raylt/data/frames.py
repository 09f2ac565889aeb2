"""Pictures of one size with their label maps, decoded once."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from raylt.data.cache import Mapped
from raylt.data.decoding import open_image
from raylt.data.packing import pack, place_of
from raylt.errors import DataError

if TYPE_CHECKING:
    from PIL import Image


@dataclass(frozen=True)
class Frames:
    """Pictures of one size and their label maps, as they lie on disk.

    Args:
        key: what identifies them, as JSON; another key is another cache.
        count: N, at least one.
        image: row -> file of an image, or uint8 [H, W, 3].
        labels: row -> file of a map, or [H, W].
        table: the class of each index in a map, uint8 [256].
    """

    key: Any
    count: int
    image: Callable[[int], Path | np.ndarray]
    labels: Callable[[int], Path | np.ndarray]
    table: np.ndarray


@dataclass(frozen=True)
class _Resized:
    """Decodes an image to height x width. `before` is the width and height that it must have."""

    name: str
    before: tuple[int, int]
    width: int
    height: int

    def __call__(self, row: int, given: Path | np.ndarray) -> np.ndarray:
        from PIL import Image

        image = _image(given)
        if image.size != self.before:
            raise DataError(f"{self.name}: image {row} is {image.size[0]}x{image.size[1]}, the first "
                            f"{self.before[0]}x{self.before[1]}; all must be of one size")
        return np.asarray(image.resize((self.width, self.height), Image.Resampling.BILINEAR))


@dataclass(frozen=True, eq=False)
class _ResizedLabels:
    """The same of a label map."""

    name: str
    before: tuple[int, int]
    width: int
    height: int
    table: np.ndarray

    def __call__(self, row: int, given: Path | np.ndarray) -> np.ndarray:
        from PIL import Image

        labels = self.table[given if isinstance(given, np.ndarray) else np.asarray(open_image(given))]
        wide, tall = self.before
        if labels.shape != (tall, wide):
            raise DataError(f"{self.name}: label map {row} is {list(labels.shape)}, one index for each of "
                            f"{tall}x{wide} pixels is expected; colours must be turned into indices")
        return np.asarray(Image.fromarray(labels).resize((self.width, self.height), Image.Resampling.NEAREST))


def decode_frames(name: str, frames: Frames, height: int, cache: Path) -> tuple[Mapped, Mapped]:
    """Images uint8 [N, height, W, 3] and label maps uint8 [N, height, W]; W keeps the ratio of the first image.

    Images are resized with antialiasing, of a map the nearest label is taken. A second call with the same key and
    height opens the cache.

    Raises:
        DataError: a frame is unlike the first or its map, cannot be decoded, or the cache does not fit on the disk.
    """
    place = place_of(name, [frames.key, height], cache)
    paths, rows = (place / "images.npy", place / "labels.npy"), np.arange(frames.count)
    if all(path.exists() for path in paths):
        return Mapped(str(paths[0]), rows), Mapped(str(paths[1]), rows)
    wide, tall = _image(frames.image(0)).size
    width = max(1, round(wide * height / tall))
    about = {"of": name, "images": frames.count, "size": height}
    size = (wide, tall), width, height
    for path, shape, given, decode in (
            (paths[0], (frames.count, height, width, 3), frames.image, _Resized(name, *size)),
            (paths[1], (frames.count, height, width), frames.labels, _ResizedLabels(name, *size, frames.table))):
        if bad := pack(path, shape, given, decode, about):
            raise DataError(bad[min(bad)])
    return Mapped(str(paths[0]), rows), Mapped(str(paths[1]), rows)


def _image(given: Path | np.ndarray) -> "Image.Image":
    from PIL import Image

    return Image.fromarray(given) if isinstance(given, np.ndarray) else open_image(given).convert("RGB")
