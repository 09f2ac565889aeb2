"""Detection of test images that are also training images. Accuracy on them says nothing about new images."""

import hashlib
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from raylt.data.images.cache import Stored, cut, load, pixel_rows, take
from raylt.data.sources.arrays import Source
from raylt.errors import DataError, first_names

CHUNK_SIZE = 512  # images that are read at once


def repeated(training: Stored, tests: Stored) -> np.ndarray:
    """Return a mask, bool [n], of the test images that have the same pixels as a training image.

    Images are compared by the hash of their middle row of pixels and, if that agrees, by the hash of all pixels. So
    little more than one row of each image is read from disk.
    """
    rows_of_tests = _row_hashes(tests)
    rows_of_training = _row_hashes(training)
    # sorted, because the table of NumPy 2.0 overflows for hashes of 64 bits
    candidates = np.flatnonzero(np.isin(rows_of_tests, rows_of_training, kind="sort"))
    similar = np.flatnonzero(np.isin(rows_of_training, rows_of_tests[candidates], kind="sort"))
    whole = set(_hashes(training, similar))
    both = np.zeros(len(tests), dtype=bool)
    both[candidates] = [digest in whole for digest in _hashes(tests, candidates)]
    return both


def without_doubles(source: Source) -> Source:
    """Return the source without the test images that are also training images.

    Without a test part, every image is kept once, before a part of each client's images becomes its test images.

    Raises:
        DataError: No test image is left.
    """
    if len(source.x_test):
        kept = np.flatnonzero(~repeated(source.x_train, source.x_test))
        if not len(kept):
            raise DataError(
                f"data.doubles: every test image of {source.name} is also a training image (drop). Use other test "
                "images, or set data.doubles=keep.",
                code="data.doubles",
                key="data.doubles",
                value="drop",
                doubles=len(source.x_test),
            )
        tests = {"x_test": take(source.x_test, kept), "y_test": take(source.y_test, kept)}
        ids = None if source.test_ids is None else source.test_ids[kept]
        note = _left_out(len(source.x_test) - len(kept), len(source.x_test), "test")
        return replace(source, **tests, test_ids=ids, notes=(*source.notes, *note))
    kept = _first_copies(source.x_train)
    ids, client_names, lost = _clients_left(source, kept)
    note = _left_out(len(source.x_train) - len(kept), len(source.x_train), "training")
    return replace(
        source,
        x_train=take(source.x_train, kept),
        y_train=take(source.y_train, kept),
        ids=ids,
        client_names=client_names,
        notes=(*source.notes, *note, *lost),
    )


def doubles_note(training: Stored, tests: Stored, name: str, refuse: bool) -> list[str]:
    """Return a notice with the number of test images that are also training images; empty if there are none.

    Args:
        training: Images on which clients train.
        tests: Images on which models are evaluated.
        name: Name of the source.
        refuse: Whether such images are an error.

    Raises:
        DataError: There are such images, and `refuse` is set.
    """
    count = int(repeated(training, tests).sum())
    if not count:
        return []
    if refuse:
        raise DataError(
            f"data.doubles: {count} of {len(tests)} test images of {name} are also training images (refuse). Remove "
            "them, or set data.doubles=drop.",
            code="data.doubles",
            key="data.doubles",
            value="refuse",
            doubles=count,
        )
    return [
        f"{count:,} of {len(tests):,} test images are also training images, pixel by pixel, so figures over them are "
        "too high; data.doubles=drop leaves them out, data.doubles=refuse makes them an error"
    ]


def _first_copies(x: Stored) -> np.ndarray:
    """Return the indices of images in `x` that do not repeat an earlier image, ascending, int64."""
    _, places, counts = np.unique(_row_hashes(x), return_inverse=True, return_counts=True)
    similar = np.flatnonzero(counts[places] > 1)
    kept = np.ones(len(x), dtype=bool)
    seen: set[bytes] = set()
    for index, digest in zip(similar, _hashes(x, similar), strict=True):
        kept[index] = digest not in seen
        seen.add(digest)
    return np.flatnonzero(kept)


def _clients_left(
    source: Source, kept: np.ndarray
) -> tuple[np.ndarray | None, tuple[str, ...] | None, tuple[str, ...]]:
    """Return the ids and client names that remain with the training images `kept`, and a note on lost clients."""
    if source.ids is None:
        return None, source.client_names, ()
    everyone = np.unique(source.ids)
    ids = source.ids[kept]
    left = np.isin(everyone, ids)
    if left.all():
        return ids, source.client_names, ()
    names = everyone.astype(str).tolist() if source.client_names is None else source.client_names
    lost = [name for name, stays in zip(names, left, strict=True) if not stays]
    note = (
        f"{'1 client has' if len(lost) == 1 else f'{len(lost)} clients have'} only copies of other images and "
        f"{'is' if len(lost) == 1 else 'are'} left out: {first_names(lost)}"
    )
    return ids, tuple(name for name, stays in zip(names, left, strict=True) if stays), (note,)


def _left_out(count: int, of: int, part: str) -> list[str]:
    if not count:
        return []
    if count == 1:
        repeats = "is also a training image and is" if part == "test" else "is a copy of another and is"
    else:
        repeats = "are also training images and are" if part == "test" else "are copies of others and are"
    return [f"{count:,} of {of:,} {part} images {repeats} left out (data.doubles=drop)"]


def _row_hashes(x: Stored) -> np.ndarray:
    """Return a hash of the middle row of pixels of each image, uint64 [n].

    A hash takes 8 bytes, because there may be millions of images.
    """
    parts = [
        b"".join(_digest(row, 8) for row in pixel_rows(cut(x, start, start + CHUNK_SIZE), x.shape[1] // 2))
        for start in range(0, len(x), CHUNK_SIZE)
    ]
    return np.frombuffer(b"".join(parts), np.uint64)


def _hashes(x: Stored, rows: np.ndarray) -> Iterator[bytes]:
    """Yield a hash of all pixels of each image at `rows`."""
    for start in range(0, len(rows), CHUNK_SIZE):
        for image in load(take(x, rows[start : start + CHUNK_SIZE])):
            yield _digest(image, 16)


def _digest(pixels: np.ndarray, size: int) -> bytes:
    return hashlib.blake2b(np.ascontiguousarray(pixels).data, digest_size=size).digest()
