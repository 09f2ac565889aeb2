"""Segmentation data sets: CamVid and Cityscapes from files, and generated shapes that need no files."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from raylt.data.images.cache import Mapped
from raylt.data.images.cache_builder import pack, place_of
from raylt.data.images.decoding import Undecodable, eight_bits, flat_image, open_image, read_npz
from raylt.data.images.image_files import shown_name
from raylt.data.images.image_trees import FORMAT, file_stamp
from raylt.data.label_maps import VOID
from raylt.data.sources.arrays import Arrays
from raylt.errors import DataError
from raylt.seeds import seed_for

if TYPE_CHECKING:
    from PIL import Image

CAMVID = ("sky", "building", "pole", "road", "pavement", "tree", "sign", "fence", "car", "pedestrian", "bicyclist")
SHAPES = ("sky", "ground", "disc", "square", "triangle", "cross")
SHAPES_SIZE, SHAPES_TRAIN, SHAPES_TEST = 64, 320, 80
# Probability that an image shows a disc, a square, a triangle or a cross: a long tail.
SHAPES_OFTEN = (0.8, 0.4, 0.2, 0.1)
COLOURS = {
    # from SegNet's pages and Cityscapes' scripts
    "camvid": (
        (128, 128, 128),
        (128, 0, 0),
        (192, 192, 128),
        (128, 64, 128),
        (60, 40, 222),
        (128, 128, 0),
        (192, 128, 128),
        (64, 64, 128),
        (64, 0, 128),
        (64, 64, 0),
        (0, 128, 192),
    ),
    "cityscapes": (
        (128, 64, 128),
        (244, 35, 232),
        (70, 70, 70),
        (102, 102, 156),
        (190, 153, 153),
        (153, 153, 153),
        (250, 170, 30),
        (220, 220, 0),
        (107, 142, 35),
        (152, 251, 152),
        (70, 130, 180),
        (220, 20, 60),
        (255, 0, 0),
        (0, 0, 142),
        (0, 0, 70),
        (0, 60, 100),
        (0, 80, 100),
        (0, 0, 230),
        (119, 11, 32),
    ),
}


def camvid(root: Path, height: int, depth: int | None = None) -> Arrays:
    """Open CamVid with 367 training and 233 test frames and 11 classes (Brostow et al., 2008; SegNet's split).

    The frames are read from `root`/camvid, in the layout of SegNet's tutorial ({train,test}/*.png, and
    {train,test}annot/*.png with class indices, where 11 is void), or from `root`/camvid.npz (x_*, y_*, seq_*). Ids are
    the recordings.

    Args:
        root: `data.root`.
        height: Height to which images are resized.
        depth: `data.depth`.

    Raises:
        DataError: Neither exists, or a file is malformed.
    """
    folder = root / "camvid"
    file = root / "camvid.npz"
    if folder.is_dir():
        train, ids = _camvid_files(folder, "train")
        test, _ = _camvid_files(folder, "test")
    elif file.is_file():
        train, ids = _camvid_arrays(file, "train")
        test, _ = _camvid_arrays(file, "test")
    else:
        raise DataError(
            f"data.source: neither {folder.resolve()} nor {file.resolve()} exists (camvid). Put SegNet's CamVid folder "
            "(train, trainannot, test, testannot) there, or set data.root to its folder.",
            code="data.not-found",
            key="data.source",
            value="camvid",
            path=str(folder),
        )
    return _decoded("camvid", train, test, height, depth, root, CAMVID, ids)


def cityscapes(root: Path, height: int, depth: int | None = None) -> Arrays:
    """Open Cityscapes with 2975 finely labelled training images and 19 classes.

    Its 500 validation images are the test set. torchvision reads the images from `root`/cityscapes (leftImg8bit and
    gtFine, or the two archives). Ids are cities.

    Args:
        root: `data.root`.
        height: Height to which images are resized.
        depth: `data.depth`.

    Raises:
        DataError: The data set is missing, or a file is malformed.
    """
    from torchvision.datasets import Cityscapes

    train, ids = _cityscapes_files(root / "cityscapes", "train")
    test, _ = _cityscapes_files(root / "cityscapes", "val")
    names = tuple(c.name for c in Cityscapes.classes if 0 <= c.train_id < VOID)
    return _decoded("cityscapes", train, test, height, depth, root, names, ids)


def shapes() -> Arrays:
    """Generate scenes from a fixed seed: ground and sky with discs, squares, triangles and, rarely, crosses.

    There are 320 and 80 images of 64x64 pixels; outlines are void. Light differs between four recordings, the ids.
    """
    rng = np.random.default_rng(seed_for(0, "shapes"))
    tints = rng.uniform(0.6, 1.2, (4, 3))
    ids = np.arange(SHAPES_TRAIN + SHAPES_TEST) % len(tints)
    scenes = [_draw(rng, tints[recording]) for recording in ids]
    x = np.stack([image for image, _ in scenes])
    y = np.stack([labels for _, labels in scenes])
    n = SHAPES_TRAIN
    return Arrays(x_train=x[:n], y_train=y[:n], x_test=x[n:], y_test=y[n:], class_names=SHAPES, ids=ids[:n])


@dataclass(frozen=True)
class Frames:
    """Images of one size with their label maps, before they are decoded.

    Args:
        key: JSON that identifies the frames; each key has its own cache.
        count: Number of frames, N, at least one.
        image: Row -> file of an image, or uint8 [H, W, 3].
        labels: Row -> file of a map, or integers [H, W].
        table: Class of each index in a map, uint8 [256].
    """

    key: Any
    count: int
    image: Callable[[int], Path | np.ndarray]
    labels: Callable[[int], Path | np.ndarray]
    table: np.ndarray


def decode_frames(
    name: str, frames: Frames, height: int, cache: Path, depth: int | None = None
) -> tuple[Mapped, Mapped]:
    """Decode frames to images uint8 [N, height, W, 3] and label maps uint8 [N, height, W].

    W keeps the aspect ratio of the first image. Images are resized with antialiasing, maps by nearest neighbour. A
    second call with the same key, height and depth opens the cache.

    Args:
        name: Prefix of the name of the cache's folder.
        frames: The frames.
        height: Height to which images are resized.
        cache: Folder of all caches.
        depth: `data.depth`.

    Raises:
        DataError: A frame differs in size from the first one or its map or cannot be decoded, or the cache does not fit
            on the disk.
    """
    folder = place_of(name, [frames.key, FORMAT, height, depth], cache)
    images = folder / "images.npy"
    labels = folder / "labels.npy"
    if not images.exists() or not labels.exists():
        wide, tall = _size(frames.image(0))
        width = max(1, round(wide * height / tall))
        about = {"of": name, "images": frames.count, "size": height}
        decode_image = _Resized(name, (wide, tall), width, height, depth)
        _pack(images, (frames.count, height, width, 3), frames.image, decode_image, about)
        decode_labels = _ResizedLabels((wide, tall), width, height, frames.table)
        _pack(labels, (frames.count, height, width), frames.labels, decode_labels, about)
    rows = np.arange(frames.count)
    return Mapped(str(images), rows), Mapped(str(labels), rows)


def _decoded(
    name: str,
    train: Frames,
    test: Frames,
    height: int,
    depth: int | None,
    root: Path,
    class_names: tuple[str, ...],
    ids: np.ndarray,
) -> Arrays:
    x_train, y_train = decode_frames(f"{name}-train", train, height, root / "cache", depth)
    x_test, y_test = decode_frames(f"{name}-test", test, height, root / "cache", depth)
    return Arrays(x_train=x_train, y_train=y_train, x_test=x_test, y_test=y_test, class_names=class_names, ids=ids)


def _pack(path: Path, shape: tuple[int, ...], given: Callable[[int], Any], decode: Any, about: dict[str, Any]) -> None:
    """Decode all rows of a cache array; raise an error if a row cannot be decoded."""
    bad = pack(path, shape, given, decode, about)
    if bad:
        row = min(bad)
        raise DataError(
            f"data.source: a frame of {about['of']} cannot be used: {bad[row]}. Replace or remove it.",
            code="data.undecodable",
            key="data.source",
            path=str(path),
            row=row,
        )


@dataclass(frozen=True)
class _Resized:
    """Picklable function that decodes an image and resizes it to height x width.

    Args:
        before: Required width and height of an image before resizing.
    """

    name: str
    before: tuple[int, int]
    width: int
    height: int
    depth: int | None

    def __call__(self, row: int, given: Path | np.ndarray) -> np.ndarray:
        from PIL import Image

        image = _image(given, self.depth, row)
        if image.size != self.before:
            raise Undecodable(
                _name("image", row, given),
                f"{_pixels(image.size)}, and the first image of {self.name} has {_pixels(self.before)}",
            )
        return np.asarray(image.resize((self.width, self.height), Image.Resampling.BILINEAR))


@dataclass(frozen=True, eq=False)
class _ResizedLabels:
    """Picklable function that decodes a label map and resizes it to height x width.

    Args:
        before: Required width and height of a map before resizing.
        table: Class of each index in a map, uint8 [256].
    """

    before: tuple[int, int]
    width: int
    height: int
    table: np.ndarray

    def __call__(self, row: int, given: Path | np.ndarray) -> np.ndarray:
        from PIL import Image

        labels = self.table[self._indices(row, given)]
        if labels.ndim != 2:
            raise Undecodable(
                _name("label map", row, given),
                f"shape {list(labels.shape)}, and each pixel needs one class index, not a colour",
            )
        if labels.shape[::-1] != self.before:
            size = _pixels(labels.shape[::-1])
            raise Undecodable(_name("label map", row, given), f"{size}, and its image has {_pixels(self.before)}")
        return np.asarray(Image.fromarray(labels).resize((self.width, self.height), Image.Resampling.NEAREST))

    def _indices(self, row: int, given: Path | np.ndarray) -> np.ndarray:
        """Return a label map as uint8 of any shape.

        Raises:
            Undecodable: The map has values other than whole numbers from 0 to 255.
        """
        values = given if isinstance(given, np.ndarray) else np.asarray(open_image(given))
        whole = values.dtype.kind in "biu"
        if whole and (not values.size or (values.min() >= 0 and values.max() <= 255)):
            return values.astype(np.uint8)
        largest = f"largest value {values.max()}" if values.dtype.kind in "iuf" and values.size else "no numbers"
        raise Undecodable(
            _name("label map", row, given), f"{values.dtype}, {largest}, instead of class indices from 0 to 255"
        )


def _name(what: str, row: int, given: Path | np.ndarray) -> str:
    """Return the file of an image or label map, or its number in an array, for an error."""
    return f"{what} {row}" if isinstance(given, np.ndarray) else shown_name(given)


def _pixels(size: tuple[int, ...]) -> str:
    """Return a width and a height as text."""
    return f"{size[0]}x{size[1]} pixels"


def _image(given: Path | np.ndarray, depth: int | None, row: int) -> "Image.Image":
    from PIL import Image

    if not isinstance(given, np.ndarray):
        return flat_image(given, depth).convert("RGB")
    try:
        pixels = given if given.dtype == np.uint8 else eight_bits(given, depth)
    except ValueError as error:
        raise Undecodable(_name("image", row, given), str(error)) from None
    return Image.fromarray(pixels).convert("RGB")


def _size(given: Path | np.ndarray) -> tuple[int, int]:
    """Return the width and height of an image."""
    return given.shape[1::-1] if isinstance(given, np.ndarray) else open_image(given).size


def _draw(rng: np.random.Generator, tint: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Draw one random scene; return its pixels and labels."""
    side = SHAPES_SIZE
    rows, columns = np.mgrid[:side, :side]
    labels = (rows > rng.uniform(0.3, 0.6) * side + rng.uniform(-0.2, 0.2) * (columns - side / 2)).astype(np.uint8)
    colours = np.array([(120, 160, 210), (110, 95, 70)])[labels]
    for shape, often in enumerate(SHAPES_OFTEN):
        if rng.random() >= often:
            continue
        size = rng.uniform(7, 13)
        top, left = rng.uniform(0.2 * side, 0.8 * side, 2)
        reach = _reach(shape, rows - top, columns - left)
        labels[reach < size + 1] = VOID
        labels[reach < size] = shape + 2
        colours = np.where((reach < size)[..., None], rng.uniform(30, 230, 3), colours)
    noisy = colours * tint + rng.normal(0, 12, (side, side, 3))
    return noisy.clip(0, 255).astype(np.uint8), labels


def _reach(shape: int, down: np.ndarray, across: np.ndarray) -> np.ndarray:
    """Return the smallest size at which a shape covers each pixel, given the pixel's offset from the centre."""
    far = np.maximum(abs(down), abs(across))
    near = np.minimum(abs(down), abs(across))
    match shape:
        case 0:  # disc
            return np.hypot(down, across)
        case 1:  # square
            return far * 1.1
        case 2:  # triangle
            return np.maximum(down * 1.3, (abs(across) * 1.8 - down) * 0.7)
        case _:  # cross
            return np.maximum(near * 3, far)


def _camvid_files(folder: Path, part: str) -> tuple[Frames, np.ndarray]:
    """Return the frames of one part of CamVid from image files, and the recording of each frame."""
    images = sorted((folder / part).glob("*.png"))
    labels = [folder / f"{part}annot" / file.name for file in images]
    missing = [file for file in labels if not file.is_file()]
    if not images or missing:
        problem = f"{missing[0]}: no such label map" if missing else f"{folder / part}: no frames"
        raise DataError(
            f"{problem}. Put frames at {part}/NAME.png and maps of class indices at {part}annot/NAME.png.",
            code="data.not-found",
            path=str(missing[0] if missing else folder / part),
        )
    # 0001TP_006690.png and 0016E5_01890.png begin with the recording
    recordings = np.array([file.name.partition("_")[0] for file in images])
    return _file_frames(folder, part, images, labels, _camvid_table()), recordings


def _camvid_arrays(path: Path, part: str) -> tuple[Frames, np.ndarray]:
    """Return the frames of one part of CamVid from an npz file, and the recording of each frame."""
    image_key, label_key, recording_key = (f"{name}_{part}" for name in ("x", "y", "seq"))

    def entries(keys: Sequence[str]) -> list[np.ndarray]:
        arrays = read_npz(path, keys)
        missing = [key for key in keys if key not in arrays]
        if missing:
            raise DataError(
                f"{path}: the file has no {' and no '.join(missing)}. Give {image_key}, {label_key}, {recording_key}.",
                code="data.malformed",
                path=str(path),
                array=missing[0],
            )
        return [arrays[key] for key in keys]

    @cache  # called only if the cache of decoded images is missing
    def pixels() -> list[np.ndarray]:
        return entries((image_key, label_key))

    (recordings,) = entries((recording_key,))
    stat = path.stat()
    frames = Frames(
        key=[path.resolve().as_posix(), stat.st_size, stat.st_mtime_ns, part],
        count=len(recordings),
        image=lambda row: pixels()[0][row],
        labels=lambda row: pixels()[1][row],
        table=_camvid_table(),
    )
    return frames, recordings


def _camvid_table() -> np.ndarray:
    table = np.full(256, VOID, dtype=np.uint8)
    table[: len(CAMVID)] = np.arange(len(CAMVID))
    return table


def _cityscapes_files(folder: Path, split: str) -> tuple[Frames, np.ndarray]:
    """Return the frames of one part of Cityscapes, and the city of each frame."""
    from torchvision.datasets import Cityscapes

    try:
        listing = Cityscapes(str(folder), split=split, mode="fine", target_type="semantic")
    except (RuntimeError, OSError) as error:
        raise DataError(
            f"data.source: no intact copy of cityscapes under {folder.resolve()} ({' '.join(str(error).split())}). Its "
            "licence forbids redistribution: get leftImg8bit_trainvaltest.zip and gtFine_trainvaltest.zip from "
            "cityscapes-dataset.com and put them there.",
            code="data.not-found",
            key="data.source",
            value="cityscapes",
            path=str(folder),
        ) from None
    images = [Path(file) for file in listing.images]
    labels = [Path(targets[0]) for targets in listing.targets]
    if not images:
        raise DataError(
            f"{folder / 'leftImg8bit' / split}: no images. Unpack the archives completely.",
            code="data.not-found",
            path=str(folder / "leftImg8bit" / split),
        )
    table = np.full(256, VOID, dtype=np.uint8)  # maps ids 0..33 to training ids, many of which are 255
    for c in Cityscapes.classes:
        if c.id >= 0:
            table[c.id] = c.train_id
    frames = _file_frames(folder, split, images, labels, table)
    return frames, np.array([file.parent.name for file in images])


def _file_frames(folder: Path, part: str, images: list[Path], labels: list[Path], table: np.ndarray) -> Frames:
    """Return frames of files. The key contains the files' sizes and times, so replaced files are decoded again."""
    stamps = [[(file.name, *file_stamp(file)) for file in files] for files in (images, labels)]
    key = [folder.resolve().as_posix(), part, *stamps]
    return Frames(key, len(images), lambda row: images[row], lambda row: labels[row], table)
