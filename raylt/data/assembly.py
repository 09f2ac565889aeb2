"""A source out of decoded images and the names of their classes and clients."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from raylt.data.cache import Mapped
from raylt.data.source import PUBLISHED, Source, channel_statistics
from raylt.errors import DataError


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
    """The source; without test images where none are its own. A client without a training image is left out, with its
    test images, and named.

    Args:
        x: the images that could be decoded.
        rows: their places among all, int64 [n], ascending.

    Raises:
        DataError: no image of a whole part could be decoded.
    """
    class_names = sorted({*known.classes}) if known.class_names is None else list(known.class_names)
    y = _places(known.classes, class_names)[rows]
    train, test = np.flatnonzero(rows < known.train), np.flatnonzero(rows >= known.train)
    for part, wanted, found in (("training", True, train), ("test", known.tested, test)):
        if wanted and not len(found):
            raise DataError(f"{name}: has no {part} image that can be decoded; {' '.join(notes)}")
    x_train = x.take(train)
    mean, std = PUBLISHED.get(name) or channel_statistics(x_train)
    if known.clients is None:
        return Source(name, x_train, y[train], x.take(test), y[test], tuple(class_names), mean, std, notes=notes)
    whose = np.array(known.clients)[rows]
    client_names = sorted({*whose[train].tolist()})
    lost = sorted({*known.clients} - {*client_names})
    if lost:
        notes = (*notes, f"{len(lost)} clients have no training image that can be decoded, and are left out with their "
                         f"test images: {', '.join(lost[:10])}" + ", .." * (len(lost) > 10))
        test = test[~np.isin(whose[test], lost)]
    ids = _places(whose.tolist(), [*client_names, *lost])
    return Source(name, x_train, y[train], x.take(test), y[test], tuple(class_names), mean, std, ids[train],
                  ids[test] if known.tested else None, tuple(client_names), notes)


def _places(names: Sequence[str], of: Sequence[str]) -> np.ndarray:
    place = {name: index for index, name in enumerate(of)}
    return np.array([place[name] for name in names], dtype=np.int64)
