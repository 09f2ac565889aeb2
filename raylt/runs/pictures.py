"""Image files as a model takes them: decoded as its training images were."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from raylt.data.decoding import NO_IMAGE, REMEDY, Fit, fitted_image, open_image
from raylt.errors import DataError


def read_pictures(files: Sequence[Path], shape: tuple[int, int, int], fit: Fit) -> np.ndarray:
    """Image files, uint8 [n, H, W, channels].

    Args:
        shape: height, width and channels of what the model takes.
        fit: how an image is brought to that size, see `fitted_image`.

    Raises:
        DataError: some cannot be decoded; names them all.
    """
    pictures, faults = try_pictures(files, shape, fit)
    if faults:
        raise DataError(told_of(list(faults.values())))
    return pictures


def try_pictures(files: Sequence[Path], shape: tuple[int, int, int], fit: Fit) -> tuple[np.ndarray, dict[int, str]]:
    """Those that can be decoded, in order; and by their places among the files, why the others cannot."""
    pictures, faults = [], dict[int, str]()
    for place, file in enumerate(files):
        try:
            pictures.append(_read(file, shape, fit))
        except DataError as error:
            faults[place] = str(error)
    return np.stack(pictures) if pictures else np.zeros((0, *shape), np.uint8), faults


def told_of(faults: Sequence[str]) -> str:
    """All images that cannot be decoded in one line, as where a data set is read."""
    reasons = [reason.removesuffix(REMEDY).replace(NO_IMAGE, "") for reason in faults]
    return f"{len(reasons)} images cannot be decoded: {'; '.join(reasons)}{REMEDY.replace('it', 'them')}"


def _read(file: Path, shape: tuple[int, int, int], fit: Fit) -> np.ndarray:
    from PIL import Image, ImageOps

    height, width, channels = shape
    if channels not in (1, 3):
        raise DataError(f"{file}: the model takes images of {channels} channels, which no image file has; give its "
                        "arrays to raylt.load_model(...).predict")
    if height == width:
        return fitted_image(file, height, channels, fit)
    image = open_image(file).convert("L" if channels == 1 else "RGB")
    return np.asarray(ImageOps.fit(image, (width, height), Image.Resampling.BILINEAR)).reshape(shape)
