"""`Mapped`: rows of decoded images or label maps in a memory-mapped uint8 array, from which every process copies its
own."""

from dataclasses import dataclass

import numpy as np

from raylt.errors import DataError


@dataclass(frozen=True, eq=False)
class Mapped:
    """Rows of an array on disk. Pickles as a path and row numbers, so that images travel to no other process.

    Args:
        path: absolute path of a .npy that every node can read: images uint8 [N, H, W, channels] or maps [N, H, W].
        rows: int64 [n].
    """

    path: str
    rows: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.rows), *self._open().shape[1:])

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, rows: int | slice | np.ndarray) -> np.ndarray:
        """A copy in memory of some of the rows, as of an array."""
        return np.array(self._open()[self.rows[rows]])

    def take(self, indices: np.ndarray) -> "Mapped":
        return Mapped(self.path, self.rows[indices])

    def load(self) -> np.ndarray:
        """A copy of the rows in memory, uint8 [n, H, W, channels] or [n, H, W]."""
        return self[:]

    def _open(self) -> np.ndarray:
        try:
            return np.load(self.path, mmap_mode="r")
        except (OSError, ValueError) as error:
            raise DataError(f"{self.path}: the cache of decoded images cannot be read ({error}); "
                            "data.root must be a folder that every node sees") from None


Stored = np.ndarray | Mapped


def take(x: Stored, rows: np.ndarray) -> Stored:
    """The given rows of `x`."""
    return x.take(rows) if isinstance(x, Mapped) else x[rows]


def cut(x: Stored, start: int, end: int) -> Stored:
    """Neighbouring rows of `x`, without a copy."""
    return Mapped(x.path, x.rows[start:end]) if isinstance(x, Mapped) else x[start:end]


def load(x: Stored) -> np.ndarray:
    """`x` in memory."""
    return x.load() if isinstance(x, Mapped) else x
