"""Checks of the arrays of a data set: of npz files, of torchvision's files and of a user's own sources.

A check raises the error that its argument `fault` makes of a problem, with the remedy, and the name of the faulty part.
"""

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from raylt.data.images.cache import Stored, load
from raylt.data.label_maps import VOID, label_chunks
from raylt.errors import DataError

SCOPE = "raylt does image classification and segmentation"  # part of messages about other problems

Fault = Callable[[str, str], DataError]


def check_names(fault: Fault, key: str, names: Sequence[str]) -> None:
    """Raise an error if a name of a class or client cannot be printed or is there twice."""
    unprintable = [name for name in names if not name.strip() or not name.isprintable()]
    if unprintable:
        raise fault(f"{key} has a name that cannot be printed ({unprintable[0]!a}). Rename it.", key)
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise fault(f"{key} has a name twice ({min(twice)!r}). Give each class or client its own name.", key)


def checked_labels(fault: Fault, key: str, y: Stored, images: tuple[int, ...], classes: int) -> Stored:
    """Return labels as int64 [N], or label maps as they are.

    Args:
        fault: Makes the error.
        key: Name of the labels.
        y: Integers [N], or label maps uint8 [N, H, W].
        images: Number, height and width of the images.
        classes: Number of classes.

    Raises:
        DataError: The labels do not fit the images, or are outside of the classes.
    """
    maps = y.dtype == np.uint8 and y.shape == images
    _check_problem(fault, key, y, images)
    if not maps and (y.dtype.kind not in "iu" or y.shape != images[:1]):
        raise fault(
            f"{key} is {y.dtype} {list(y.shape)}. Give one integer label for each of the {images[0]} images, or label "
            f"maps uint8 {list(images)}.",
            key,
        )
    extremes = _extremes(y, VOID if maps else None)
    if extremes is not None and (extremes[0] < 0 or extremes[1] >= classes):
        void = f", or {VOID} for no class" if maps else ""
        raise fault(
            f"{key} has labels from {extremes[0]} to {extremes[1]}, class_names has {classes} names. Give labels "
            f"from 0 to {classes - 1}{void}.",
            key,
        )
    if maps and len(y) and extremes is None:
        raise fault(f"{key} has no labelled pixel, all are {VOID}. Give maps with labels.", key)
    return y if maps else load(y).astype(np.int64, copy=False)


def check_parts_fit(fault: Fault, x_train: Stored, x_test: Stored, y_train: Stored, y_test: Stored) -> None:
    """Raise an error if the images or labels of the two parts of a data set have different shapes."""
    if len(y_train.shape) != len(y_test.shape):
        raise fault(
            f"y_train is {list(y_train.shape)} and y_test {list(y_test.shape)}. Give labels of images in both, or "
            "label maps in both.",
            "y_test",
        )
    if x_train.shape[1:] != x_test.shape[1:]:
        raise fault(
            f"images of x_train are {list(x_train.shape[1:])}, images of x_test {list(x_test.shape[1:])}. Give images "
            "of one shape.",
            "x_test",
        )


def check_clients(
    fault: Fault,
    keys: tuple[str, str, str],
    ids: np.ndarray | None,
    test_ids: np.ndarray | None,
    names: Sequence[str] | None,
    images: tuple[int, int],
) -> None:
    """Raise an error if client ids do not fit the images, the test ids or the clients' names.

    Args:
        fault: Makes the error.
        keys: Names of `ids`, `test_ids` and `names`.
        ids: Client id of each training image.
        test_ids: Client id of each test image.
        names: Names of the different ids, in the sorted order of the ids.
        images: Number of training images and of test images.
    """
    key, test_key, names_key = keys
    if ids is None:
        if test_ids is not None or names is not None:
            extra = test_key if test_ids is not None else names_key
            raise fault(f"{extra} needs {key}, which is missing. Add {key}.", key)
        return
    _check_ids(fault, key, ids, images[0])
    unique_ids = np.unique(ids)
    if test_ids is not None:
        _check_ids(fault, test_key, test_ids, images[1])
        if (test_ids.dtype.kind == "U") != (ids.dtype.kind == "U"):
            raise fault(f"{test_key} is {test_ids.dtype} and {key} {ids.dtype}. Give ids of one type.", test_key)
        untrained = np.setdiff1d(test_ids, unique_ids)
        if len(untrained):
            raise fault(
                f"{test_key} has an id that is not in {key} ({untrained[0].item()!r}). Give every client training "
                "images.",
                test_key,
            )
    if names is None:
        return
    check_names(fault, names_key, names)
    if len(names) != len(unique_ids):
        raise fault(
            f"{names_key} has {len(names)} names for {len(unique_ids)} different ids in {key}. Give one name for each "
            "id, in the sorted order of the ids.",
            names_key,
        )


def _check_ids(fault: Fault, key: str, ids: np.ndarray, images: int) -> None:
    if ids.shape != (images,):
        raise fault(f"{key} is {list(ids.shape)}. Give one id for each of the {images} images.", key)
    if ids.dtype.kind not in "iuU":
        hint = " (.astype(str) converts bytes)" if ids.dtype.kind == "S" else ""
        raise fault(f"{key} is {ids.dtype}. Give integers or strings{hint}.", key)


def _check_problem(fault: Fault, key: str, y: Stored, images: tuple[int, ...]) -> None:
    """Raise an error if the labels belong to a problem that raylt does not support.

    Raises:
        DataError: The labels are floats, as in regression, or each image has several labels.
    """
    several = len(y.shape) == 2 and len(images) == 3 and y.shape[0] == images[0] and y.shape[1:] != (1,)
    if y.dtype.kind == "f" or (several and y.dtype.kind in "iub"):
        problem = "several labels for each image" if several else "floating-point numbers"
        raise fault(f"{key} is {y.dtype} {list(y.shape)}, {problem}. {SCOPE}: give one class for each image.", key)


def _extremes(y: Stored, unlabelled: int | None) -> tuple[int, int] | None:
    """Return the smallest and the largest label except `unlabelled`; None if there are no others."""
    low = []
    high = []
    for part in label_chunks(y):
        labels = part if unlabelled is None else part[part != unlabelled]
        if labels.size:
            low.append(int(labels.min()))
            high.append(int(labels.max()))
    return (min(low), max(high)) if low else None
