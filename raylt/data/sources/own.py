"""The check of a source of the user's own, whose function may return anything."""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from raylt.data.images.cache import Mapped, Stored
from raylt.data.sources.arrays import Channels, Source
from raylt.data.sources.checks import Fault, check_clients, check_names, check_parts_fit, checked_labels
from raylt.errors import DataError, type_name


def checked_source(name: str, source: Any) -> Source:
    """Return what the user's function of a data source returned, if raylt can use it.

    Labels become int64, and lists of names become tuples.

    Args:
        name: Name of the source.
        source: What its function returned.

    Raises:
        DataError: It is not a Source, or its arrays have other types or do not fit each other.
    """
    fault = partial(_unusable, name)
    if not isinstance(source, Source):
        raise fault(f"it is a {type(source).__name__}. Return a raylt.Source.", "Source")
    for key in ("x_train", "x_test"):
        _check_images(fault, key, getattr(source, key))
    if not len(source.x_train):
        raise fault("x_train has no image. Return at least one.", "x_train")
    _strings(fault, "name", [source.name])
    class_names = _strings(fault, "class_names", source.class_names)
    labels = {}
    for key, x in (("y_train", source.x_train), ("y_test", source.x_test)):
        _check_array(fault, key, getattr(source, key))
        labels[key] = checked_labels(fault, key, getattr(source, key), x.shape[:3], len(class_names))
    check_parts_fit(fault, source.x_train, source.x_test, **labels)
    ids = {key: _ids(fault, key, getattr(source, key)) for key in ("ids", "test_ids")}
    client_names = None if source.client_names is None else _strings(fault, "client_names", source.client_names)
    images = len(source.x_train), len(source.x_test)
    check_clients(fault, ("ids", "test_ids", "client_names"), **ids, names=client_names, images=images)
    channels = source.x_train.shape[3]
    return replace(
        source,
        **labels,
        **ids,
        class_names=class_names,
        client_names=client_names,
        mean=_per_channel(fault, "mean", source.mean, channels, -math.inf),
        std=_per_channel(fault, "std", source.std, channels, 0),
        notes=_sentences(fault, source.notes),
    )


def _unusable(name: str, problem: str, part: str) -> DataError:
    return DataError(
        f"data.source: the source {name} returned data that cannot be used: {problem}",
        code="data.malformed",
        key="data.source",
        value=name,
        array=part,
    )


def _check_array(fault: Fault, key: str, values: Any) -> None:
    if not isinstance(values, np.ndarray | Mapped):
        raise fault(f"{key} is a {type(values).__name__}. Return a numpy array.", key)


def _check_images(fault: Fault, key: str, x: Stored) -> None:
    _check_array(fault, key, x)
    if x.dtype != np.uint8 or len(x.shape) != 4 or 0 in x.shape[1:]:
        raise fault(f"{key} is {x.dtype} {list(x.shape)}. Return uint8 [N, H, W, channels] in 0..255.", key)


def _strings(fault: Fault, key: str, values: Any) -> tuple[str, ...]:
    """Return names as a tuple of different, printable strings."""
    if not _is_row(values) or not len(values):
        raise fault(f"{key} is {type_name(values)} ({values!a:.80}). Return a tuple of names, at least one.", key)
    others = [value for value in values if not isinstance(value, str)]
    if others:
        raise fault(f"{key} has a name that is not a string ({others[0]!a:.80}). Return strings.", key)
    names = tuple(map(str, values))  # numpy's strings are of another type
    check_names(fault, key, names)
    return names


def _sentences(fault: Fault, notes: Any) -> tuple[str, ...]:
    if not isinstance(notes, tuple | list) or not all(isinstance(note, str) for note in notes):
        raise fault(
            f"notes is not a tuple of sentences ({notes!a:.80}). Return one, such as ('A sentence.',).", "notes"
        )
    return tuple(notes)


def _ids(fault: Fault, key: str, ids: Any) -> np.ndarray | None:
    if ids is None:
        return None
    if not isinstance(ids, np.ndarray):
        raise fault(f"{key} is a {type(ids).__name__}. Return a numpy array.", key)
    # arrays of Python's own values, as pandas has them
    for kind in (str, int):
        if ids.dtype == object and all(isinstance(id, kind) for id in ids.flat):
            return ids.astype(kind)
    return ids


def _is_row(values: Any) -> bool:
    """Return whether values are a tuple, a list or an array of one dimension."""
    return isinstance(values, tuple | list) or (isinstance(values, np.ndarray) and values.ndim == 1)


def _per_channel(fault: Fault, key: str, values: Any, channels: int, above: float) -> Channels:
    """Return the mean or deviation of each channel as floats, all finite and greater than `above`."""
    is_row = _is_row(values) and len(values) == channels
    numbers = int, float, np.integer, np.floating
    if not is_row or not all(isinstance(value, numbers) and above < value < math.inf for value in values):
        limit = " above 0" if above == 0 else ""
        raise fault(
            f"{key} is {values!a:.80}. Return a finite number{limit} for each channel of the images ({channels}).", key
        )
    return tuple(map(float, values))
