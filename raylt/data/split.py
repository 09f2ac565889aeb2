"""`Split`: who holds which training sample, as a file with a content hash."""

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from raylt.data.cache import Stored, load, take
from raylt.errors import DataError


@dataclass(frozen=True, eq=False)
class Split:
    """Index lists into a source's training set, and what they were drawn from.

    Args:
        clients: of each client, int64 [n], ascending.
        labels_sha256: of the source's training labels, see `hash_labels`.
        source, imbalance, partition, alpha, seed: the settings they were drawn with.
        beta: the classes that each client keeps, of partition classes alone.
    """

    clients: tuple[np.ndarray, ...]
    labels_sha256: str
    source: str
    imbalance: float
    partition: str
    alpha: float
    seed: int
    beta: int | None = None

    @property
    def sha256(self) -> str:
        """SHA-256 of the index lists alone, as JSON without spaces."""
        return hashlib.sha256(json.dumps(self._lists(), separators=(",", ":")).encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        tree = {"sha256": self.sha256, **(asdict(self) | {"clients": self._lists()})}
        return {name: value for name, value in tree.items() if value is not None}

    @classmethod
    def from_json(cls, tree: Any) -> "Split":
        """The inverse of `to_json`.

        Raises:
            DataError: another structure, or lists that do not have the hash beside them.
        """
        names = {"sha256", *(field.name for field in fields(cls) if field.name != "beta")}
        if not isinstance(tree, dict) or set(tree) - {"beta"} != names:
            raise DataError(f"not a split; a mapping with {', '.join(sorted(names))} is expected")
        lists = tree["clients"]
        if not (isinstance(lists, list) and all(isinstance(rows, list) and all(type(row) is int for row in rows)
                                                for rows in lists)):
            raise DataError("clients of a split must be lists of whole numbers")
        try:
            clients = tuple(np.array(rows, dtype=np.int64) for rows in lists)
        except OverflowError:
            raise DataError("an index of the split is not a 64-bit number") from None
        split = cls(**{name: tree[name] for name in set(tree) - {"sha256", "clients"}}, clients=clients)
        if split.sha256 != tree["sha256"]:
            raise DataError("the index lists were changed after the split was saved: they do not have the sha256 "
                            "beside them; draw the split anew or take the original file")
        return split

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(self.to_json(), separators=(",", ":")))

    @classmethod
    def load(cls, path: Path) -> "Split":
        """The split in a file.

        Raises:
            DataError: the file cannot be read, is no split, or was changed.
        """
        try:
            return cls.from_json(json.loads(path.read_text()))
        except OSError as error:
            raise DataError(f"{path}: {error.strerror}; give a split.json that exists") from None
        except ValueError as error:
            raise DataError(f"{path}: not a split.json ({error})") from None
        except DataError as error:
            raise DataError(f"{path}: {error}") from None

    def _lists(self) -> list[list[int]]:
        return [rows.tolist() for rows in self.clients]


def hash_labels(labels: Stored) -> str:
    """SHA-256 of labels as little-endian int64, of maps as they are."""
    digest = hashlib.sha256()
    for rows in np.array_split(np.arange(len(labels)), 1 + len(labels) // 64):
        part = load(take(labels, rows))
        digest.update(part.astype("<i8" if part.ndim == 1 else "u1").tobytes())
    return digest.hexdigest()
