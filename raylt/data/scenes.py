"""Data sets whose labels are maps: CamVid and Cityscapes as they lie on disk, and drawn shapes that need no files."""

from functools import cache
from pathlib import Path

import numpy as np

from raylt.data.arrays import Arrays
from raylt.data.decoding import read_npz
from raylt.data.frames import Frames, decode_frames
from raylt.data.maps import VOID
from raylt.errors import DataError
from raylt.seeds import seed_for

CAMVID = ("sky", "building", "pole", "road", "pavement", "tree", "sign", "fence", "car", "pedestrian", "bicyclist")
SHAPES = ("sky", "ground", "disc", "square", "triangle", "cross")
SHAPES_SIZE, SHAPES_TRAIN, SHAPES_TEST = 64, 320, 80
# how often an image shows each of disc, square, triangle, cross: a long tail
SHAPES_OFTEN = (0.8, 0.4, 0.2, 0.1)
COLOURS = {
    # of SegNet's pages, and of Cityscapes' scripts
    "camvid": ((128, 128, 128), (128, 0, 0), (192, 192, 128), (128, 64, 128), (60, 40, 222), (128, 128, 0),
               (192, 128, 128), (64, 64, 128), (64, 0, 128), (64, 64, 0), (0, 128, 192)),
    "cityscapes": ((128, 64, 128), (244, 35, 232), (70, 70, 70), (102, 102, 156), (190, 153, 153), (153, 153, 153),
                   (250, 170, 30), (220, 220, 0), (107, 142, 35), (152, 251, 152), (70, 130, 180), (220, 20, 60),
                   (255, 0, 0), (0, 0, 142), (0, 0, 70), (0, 60, 100), (0, 80, 100), (0, 0, 230), (119, 11, 32)),
}


def camvid(root: Path, height: int) -> Arrays:
    """CamVid's 367 training and 233 test frames with 11 classes (Brostow et al., 2008, as SegNet divided them).

    Read from `root`/camvid as SegNet's tutorial distributes it ({train,test}/*.png, {train,test}annot/*.png of class
    indices, 11 is void), or from `root`/camvid.npz (x_*, y_*, seq_train). Ids are the recordings.

    Args:
        height: that frames are resized to.

    Raises:
        DataError: neither is there, or files are missing or malformed.
    """
    folder, file = root / "camvid", root / "camvid.npz"
    if folder.is_dir():
        (train, ids), (test, _) = (_camvid_files(folder, part) for part in ("train", "test"))
    elif file.is_file():
        (train, ids), (test, _) = (_camvid_arrays(file, part) for part in ("train", "test"))
    else:
        raise DataError(f"data.source = camvid: neither {folder.resolve()} nor {file.resolve()} is there; put SegNet's "
                        "CamVid folder (train, trainannot, test, testannot) there, or set data.root to where it is")
    x, y = decode_frames("camvid-train", train, height, root / "cache")
    return Arrays(x, y, *decode_frames("camvid-test", test, height, root / "cache"), CAMVID, ids)


def cityscapes(root: Path, height: int) -> Arrays:
    """Cityscapes' 2975 finely labelled training images and its 500 validation images as test set, 19 classes.

    Read by torchvision's loader from `root`/cityscapes (leftImg8bit and gtFine, or the two archives). Ids are cities.

    Args:
        height: that images are resized to.

    Raises:
        DataError: it is not there, or files are malformed.
    """
    from torchvision.datasets import Cityscapes

    train, ids = _cityscapes_files(root / "cityscapes", "train")
    test, _ = _cityscapes_files(root / "cityscapes", "val")
    x, y = decode_frames("cityscapes-train", train, height, root / "cache")
    names = tuple(c.name for c in Cityscapes.classes if 0 <= c.train_id < VOID)
    return Arrays(x, y, *decode_frames("cityscapes-test", test, height, root / "cache"), names, ids)


def shapes() -> Arrays:
    """Drawn scenes that are the same everywhere: ground under sky, with discs, squares, triangles and, rarely, crosses.

    64x64 pixels, 320 and 80 images; outlines are void. Light differs between four recordings, the ids.
    """
    rng = np.random.default_rng(seed_for(0, "shapes"))
    tints = rng.uniform(0.6, 1.2, (4, 3))
    of = np.arange(SHAPES_TRAIN + SHAPES_TEST) % len(tints)
    drawn = [_draw(rng, tints[recording]) for recording in of]
    x, y = np.stack([image for image, _ in drawn]), np.stack([labels for _, labels in drawn])
    n = SHAPES_TRAIN
    return Arrays(x[:n], y[:n], x[n:], y[n:], SHAPES, of[:n])


def _draw(rng: np.random.Generator, tint: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    side = SHAPES_SIZE
    rows, columns = np.mgrid[:side, :side]
    labels = (rows > rng.uniform(0.3, 0.6) * side + rng.uniform(-0.2, 0.2) * (columns - side / 2)).astype(np.uint8)
    colours = np.array([(120, 160, 210), (110, 95, 70)])[labels]
    for shape, often in enumerate(SHAPES_OFTEN):
        if rng.random() >= often:
            continue
        size, top, left = rng.uniform(7, 13), *rng.uniform(0.2 * side, 0.8 * side, 2)
        down, across = rows - top, columns - left
        far, near = np.maximum(abs(down), abs(across)), np.minimum(abs(down), abs(across))
        reach = (np.hypot(down, across),                                            # disc
                 far * 1.1,                                                         # square
                 np.maximum(down * 1.3, (abs(across) * 1.8 - down) * 0.7),          # triangle
                 np.maximum(near * 3, far))[shape]                                  # cross
        labels[reach < size + 1] = VOID
        labels[reach < size] = shape + 2
        colours = np.where((reach < size)[..., None], rng.uniform(30, 230, 3), colours)
    noisy = colours * tint + rng.normal(0, 12, (side, side, 3))
    return noisy.clip(0, 255).astype(np.uint8), labels


def _camvid_files(folder: Path, part: str) -> tuple[Frames, np.ndarray]:
    images = sorted((folder / part).glob("*.png"))
    labels = [folder / f"{part}annot" / file.name for file in images]
    missing = [file for file in labels if not file.is_file()]
    if not images or missing:
        raise DataError(f"{missing[0] if missing else folder / part}: no {'such label map' if missing else 'frames'}; "
                        f"{part}/NAME.png and {part}annot/NAME.png of class indices are expected")
    key = [folder.resolve().as_posix(), part, [file.name for file in images]]
    # 0001TP_006690.png and 0016E5_01890.png begin with the recording
    return _files(key, images, labels, _camvid_table()), np.array([file.name.partition("_")[0] for file in images])


def _camvid_arrays(path: Path, part: str) -> tuple[Frames, np.ndarray]:
    needed = [f"{what}_{part}" for what in ("x", "y", "seq")]
    recordings = read_npz(path, needed[2:]).get(needed[2])
    if recordings is None:
        raise DataError(f"{path}: has no {needed[2]}; {', '.join(needed)} are expected")

    @cache              # read only when there is no cache of decoded images yet
    def arrays() -> tuple[np.ndarray, np.ndarray]:
        found = read_npz(path, needed[:2])
        if len(found) < 2:
            raise DataError(f"{path}: has no {' or no '.join(set(needed[:2]) - set(found))}; {', '.join(needed)} are "
                            "expected")
        return found[needed[0]], found[needed[1]]

    stat = path.stat()
    return Frames([path.resolve().as_posix(), stat.st_size, stat.st_mtime_ns, part], len(recordings),
                  lambda row: arrays()[0][row], lambda row: arrays()[1][row], _camvid_table()), recordings


def _camvid_table() -> np.ndarray:
    table = np.full(256, VOID, dtype=np.uint8)
    table[:len(CAMVID)] = np.arange(len(CAMVID))
    return table


def _cityscapes_files(folder: Path, split: str) -> tuple[Frames, np.ndarray]:
    from torchvision.datasets import Cityscapes

    try:
        found = Cityscapes(str(folder), split=split, mode="fine", target_type="semantic")
    except (RuntimeError, OSError) as error:
        raise DataError(
            f"data.source = cityscapes: no intact copy under {folder.resolve()} ({' '.join(str(error).split())}); its "
            "licence lets nobody pass it on: get leftImg8bit_trainvaltest.zip and gtFine_trainvaltest.zip from "
            "cityscapes-dataset.com and put them there") from None
    images, labels = [Path(file) for file in found.images], [Path(of[0]) for of in found.targets]
    if not images:
        raise DataError(f"{folder / 'leftImg8bit' / split}: no images; unpack the archives completely")
    table = np.full(256, VOID, dtype=np.uint8)          # from ids 0..33, most of which have the training id 255
    for c in Cityscapes.classes:
        if c.id >= 0:
            table[c.id] = c.train_id
    key = [folder.resolve().as_posix(), split, [file.name for file in images]]
    return _files(key, images, labels, table), np.array([file.parent.name for file in images])


def _files(key: list[object], images: list[Path], labels: list[Path], table: np.ndarray) -> Frames:
    return Frames(key, len(images), lambda row: images[row], lambda row: labels[row], table)
