"""A partition of a data set over clients as index lists, stored in a file with a hash."""

import hashlib
import json
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, TypeVar, overload

import numpy as np
from pydantic import Field, TypeAdapter
from typing_extensions import TypedDict

from raylt import store
from raylt.data.images.cache import Stored, load, take
from raylt.errors import CheckpointError, DataError, without_remedy
from raylt.typed_json import as_json, closed, hash_json

LIMIT = 2**30  # size limit of a split.json in bytes, enough for a hundred million samples
CHUNK_SIZE = 1000  # clients whose lists are converted to text at once
# Fields that were added later; a split without them keeps its earlier seal.
_LATER = ("test", "test_share", "client_names", "tail", "per_client", "test_pooled", "judged")


@dataclass(frozen=True, eq=False)
class Split:
    """Index lists of each client's samples in a source, and the settings by which they were drawn.

    Args:
        clients: For each client, rows of the training set, int64 [n], ascending.
        labels_sha256: Hash of the source's training labels, see `hash_labels`.
        source, imbalance, partition, alpha, seed: Settings with which the lists were drawn.
        beta: Number of classes that each client keeps; for partition `classes` only.
        test: For each id that the source records, in the order of the ids, the training samples that became test
            samples, int64 [n], ascending; one list for a source without ids. Only for a source without a test set.
        test_share: `data.test`, or `data.test_share` for a source without ids; only for a source without a test set.
        client_names: Names of the clients, if partition `by_id` made them from named ids.
        tail: `data.tail`, if it is not `global`.
        per_client: `data.per_client`, for the partitions that use it.
        test_pooled: True if the samples in `test` belong to no client.
        judged: Ids of the clients that are only judged, ascending, if index lists of another tool name them.
    """

    clients: Sequence[np.ndarray]
    labels_sha256: str
    source: str
    imbalance: float
    partition: str
    alpha: float
    seed: int
    beta: int | None = None
    test: Sequence[np.ndarray] | None = None
    test_share: float | None = None
    client_names: tuple[str, ...] | None = None
    tail: Literal["local", "mixed"] | None = None
    per_client: int | None = None
    test_pooled: Literal[True] | None = None
    judged: tuple[int, ...] | None = None

    @cached_property
    def sha256(self) -> str:
        """Return the SHA-256 of the clients' index lists alone, written as JSON without spaces."""
        return _hash(self.clients)

    @cached_property
    def seal(self) -> str:
        """Return the SHA-256 of all fields of the split, with index lists represented by their hashes."""
        tree = {**self._fields, "clients": self.sha256, "test": None if self.test is None else _hash(self.test)}
        return hash_json({name: value for name, value in tree.items() if name not in _LATER or value is not None})

    @property
    def _fields(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def as_text(self) -> str:
        """Return the content of a split.json file for this split."""
        tree = {"sha256": self.sha256, **self._fields, "seal": self.seal}
        texts = {}
        for name, value in tree.items():
            if value is None:
                continue
            if name in ("clients", "test"):
                texts[name] = "".join(_texts(value))
            else:
                texts[name] = json.dumps(value, separators=(",", ":"))
        return "{" + ",".join(f'"{name}":{text}' for name, text in texts.items()) + "}"

    @classmethod
    def from_json(cls, content: str | bytes) -> "Split":
        """Read a split from the content of a split.json file, the inverse of `as_text`.

        Raises:
            DataError: The content has another structure, or a hash in the file does not match its lists or fields.
        """
        tree: dict[str, Any] = {**as_json(content, _FILE, "not a split.json", DataError)}
        sha256 = tree.pop("sha256")
        seal = tree.pop("seal")
        for name in ("clients", "test"):
            if name in tree:
                tree[name] = IndexLists.of(np.array(rows, dtype=np.int64) for rows in tree[name])
        for name in ("client_names", "judged"):
            if name in tree:
                tree[name] = tuple(tree[name])
        split = cls(**tree)
        for hash_name, changed, expected, actual in (
            ("sha256", "the index lists were", sha256, split.sha256),
            ("seal", "a field was", seal, split.seal),
        ):
            if actual != expected:
                raise DataError(
                    f"data.split: {changed} changed after the split was saved ({hash_name} is {actual[:12]}, not "
                    f"{expected[:12]}). Draw the split again, or use the original file.",
                    code="data.split-changed",
                    field=hash_name,
                )
        return split

    def save(self, path: Path) -> None:
        """Write the split to a file."""
        store.write(path, self.as_text())

    @classmethod
    def load(cls, path: Path) -> "Split":
        """Read a split from a file.

        Raises:
            DataError: The file cannot be read, is not a split, or was changed.
        """
        try:
            return cls.from_json(store.read(path, LIMIT))
        except CheckpointError as error:
            raise DataError(
                f"{path}: the split cannot be read ({without_remedy(error)}). Give a split.json that exists.",
                code="data.not-found",
                path=str(path),
            ) from None
        except DataError as error:
            code = error.code or "data.malformed"
            raise DataError(f"{path}: {error}", code=code, **{**error.details, "path": str(path)}) from None


Part = TypeVar("Part", covariant=True)


class PerClient(Sequence[Part]):
    """A sequence with one element per client. Each element is made on access, from data stored client by client.

    Args:
        ends: For each client, the row at which its part ends, int64 [K].
    """

    def __init__(self, ends: np.ndarray):
        self.ends = ends

    @property
    def sizes(self) -> np.ndarray:
        """Return the number of rows of each client, int64 [K]."""
        return np.diff(self.ends, prepend=0)

    def __len__(self) -> int:
        return len(self.ends)

    @overload
    def __getitem__(self, client: int) -> Part: ...

    @overload
    def __getitem__(self, client: slice) -> tuple[Part, ...]: ...

    def __getitem__(self, client: int | slice) -> Part | tuple[Part, ...]:
        positions = range(len(self.ends))[client]
        if isinstance(positions, range):
            return tuple(self[k] for k in positions)
        start = int(self.ends[positions - 1]) if positions else 0
        return self._part(positions, start, int(self.ends[positions]))

    @abstractmethod
    def _part(self, client: int, start: int, end: int) -> Part:
        """Return the element of a client, which spans rows `start` to `end`."""


class IndexLists(PerClient[np.ndarray]):
    """The index lists of all clients, int64 [n], as views of one array.

    Separate arrays for a hundred thousand clients would take several times the memory of the indices, and several times
    as long to pickle.

    Args:
        flat: The lists, one after the other, int64 [N].
        ends: For each client, the position at which its list ends, int64 [K].
    """

    def __init__(self, flat: np.ndarray, ends: np.ndarray):
        super().__init__(ends)
        self.flat = flat

    @classmethod
    def of(cls, lists: Iterable[np.ndarray]) -> "IndexLists":
        """Copy index lists into one array."""
        parts = list(lists)
        ends = np.cumsum([len(part) for part in parts], dtype=int)
        return cls(np.concatenate([np.empty(0, np.int64), *parts]), ends)

    def _part(self, client: int, start: int, end: int) -> np.ndarray:
        return self.flat[start:end]


def grouped(ids: np.ndarray, unique_ids: np.ndarray) -> IndexLists:
    """Return the positions of each unique id in `ids`, ascending. All ids are sorted once.

    Args:
        ids: Id of each sample, [N].
        unique_ids: Distinct ids, sorted, [K].
    """
    order = np.argsort(ids, kind="stable")
    starts = np.searchsorted(ids[order], unique_ids, side="left")
    ends = np.searchsorted(ids[order], unique_ids, side="right")
    return IndexLists.of(order[start:end] for start, end in zip(starts, ends, strict=True))


def hash_labels(labels: Stored) -> str:
    """Return the SHA-256 of labels: of class labels as little-endian int64, or of label maps as bytes."""
    digest = hashlib.sha256()
    for rows in np.array_split(np.arange(len(labels)), 1 + len(labels) // 64):
        part = load(take(labels, rows))
        digest.update(part.astype("<i8" if part.ndim == 1 else "u1").tobytes())
    return digest.hexdigest()


Row = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


@closed
class _File(TypedDict):
    """The content of a split.json file."""

    sha256: Sha256
    clients: list[list[Row]]
    labels_sha256: Sha256
    source: str
    imbalance: Annotated[float, Field(ge=1, allow_inf_nan=False)]
    partition: str
    alpha: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    seed: Annotated[int, Field(ge=0)]
    beta: NotRequired[Annotated[int, Field(ge=1)]]
    test: NotRequired[list[list[Row]]]
    test_share: NotRequired[Annotated[float, Field(gt=0, lt=1)]]
    client_names: NotRequired[list[str]]
    tail: NotRequired[Literal["local", "mixed"]]
    per_client: NotRequired[Annotated[int, Field(ge=1)]]
    test_pooled: NotRequired[Literal[True]]
    judged: NotRequired[Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]]
    seal: Sha256


_FILE = TypeAdapter(_File)


def _texts(lists: Sequence[np.ndarray]) -> Iterator[str]:
    """Yield the index lists as JSON text without spaces, piece by piece.

    Pieces save memory, because Python's integers take several times the memory of an array.
    """
    yield "["
    for start in range(0, len(lists), CHUNK_SIZE):
        piece = json.dumps([rows.tolist() for rows in lists[start : start + CHUNK_SIZE]], separators=(",", ":"))
        yield ("," if start else "") + piece[1:-1]
    yield "]"


def _hash(lists: Sequence[np.ndarray]) -> str:
    digest = hashlib.sha256()
    for text in _texts(lists):
        digest.update(text.encode())
    return digest.hexdigest()
