"""Data sets as arrays: `Source` is a data set before it is split, `Arrays` is the content of an npz file."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from raylt.data.images.cache import Stored, load, take
from raylt.data.images.decoding import eight_bits, read_npz
from raylt.data.label_maps import VOID
from raylt.errors import DataError

KEYS = "x_train", "y_train", "x_test", "y_test", "class_names"
CLIENTS = "id_train", "id_test", "client_names"

SCOPE = "raylt does image classification and segmentation"  # part of messages about other problems

Channels = tuple[float, ...]
#: The problem of a task: one class for each image, or a label map.
ProblemKind = Literal["classification", "segmentation"]

# Published mean and standard deviation of each channel.
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CIFAR = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)  # CReFF's code uses them for CIFAR-100 too
PUBLISHED = {
    "cifar10": CIFAR,
    "cifar100": CIFAR,
    "fashion_mnist": ((0.2860,), (0.3530,)),
    "cinic10": ((0.47889522, 0.47227842, 0.43047404), (0.24205776, 0.23828046, 0.25874835)),
    "imagenet_lt": IMAGENET,
    "camvid": IMAGENET,  # so that weights from ImageNet see the distribution of their training
    "cityscapes": IMAGENET,
}


@dataclass(frozen=True, eq=False)
class Source:
    """A data set before it is made long-tailed and partitioned.

    Without test samples, a part of each id's training samples becomes the test set, see `raylt.data.task`.

    Args:
        name: Name of the data set.
        x_train, x_test: Images uint8 [N, H, W, channels].
        y_train, y_test: Labels int64 [N] in [0, C), or label maps uint8 [N, H, W] in [0, C) or VOID.
        class_names: C names.
        mean, std: Mean and standard deviation per channel, for pixels in [0, 1].
        ids: Recorded id of each training sample, [N]; None if the source records no ids.
        test_ids: Recorded id of each test sample, from the same ids as `ids`.
        client_names: Names of the different ids, in the sorted order of the ids.
        notes: Remarks on the data for the user, in whole sentences.
    """

    name: str
    x_train: Stored
    y_train: Stored
    x_test: Stored
    y_test: Stored
    class_names: tuple[str, ...]
    mean: Channels
    std: Channels
    ids: np.ndarray | None = None
    test_ids: np.ndarray | None = None
    client_names: tuple[str, ...] | None = None
    notes: tuple[str, ...] = ()

    @property
    def kind(self) -> ProblemKind:
        """Return the kind of problem, classification or segmentation, that the labels belong to."""
        return "classification" if len(self.y_train.shape) == 1 else "segmentation"

    @property
    def strata(self) -> np.ndarray:
        """Return each training sample's stratum for a validation set, int64 [N]: its class, or 0 for label maps."""
        return load(self.y_train) if self.kind == "classification" else np.zeros(len(self.y_train), dtype=np.int64)


class Arrays(NamedTuple):
    """The images, labels, class names and client ids of a data set, as an npz file stores them.

    Attributes:
        x_train, x_test: Images uint8 [N, H, W, channels].
        y_train, y_test: Labels int64 [N], or label maps uint8 [N, H, W].
        class_names: C names.
        ids: Recorded id of each training image; None if the source records no ids.
        test_ids: Recorded id of each test image.
        client_names: Names of the different ids, in the sorted order of the ids.
    """

    x_train: Stored
    y_train: Stored
    x_test: Stored
    y_test: Stored
    class_names: tuple[str, ...]
    ids: np.ndarray | None = None
    test_ids: np.ndarray | None = None
    client_names: tuple[str, ...] | None = None


def read_arrays(path: Path, depth: int | None = None) -> Arrays:
    """Read a data set from an npz file (`data.source=npz:PATH`).

    The file has the arrays KEYS and, if it records the client of each sample, CLIENTS. Images of other types than uint8
    are scaled by `eight_bits`.

    Args:
        path: Path of the file.
        depth: `data.depth`.

    Raises:
        DataError: The file cannot be read, or its arrays are missing or do not fit each other.
    """
    entries = read_npz(path, (*KEYS, *CLIENTS))
    missing = [key for key in KEYS if key not in entries]
    if missing:
        raise _malformed(
            path,
            f"the file has no {', '.join(missing)}. Give {', '.join(KEYS)}; {', '.join(CLIENTS)} are optional.",
            missing[0],
        )
    names = _checked_names(path, "class_names", entries["class_names"])
    x = {}
    y = {}
    for part in ("train", "test"):
        x[part] = _checked_images(path, f"x_{part}", entries[f"x_{part}"], depth)
        y[part] = _checked_labels(path, f"y_{part}", entries[f"y_{part}"], x[part].shape[:3], len(names))
    if y["train"].ndim != y["test"].ndim:
        raise _malformed(
            path,
            f"y_train is {list(y['train'].shape)} and y_test {list(y['test'].shape)}. Give labels of images in both, "
            "or label maps in both.",
            "y_test",
        )
    if x["train"].shape[1:] != x["test"].shape[1:]:
        raise _malformed(
            path,
            f"images of x_train are {list(x['train'].shape[1:])}, images of x_test {list(x['test'].shape[1:])}. "
            "Give images of one shape.",
            "x_test",
        )
    ids, test_ids, client_names = _checked_clients(path, entries, len(y["train"]), len(y["test"]))
    return Arrays(
        x_train=x["train"],
        y_train=y["train"],
        x_test=x["test"],
        y_test=y["test"],
        class_names=tuple(names.tolist()),
        ids=ids,
        test_ids=test_ids,
        client_names=client_names,
    )


def channel_statistics(x: Stored) -> tuple[Channels, Channels]:
    """Compute mean and standard deviation per channel of pixels in [0, 1].

    At most 2,000 evenly spaced mapped images are read. A constant channel gets the deviation of one grey level, so that
    a division by it is safe.
    """
    if not isinstance(x, np.ndarray):
        x = load(take(x, np.linspace(0, len(x) - 1, min(len(x), 2000)).astype(np.int64)))
    levels = np.arange(256) / 255
    parts = np.array_split(x, 1 + len(x) // 4096)
    mean = []
    std = []
    for channel in range(x.shape[3]):
        # a histogram is exact and needs no float copy of the images
        counts = sum(np.bincount(part[..., channel].ravel(), minlength=256) for part in parts)
        share = counts / x[..., 0].size
        mean.append(float(levels @ share))
        std.append(max(float(np.sqrt((levels - mean[-1]) ** 2 @ share)), 1 / 255))
    return tuple(mean), tuple(std)


def _malformed(path: Path, problem: str, array: str) -> DataError:
    return DataError(f"{path}: {problem}", code="data.malformed", path=str(path), array=array)


def _checked_clients(
    path: Path, entries: dict[str, np.ndarray], training: int, tests: int
) -> tuple[np.ndarray | None, np.ndarray | None, tuple[str, ...] | None]:
    """Return the client ids of training and test images as numbers, and the name of each distinct id.

    Args:
        training: Number of training images.
        tests: Number of test images.
    """
    ids = _checked_ids(path, "id_train", entries.get("id_train"), training)
    test_ids = _checked_ids(path, "id_test", entries.get("id_test"), tests)
    names = entries.get("client_names")
    if ids is None:
        if test_ids is not None or names is not None:
            extra = "id_test" if test_ids is not None else "client_names"
            raise _malformed(path, f"{extra} needs id_train, which is missing. Add id_train.", "id_train")
        return None, None, None
    unique_ids = np.unique(ids)
    if test_ids is not None:
        untrained = np.setdiff1d(test_ids, unique_ids)
        if len(untrained):
            raise _malformed(
                path,
                f"id_test has an id that is not in id_train ({untrained[0].item()!r}). Give every client training "
                "images.",
                "id_test",
            )
    if names is not None and len(_checked_names(path, "client_names", names)) != len(unique_ids):
        raise _malformed(
            path,
            f"client_names has {len(names)} names for {len(unique_ids)} different ids in id_train. Give one name for "
            "each id, in the sorted order of the ids.",
            "client_names",
        )
    if names is None and unique_ids.dtype.kind == "U":
        names = _checked_names(path, "id_train", unique_ids)
    elif names is None and not np.array_equal(unique_ids, np.arange(len(unique_ids))):
        names = unique_ids.astype(str)  # clients keep their recorded numbers
    return ids, test_ids, None if names is None else tuple(names.tolist())


def _checked_ids(path: Path, key: str, ids: np.ndarray | None, images: int) -> np.ndarray | None:
    if ids is None:
        return None
    if ids.shape != (images,):
        raise _malformed(path, f"{key} is {list(ids.shape)}. Give one id for each of the {images} images.", key)
    if ids.dtype.kind not in "iuU":
        hint = " (.astype(str) converts bytes)" if ids.dtype.kind == "S" else ""
        raise _malformed(path, f"{key} is {ids.dtype}. Give integers or strings{hint}.", key)
    return ids


def _checked_names(path: Path, key: str, names: np.ndarray) -> np.ndarray:
    if names.ndim != 1 or names.dtype.kind != "U" or not len(names):
        raise _malformed(
            path, f"{key} is {names.dtype} {list(names.shape)}. Give a one-dimensional array of strings.", key
        )
    unprintable = [name for name in names.tolist() if not name.strip() or not name.isprintable()]
    if unprintable:
        raise _malformed(path, f"{key} has a name that cannot be printed ({unprintable[0]!a}). Rename it.", key)
    distinct, counts = np.unique(names, return_counts=True)
    if counts.max() > 1:
        raise _malformed(
            path,
            f"{key} has a name twice ({str(distinct[counts > 1][0])!r}). Give each class or client its own name.",
            key,
        )
    return names


def _check_problem(path: Path, key: str, y: np.ndarray, images: tuple[int, ...]) -> None:
    """Raise an error if the labels belong to a problem that raylt does not support.

    Raises:
        DataError: The labels are floats, as in regression, or each image has several labels.
    """
    several = y.ndim == 2 and len(images) == 3 and y.shape[0] == images[0] and y.shape[1:] != (1,)
    if y.dtype.kind == "f" or (several and y.dtype.kind in "iub"):
        problem = "several labels for each image" if several else "floating-point numbers"
        raise _malformed(
            path, f"{key} is {y.dtype} {list(y.shape)}, {problem}. {SCOPE}: give one class for each image.", key
        )


def _checked_images(path: Path, key: str, x: np.ndarray, depth: int | None) -> np.ndarray:
    if x.ndim < 3 or x.dtype.kind in "USO":
        raise _malformed(
            path,
            f"{key} is not an array of images ({x.dtype} {list(x.shape)}). {SCOPE}: give uint8 [N, H, W] or [N, H, W, "
            "channels].",
            key,
        )
    if x.dtype.kind not in "iuf" or x.ndim not in (3, 4) or not x.size or (x.ndim == 4 and x.shape[3] > 4):
        raise _malformed(
            path,
            f"{key} is {x.dtype} {list(x.shape)}. Give numbers [N, H, W] or [N, H, W, channels], best as uint8, with "
            "at least one image and at most 4 channels.",
            key,
        )
    if x.dtype != np.uint8:
        try:
            x = eight_bits(x, depth)
        except ValueError as error:
            raise _malformed(path, f"{key} is {x.dtype} and has {error}, or give uint8 values.", key) from None
    return x if x.ndim == 4 else x[..., None]


def _checked_labels(path: Path, key: str, y: np.ndarray, images: tuple[int, ...], classes: int) -> np.ndarray:
    maps = y.dtype == np.uint8 and y.shape == images
    _check_problem(path, key, y, images)
    if not maps and (y.dtype.kind not in "iu" or y.shape != images[:1]):
        raise _malformed(
            path,
            f"{key} is {y.dtype} {list(y.shape)}. Give one integer label for each of the {images[0]} images, or label "
            f"maps uint8 {list(images)}.",
            key,
        )
    labels = y[y != VOID] if maps else y
    if labels.size and (labels.min() < 0 or labels.max() >= classes):
        void = f", or {VOID} for no class" if maps else ""
        raise _malformed(
            path,
            f"{key} has labels from {labels.min()} to {labels.max()}, class_names has {classes} names. Give labels "
            f"from 0 to {classes - 1}{void}.",
            key,
        )
    if maps and not labels.size:
        raise _malformed(path, f"{key} has no labelled pixel, all are {VOID}. Give maps with labels.", key)
    return y if maps else y.astype(np.int64)
