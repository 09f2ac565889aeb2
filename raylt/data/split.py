"""`Split`: who holds which training sample, as a file with a content hash."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired

import numpy as np
from pydantic import Field, TypeAdapter
from typing_extensions import TypedDict

from raylt import store
from raylt.data.cache import Stored, load, take
from raylt.data.index_lists import IndexLists
from raylt.errors import CheckpointError, DataError
from raylt.typed import as_json, closed, hash_json

LIMIT = 2**30               # bytes of a split.json: a hundred million samples
AT_ONCE = 1000              # clients whose lists are text at the same time
Row = Annotated[int, Field(ge=-2**63, lt=2**63)]
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


@closed
class _File(TypedDict):
    """The content of a split.json."""

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
    seal: Sha256


_FILE = TypeAdapter(_File)
_LATER = ("test", "test_share", "client_names", "tail", "per_client")


@dataclass(frozen=True, eq=False)
class Split:
    """Index lists into a source's training set, and what they were drawn from.

    Args:
        clients: of each client, int64 [n], ascending.
        labels_sha256: of the source's training labels, see `hash_labels`.
        source, imbalance, partition, alpha, seed: the settings they were drawn with.
        beta: the classes that each client keeps, of partition classes alone.
        test: of each id that the source records, in their order, the training samples that became test samples, int64
            [n], ascending; of a source without a test set alone.
        test_share: `data.test`, there.
        client_names: of each client, where partition by_id gave it the samples of a name.
        tail: `data.tail`, where it is another than global.
        per_client: `data.per_client`, of the partitions that go by it.
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

    @cached_property
    def sha256(self) -> str:
        """SHA-256 of the clients' index lists alone, as JSON without spaces."""
        return _hash(self.clients)

    @cached_property
    def seal(self) -> str:
        """SHA-256 of everything, the index lists by theirs."""
        tree = {**self._fields, "clients": self.sha256, "test": None if self.test is None else _hash(self.test)}
        # what came later counts where it is there: splits drawn before keep their seal
        return hash_json({name: value for name, value in tree.items() if name not in _LATER or value is not None})

    @property
    def _fields(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def as_text(self) -> str:
        """The content of a split.json."""
        tree = {"sha256": self.sha256, **self._fields, "seal": self.seal}
        texts = {name: "".join(_texts(value)) if name in ("clients", "test") else
                 json.dumps(value, separators=(",", ":")) for name, value in tree.items() if value is not None}
        return "{" + ",".join(f'"{name}":{text}' for name, text in texts.items()) + "}"

    @classmethod
    def from_json(cls, content: str | bytes) -> "Split":
        """The inverse of `as_text`.

        Raises:
            DataError: another structure, or lists or fields that do not have the hashes beside them.
        """
        tree: dict[str, Any] = {**as_json(content, _FILE, "not a split.json", DataError)}
        sha256, seal = tree.pop("sha256"), tree.pop("seal")
        for name in ("clients", "test"):
            if name in tree:
                tree[name] = IndexLists.of(np.array(rows, dtype=np.int64) for rows in tree[name])
        if "client_names" in tree:
            tree["client_names"] = tuple(tree["client_names"])
        split = cls(**tree)
        if split.sha256 != sha256:
            raise DataError("the index lists were changed after the split was saved: they do not have the sha256 "
                            "beside them; draw the split anew or take the original file")
        if split.seal != seal:
            raise DataError("a field was changed after the split was saved: they do not have the seal beside them; "
                            "draw the split anew or take the original file")
        return split

    def save(self, path: Path) -> None:
        store.write(path, self.as_text())

    @classmethod
    def load(cls, path: Path) -> "Split":
        """The split in a file.

        Raises:
            DataError: the file cannot be read, is no split, or was changed.
        """
        try:
            return cls.from_json(store.read(path, LIMIT))
        except CheckpointError as error:
            raise DataError(f"{error}; give a split.json that exists") from None
        except DataError as error:
            raise DataError(f"{path}: {error}") from None


def hash_labels(labels: Stored) -> str:
    """SHA-256 of labels as little-endian int64, of maps as they are."""
    digest = hashlib.sha256()
    for rows in np.array_split(np.arange(len(labels)), 1 + len(labels) // 64):
        part = load(take(labels, rows))
        digest.update(part.astype("<i8" if part.ndim == 1 else "u1").tobytes())
    return digest.hexdigest()


def _texts(lists: Sequence[np.ndarray]) -> Iterator[str]:
    """The lists as JSON without spaces, in pieces: as Python's own numbers they take several times the memory."""
    yield "["
    for start in range(0, len(lists), AT_ONCE):
        part = json.dumps([rows.tolist() for rows in lists[start:start + AT_ONCE]], separators=(",", ":"))
        yield ("," if start else "") + part[1:-1]
    yield "]"


def _hash(lists: Sequence[np.ndarray]) -> str:
    digest = hashlib.sha256()
    for text in _texts(lists):
        digest.update(text.encode())
    return digest.hexdigest()
