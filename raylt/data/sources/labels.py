"""Classes and clients of a source's images, as names or numbers, and the data set that they make with the images."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from raylt.data.images.cache import Mapped
from raylt.data.images.image_files import shown_name
from raylt.data.sources.arrays import PUBLISHED, Source, channel_statistics
from raylt.data.sources.checks import SCOPE
from raylt.errors import DataError, first_names


@dataclass(frozen=True)
class ImageLabels:
    """The class and client of each image of a source, training images first.

    Args:
        classes: Class name of each image.
        clients: Client name of each image; None if the source records no clients.
        train: Number of training images.
        tested: Whether the source has test images, which follow the training images.
    """

    classes: Sequence[str]
    clients: Sequence[str] | None
    train: int
    tested: bool


@dataclass(frozen=True, eq=False)
class CodedLabels:
    """The same as `ImageLabels`, with numbers in place of names.

    Args:
        classes: Position of each image's class in `class_names`, int64 [N].
        class_names: Names of the classes, in order.
        clients: Position of each image's client in `client_names`, int64 [N]; None if the source records no clients.
        client_names: Names of the clients, in order.
        train, tested: See `ImageLabels`.
    """

    classes: np.ndarray
    class_names: list[str]
    clients: np.ndarray | None
    client_names: list[str] | None
    train: int
    tested: bool


class NameCodes:
    """Names of classes or clients as numbers, in the order in which they first appear.

    Args:
        key: The setting that names the column.
        source: `data.source`.
    """

    def __init__(self, key: str, source: str):
        self._key = key
        self._source = source
        self._numbers: dict[str, int] = {}
        self._codes = [np.empty(0, np.int32)]
        self.count = 0

    def add(self, values: np.ndarray) -> None:
        """Add the class or client names of a batch of rows.

        Raises:
            DataError: A value is missing, is neither an integer nor a string, or cannot be printed.
        """
        if values.dtype.kind in "iuU":
            distinct, first, inverse = np.unique(values, return_index=True, return_inverse=True)
            names = [self._name(value, self.count + row) for value, row in zip(distinct, first, strict=True)]
            codes = np.array([self._number(name) for name in names], np.int32)[inverse]
        else:
            names = [self._name(value, self.count + row) for row, value in enumerate(values)]
            codes = np.array([self._number(name) for name in names], np.int32)
        self._codes.append(codes)
        self.count += len(values)

    def sorted(self, numbers: bool) -> tuple[list[str], np.ndarray]:
        """Return all distinct names, sorted, and the position of each row's name among them, int32 [N].

        Args:
            numbers: Whether the names are integers, which are sorted by value; other names are sorted alphabetically.
        """
        names = sorted(self._numbers, key=int) if numbers else sorted(self._numbers)
        position = np.empty(len(names), np.int32)
        position[[self._numbers[name] for name in names]] = np.arange(len(names))
        return names, position[np.concatenate(self._codes)]

    @property
    def integers(self) -> bool:
        """Return whether each name is an integer in plain digits."""
        return all(name.isascii() and name.isdecimal() for name in self._numbers)

    def _number(self, name: str) -> int:
        return self._numbers.setdefault(name, len(self._numbers))

    def _name(self, value: Any, row: int) -> str:
        value = value.item() if isinstance(value, np.generic) else value  # show it in messages as users write it
        if value is None or value == "" or (isinstance(value, float) and np.isnan(value)):
            raise DataError(
                f"{self._key}: row {row} of {self._source} has no value. Leave out rows without a class or client.",
                code="data.malformed",
                key=self._key,
                value=self._source,
                row=row,
            )
        if isinstance(value, float) and value.is_integer():  # integers become floats in a column with missing values
            value = int(value)
        if plain_kind(value) is None:
            raise not_classes(self._key, self._source, value)
        if not str(value).isprintable() or not str(value).strip():
            raise DataError(
                f"{self._key}: {self._source} has a name that cannot be printed ({value!a}). Rename it.",
                code="data.bad-name",
                key=self._key,
                value=self._source,
            )
        return str(value)


def assemble(name: str, x: Mapped, rows: np.ndarray, labels: ImageLabels, notes: tuple[str, ...]) -> Source:
    """Make a data set from decoded images and their labels.

    A client without a training image is left out together with its test images, and a note names it.

    Args:
        name: Name of the data set.
        x: The images that could be decoded.
        rows: Positions of these images among all images, int64 [n], ascending.
        labels: Classes and clients of all images.
        notes: Notes on the data so far.

    Raises:
        DataError: No image of a whole part could be decoded.
    """
    class_names = sorted({*labels.classes})
    client_names = None if labels.clients is None else sorted({*labels.clients})
    coded = CodedLabels(
        classes=_positions(labels.classes, class_names),
        class_names=class_names,
        clients=None if client_names is None else _positions(labels.clients or (), client_names),
        client_names=client_names,
        train=labels.train,
        tested=labels.tested,
    )
    return assemble_coded(name, x, rows, coded, notes)


def assemble_coded(name: str, x: Mapped, rows: np.ndarray, labels: CodedLabels, notes: tuple[str, ...]) -> Source:
    """Make a data set from decoded images and their labels, given as numbers; otherwise the same as `assemble`.

    Raises:
        DataError: No image of a whole part could be decoded.
    """
    y = labels.classes[rows]
    train = np.flatnonzero(rows < labels.train)
    test = np.flatnonzero(rows >= labels.train)
    if not len(train):
        raise _no_image(name, "training", notes)
    if labels.tested and not len(test):
        raise _no_image(name, "test", notes)
    x_train = x.take(train)
    mean, std = PUBLISHED.get(name) or channel_statistics(x_train)
    ids = test_ids = client_names = None
    if labels.clients is not None and labels.client_names is not None:
        owners = labels.clients[rows]
        trained, ids = np.unique(owners[train], return_inverse=True)
        client_names = [labels.client_names[client] for client in trained]
        lost = [labels.client_names[client] for client in np.setdiff1d(np.arange(len(labels.client_names)), trained)]
        if lost:
            notes = (
                *notes,
                f"{'1 client has' if len(lost) == 1 else f'{len(lost)} clients have'} no training image that can be "
                f"decoded; left out with all test images: {first_names(lost)}",
            )
            test = test[np.isin(owners[test], trained)]
        test_ids = np.searchsorted(trained, owners[test]) if labels.tested else None
    return Source(
        name=name,
        x_train=x_train,
        y_train=y[train],
        x_test=x.take(test),
        y_test=y[test],
        class_names=tuple(labels.class_names),
        mean=mean,
        std=std,
        ids=ids,
        test_ids=test_ids,
        client_names=None if client_names is None else tuple(client_names),
        notes=notes,
    )


def not_classes(key: str, name: str, value: Any) -> DataError:
    """Return the error for a column whose values are neither integers nor strings.

    Args:
        key: The setting that names the column.
        name: `data.source`.
        value: One of the values.
    """
    return DataError(
        f"{key}: {name} has values that are neither integers nor strings ({shown_name(str(value)[:40])}). {SCOPE}: "
        "name a column with one class, or one client, for each image.",
        code="data.malformed",
        key=key,
        value=name,
    )


def plain_kind(value: Any) -> Literal["integer", "text"] | None:
    """Return the kind of a class or client name; None if the value is no name."""
    if isinstance(value, str | np.str_):
        return "text"
    return "integer" if isinstance(value, int | np.integer) and not isinstance(value, bool) else None


def _no_image(name: str, part: str, notes: tuple[str, ...]) -> DataError:
    return DataError(
        f"data.source: {name} has no {part} image that can be decoded ({'; '.join(notes)}). Add images of this part.",
        code="data.undecodable",
        key="data.source",
        value=name,
        part=part,
    )


def _positions(names: Sequence[str], ordered: Sequence[str]) -> np.ndarray:
    """Return the position of each name in the list `ordered`, int64 [n]."""
    position = {name: index for index, name in enumerate(ordered)}
    return np.array([position[name] for name in names], dtype=np.int64)
