"""A source out of decoded images and the names of their classes and clients."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from raylt.data.cache import Mapped
from raylt.data.source import PUBLISHED, Source, channel_statistics


@dataclass(frozen=True)
class Known:
    """What is known of the files of a source, training images first.

    Args:
        classes: the class of each.
        clients: whose each is; None where nobody says.
        train: how many are training images.
        tested: whether the others are test images of its own; there are none otherwise.
        class_names: in their order; None for that of the alphabet.
    """

    classes: Sequence[str]
    clients: Sequence[str] | None
    train: int
    tested: bool
    class_names: Sequence[str] | None = None


def assemble(name: str, x: Mapped, rows: np.ndarray, known: Known, notes: tuple[str, ...]) -> Source:
    """The source; without test images where none are its own.

    Args:
        x: the images that could be decoded.
        rows: their places among all, int64 [n], ascending.
    """
    class_names = sorted({*known.classes}) if known.class_names is None else list(known.class_names)
    y = _places(known.classes, class_names)[rows]
    train, test = np.flatnonzero(rows < known.train), np.flatnonzero(rows >= known.train)
    x_train = x.take(train)
    mean, std = PUBLISHED.get(name) or channel_statistics(x_train)
    if known.clients is None:
        return Source(name, x_train, y[train], x.take(test), y[test], tuple(class_names), mean, std, notes=notes)
    client_names = sorted({*known.clients})
    ids = _places(known.clients, client_names)[rows]
    return Source(name, x_train, y[train], x.take(test), y[test], tuple(class_names), mean, std, ids[train],
                  ids[test] if known.tested else None, tuple(client_names), notes)


def _places(names: Sequence[str], of: Sequence[str]) -> np.ndarray:
    place = {name: index for index, name in enumerate(of)}
    return np.array([place[name] for name in names], dtype=np.int64)
