"""Pictures of one size with their label maps, decoded once."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from raylt.data.cache import Mapped
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

    place = place_of(name, [frames.key, height], cache)
    paths, rows = (place / "images.npy", place / "labels.npy"), np.arange(frames.count)
    if all(path.exists() for path in paths):
        return Mapped(str(paths[0]), rows), Mapped(str(paths[1]), rows)
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

    about = {"of": name, "images": frames.count, "size": height}
    for path, shape, decode in ((paths[0], (frames.count, height, width, 3), image),
                                (paths[1], (frames.count, height, width), labels)):
        if bad := pack(path, shape, decode, about):
            raise DataError(bad[min(bad)])
    return Mapped(str(paths[0]), rows), Mapped(str(paths[1]), rows)
