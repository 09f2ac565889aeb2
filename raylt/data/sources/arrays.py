"""Data sets as arrays: `Source` is a data set before it is split, `Arrays` is the content of an npz file."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from raylt.data.images.cache import Stored, load, take
from raylt.data.images.decoding import eight_bits, read_npz
from raylt.data.sources.checks import SCOPE, Fault, check_clients, check_names, check_parts_fit, checked_labels
from raylt.errors import DataError, count_of

KEYS = "x_train", "y_train", "x_test", "y_test", "class_names"
CLIENTS = "id_train", "id_test", "client_names"

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
        notes: Remarks on the data for the user, in whole sentences.
    """

    x_train: Stored
    y_train: Stored
    x_test: Stored
    y_test: Stored
    class_names: tuple[str, ...]
    ids: np.ndarray | None = None
    test_ids: np.ndarray | None = None
    client_names: tuple[str, ...] | None = None
    notes: tuple[str, ...] = ()


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
    fault = partial(_malformed, path)
    entries = read_npz(path, (*KEYS, *CLIENTS))
    missing = [key for key in KEYS if key not in entries]
    if missing:
        raise fault(
            f"the file has no {', '.join(missing)}. Give {', '.join(KEYS)}; {', '.join(CLIENTS)} are optional.",
            missing[0],
        )
    class_names = _names(fault, "class_names", entries["class_names"])
    x = {}
    y = {}
    for part in ("train", "test"):
        x[part] = _checked_images(fault, f"x_{part}", entries[f"x_{part}"], depth)
        y[part] = checked_labels(fault, f"y_{part}", entries[f"y_{part}"], x[part].shape[:3], len(class_names))
    check_parts_fit(fault, x["train"], x["test"], y["train"], y["test"])
    ids, test_ids, names = map(entries.get, CLIENTS)
    client_names = None if names is None else _names(fault, "client_names", names)
    check_clients(fault, CLIENTS, ids, test_ids, client_names, (len(x["train"]), len(x["test"])))
    if client_names is None and ids is not None:
        client_names = _names_of(ids)
        check_names(fault, "id_train", client_names or ())
    types = {part: entries[f"x_{part}"].dtype.newbyteorder("=") for part in ("train", "test")}
    return Arrays(
        x_train=x["train"],
        y_train=y["train"],
        x_test=x["test"],
        y_test=y["test"],
        class_names=class_names,
        ids=ids,
        test_ids=test_ids,
        client_names=client_names,
        notes=() if depth is not None else (*_dark_notes(x, types), *_types_note(types)),
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


def _dark_notes(x: Mapping[str, np.ndarray], types: Mapping[str, np.dtype]) -> list[str]:
    """Return a notice for each part of other types than uint8 with images that use less than half of their range.

    At most 2,000 evenly spaced images are read.

    Args:
        x: uint8 [N, H, W, channels] by part, after scaling.
        types: Type of each part before scaling.
    """
    notes = []
    for part, images in x.items():
        sample = images[np.linspace(0, len(images) - 1, min(len(images), 2000)).astype(np.int64)]
        dark = int((sample.max((1, 2, 3)) <= 127).sum())
        if dark and types[part] != np.uint8:
            notes.append(
                f"{dark} of {count_of(len(sample), 'image')} of x_{part} use less than half of the full scale of "
                f"{types[part]}; set data.depth if they have fewer bits than their type"
            )
    return notes


def _types_note(types: Mapping[str, np.dtype]) -> list[str]:
    """Return a notice if the parts have different full scales."""
    scales = {np.iinfo(dtype).max if dtype.kind in "iu" else 1 for dtype in types.values()}
    if len(scales) == 1:
        return []
    return [
        f"x_train is {types['train']} and x_test is {types['test']}, and each has the full scale of its type; "
        "save both as one type if the same grey means the same in both"
    ]


def _malformed(path: Path, problem: str, array: str) -> DataError:
    return DataError(f"{path}: {problem}", code="data.malformed", path=str(path), array=array)


def _names_of(ids: np.ndarray) -> tuple[str, ...] | None:
    """Return the ids of clients as their names; None if the ids are 0, 1, 2 and so on."""
    unique_ids = np.unique(ids)
    if unique_ids.dtype.kind != "U" and np.array_equal(unique_ids, np.arange(len(unique_ids))):
        return None
    return tuple(unique_ids.astype(str).tolist())


def _names(fault: Fault, key: str, names: np.ndarray) -> tuple[str, ...]:
    if names.ndim != 1 or names.dtype.kind != "U" or not len(names):
        raise fault(f"{key} is {names.dtype} {list(names.shape)}. Give a one-dimensional array of strings.", key)
    check_names(fault, key, names.tolist())
    return tuple(names.tolist())


def _checked_images(fault: Fault, key: str, x: np.ndarray, depth: int | None) -> np.ndarray:
    if x.ndim < 3 or x.dtype.kind in "USO":
        raise fault(
            f"{key} is not an array of images ({x.dtype} {list(x.shape)}). {SCOPE}: give uint8 [N, H, W] or [N, H, W, "
            "channels].",
            key,
        )
    if x.dtype.kind not in "iuf" or x.ndim not in (3, 4) or not x.size or (x.ndim == 4 and x.shape[3] > 4):
        raise fault(
            f"{key} is {x.dtype} {list(x.shape)}. Give numbers [N, H, W] or [N, H, W, channels], best as uint8, with "
            "at least one image and at most 4 channels.",
            key,
        )
    if x.dtype != np.uint8:
        try:
            x = eight_bits(x, depth)
        except ValueError as error:
            raise fault(f"{key} is {x.dtype} and has {error}, or give uint8 values.", key) from None
    return x if x.ndim == 4 else x[..., None]
