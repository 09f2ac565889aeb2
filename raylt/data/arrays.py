"""`Arrays`: a data set as its arrays, and the npz file that holds them (`data.source=npz:PATH`)."""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from raylt.data.cache import Stored
from raylt.data.decoding import read_npz
from raylt.data.maps import VOID
from raylt.errors import DataError

KEYS = "x_train", "y_train", "x_test", "y_test", "class_names"
CLIENTS = "id_train", "id_test", "client_names"


class Arrays(NamedTuple):
    """Images uint8 [N, H, W, channels], labels int64 [N] or label maps uint8 [N, H, W], class names; and where they are
    recorded, an id of each training and of each test image, and a name for each different id, in their order."""

    x_train: Stored
    y_train: Stored
    x_test: Stored
    y_test: Stored
    class_names: tuple[str, ...]
    ids: np.ndarray | None = None
    test_ids: np.ndarray | None = None
    client_names: tuple[str, ...] | None = None


def arrays(path: Path) -> Arrays:
    """The data set in an npz file of the arrays KEYS and, where it is recorded whose each sample is, of CLIENTS.

    Raises:
        DataError: the file cannot be read, or its arrays are not there or do not fit each other.
    """
    entries = read_npz(path, (*KEYS, *CLIENTS))
    missing = [key for key in KEYS if key not in entries]
    if missing:
        raise DataError(f"{path}: has no {', '.join(missing)}; {', '.join(KEYS)} are expected, "
                        f"{', '.join(CLIENTS)} are optional")
    names = _checked_names(path, "class_names", entries["class_names"])
    x, y = {}, {}
    for part in ("train", "test"):
        x[part] = _checked_images(path, f"x_{part}", entries[f"x_{part}"])
        y[part] = _checked_labels(path, f"y_{part}", entries[f"y_{part}"], x[part].shape[:3], len(names))
    if y["train"].ndim != y["test"].ndim:
        raise DataError(f"{path}: y_train is {list(y['train'].shape)} and y_test {list(y['test'].shape)}; both must be "
                        "labels of images or both label maps")
    if x["train"].shape[1:] != x["test"].shape[1:]:
        raise DataError(f"{path}: images of x_train are {list(x['train'].shape[1:])}, of x_test "
                        f"{list(x['test'].shape[1:])}; they must be alike")
    return Arrays(x["train"], y["train"], x["test"], y["test"], tuple(names.tolist()), *_clients(path, entries, y))


def _clients(path: Path, entries: dict[str, np.ndarray], y: dict[str, np.ndarray]) -> tuple[
        np.ndarray | None, np.ndarray | None, tuple[str, ...] | None]:
    """Ids of training and test images, and names of the different ones."""
    ids, test_ids, names = (entries.get(key) for key in CLIENTS)
    for key, part in zip(CLIENTS, ("train", "test"), strict=False):
        if key in entries and entries[key].shape != y[part].shape[:1]:
            raise DataError(f"{path}: {key} is {list(entries[key].shape)}; one id for each of the {len(y[part])} "
                            f"{part}{'ing' * (part == 'train')} images is expected")
    for key, each in (("id_train", ids), ("id_test", test_ids)):
        if each is not None and each.dtype.kind not in "iuU":
            raise DataError(f"{path}: {key} is {each.dtype}; integers or strings are expected"
                            + "; .astype(str) makes strings of bytes" * (each.dtype.kind == "S"))
    if ids is None:
        if test_ids is not None or names is not None:
            raise DataError(f"{path}: has no id_train; id_test and client_names are of the ids that it records")
        return None, None, None
    known = np.unique(ids)
    if test_ids is not None and len(more := np.setdiff1d(test_ids, known)):
        raise DataError(f"{path}: id_test holds {more[0].item()!r}, which id_train does not hold; every client "
                        "needs training images")
    if names is not None and len(_checked_names(path, "client_names", names)) != len(known):
        raise DataError(f"{path}: client_names has {len(names)} names; one for each of the {len(known)} different ids "
                        "of id_train is expected, in their sorted order")
    if names is None and known.dtype.kind == "U":
        names = _checked_names(path, "id_train", known)
    elif names is None and not np.array_equal(known, np.arange(len(known))):
        names = known.astype(str)           # numbered as they are, not anew
    return ids, test_ids, None if names is None else tuple(names.tolist())


def _checked_names(path: Path, key: str, names: np.ndarray) -> np.ndarray:
    if names.ndim != 1 or names.dtype.kind != "U" or not len(names):
        raise DataError(f"{path}: {key} is {names.dtype} {list(names.shape)}; a row of strings is expected")
    if strange := [name for name in names.tolist() if not name.strip() or not name.isprintable()]:
        raise DataError(f"{path}: {key} has the name {strange[0]!a}, which cannot be shown; rename it")
    if len(np.unique(names)) != len(names):
        raise DataError(f"{path}: {key} has a name twice; give each its own")
    return names


def _checked_images(path: Path, key: str, x: np.ndarray) -> np.ndarray:
    if x.dtype != np.uint8 or x.ndim not in (3, 4) or not x.size or (x.ndim == 4 and x.shape[3] > 4):
        raise DataError(f"{path}: {key} is {x.dtype} {list(x.shape)}; uint8 [N, H, W] or [N, H, W, channels] with at "
                        "least one image and at most 4 channels is expected")
    return x if x.ndim == 4 else x[..., None]


def _checked_labels(path: Path, key: str, y: np.ndarray, images: tuple[int, ...], classes: int) -> np.ndarray:
    maps = y.dtype == np.uint8 and y.shape == images
    if not maps and (y.dtype.kind not in "iu" or y.shape != images[:1]):
        raise DataError(f"{path}: {key} is {y.dtype} {list(y.shape)}; one integer label for each of the {images[0]} "
                        f"images is expected, or label maps uint8 {list(images)}")
    found = y[y != VOID] if maps else y
    if found.size and (found.min() < 0 or found.max() >= classes):
        raise DataError(f"{path}: {key} holds labels from {found.min()} to {found.max()}; class_names has {classes} "
                        f"names, so 0 to {classes - 1} is expected" + f", or {VOID} for none" * maps)
    if maps and not found.size:
        raise DataError(f"{path}: {key} has no labelled pixel, all are {VOID}; give maps with labels")
    return y if maps else y.astype(np.int64)
