"""Label maps, the labels of segmentation: each pixel has a class, or VOID if it is unlabelled.

The same code serves classification and segmentation. Labels are int64 [N], or uint8 maps [N, H, W]. A sample is always
an image: clients are weighted by images, and batches count images. Class counts are counts of images or pixels. In
batches, VOID is replaced by the index that torch's cross-entropy ignores. Models return logits [B, C] or [B, C, H, W],
and the confusion matrix counts images or pixels.

A client may see the classes differently: a view [C] gives the class that the client sees in place of each class. The
view relabels the client's training labels, and in evaluations both the true and the predicted classes. If a view only
removes labels (some classes are VOID for a client), the client is evaluated on the classes themselves.
"""

from collections.abc import Iterator
from typing import Literal

import numpy as np

from raylt.data.images.cache import Stored, load, take

Erased = Literal["background", "unlabelled"]

VOID = 255  # label of a pixel without a class, which is neither trained on nor counted
BACKGROUND = "background"
CHUNK_SIZE = 2**24  # labels that are read at once


def class_counts(labels: Stored, classes: int) -> np.ndarray:
    """Count the images or labelled pixels of each class, int64 [C]."""
    total = np.zeros(classes, dtype=np.int64)
    for part in label_chunks(labels):
        total += np.bincount(part.ravel(), minlength=classes)[:classes]
    return total


def label_chunks(labels: Stored) -> Iterator[np.ndarray]:
    """Yield labels or label maps in parts of limited size, so that mapped ones are not read at once."""
    per_row = int(np.prod(labels.shape[1:]))
    for rows in np.array_split(np.arange(len(labels)), 1 + len(labels) * per_row // CHUNK_SIZE):
        yield load(take(labels, rows))


def present_classes(maps: Stored, classes: int) -> np.ndarray:
    """Return a mask of the classes that each image contains, bool [N, C]."""
    return np.stack([class_counts(take(maps, np.array([row])), classes) > 0 for row in range(len(maps))])


def class_views(clients: int, classes: int, beta: int, erased: Erased = "background") -> np.ndarray:
    """Return a class mapping for each client that leaves `beta` classes unchanged and replaces all other classes.

    The shape is int64 [K, C + 1] with a background class, otherwise [K, C].

    Client k keeps classes k, k + 1, .., k + beta - 1 (modulo C). With `erased="background"` all other classes become
    one background, class C. With `erased="unlabelled"` they become VOID, and there is no additional class (FedSeg; Miao
    et al., CVPR 2023).
    """
    views = np.full((clients, classes + 1), classes) if erased == "background" else np.full((clients, classes), VOID)
    for k in range(clients):
        kept = np.arange(k, k + beta) % classes
        views[k, kept] = kept
    return views


def relabel(labels: np.ndarray, view: np.ndarray) -> np.ndarray:
    """Apply a client's view of the classes to label maps, uint8 [N, H, W]; VOID stays VOID."""
    table = np.arange(256, dtype=np.uint8)
    table[: len(view)] = view
    return table[labels]
