"""`Filling`: rows of an array on disk, decoded and written. Processes that only decode import little more."""

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from raylt.errors import DataError

GONE, COLOUR, GREY, BAD = range(4)
WRITTEN = 2**19         # bytes that are written at once: a call for each small image takes a twentieth of its decoding

Decode = Callable[[int, Any], np.ndarray]


@dataclass(frozen=True, eq=False)
class Filling:
    """How the rows of an array are made; pickles where `decode` does.

    Args:
        decode: row, what it is decoded from -> uint8 of a row's shape.
        shape: [N, ...] of the array.
        start: bytes of the file before its first row.
        grey: whether `decode` may give rows of one channel where the array has three.
    """

    decode: Decode
    shape: tuple[int, ...]
    start: int
    grey: bool

    def fill(self, handle: int, rows: Sequence[int], given: Sequence[Any]) -> tuple[list[int], dict[int, str]]:
        """Decodes rows into a file.

        Args:
            handle: of the file, in this process.
            given: what each row is decoded from; a DataError where that could not be had.

        Returns:
            Of each row COLOUR, GREY or BAD; and of those that could not be decoded, why.
        """
        kinds, reasons, size = [], {}, math.prod(self.shape[1:])
        for part in _runs(rows, max(1, WRITTEN // size)):
            pixels = np.zeros((len(part), *self.shape[1:]), np.uint8)
            for place, at in enumerate(part):
                try:
                    kinds.append(self._fill(pixels[place], rows[at], given[at]))
                except DataError as error:
                    kinds.append(BAD)
                    reasons[rows[at]] = str(error)
            _write(handle, pixels, self.start + rows[part[0]] * size)
        return kinds, reasons

    def _fill(self, pixels: np.ndarray, row: int, given: Any) -> int:
        if isinstance(given, DataError):
            raise given
        decoded = self.decode(row, given)
        pixels[...] = decoded
        return GREY if self.grey and decoded.shape[-1] == 1 else COLOUR


def _runs(rows: Sequence[int], most: int) -> list[range]:
    """Places of rows that follow each other, at most so many of them at a time."""
    begins = [at for at in range(len(rows)) if at == 0 or rows[at] != rows[at - 1] + 1]
    ends = [*begins[1:], len(rows)]
    return [range(at, min(at + most, end)) for begin, end in zip(begins, ends, strict=True)
            for at in range(begin, end, most)]


def _write(handle: int, pixels: np.ndarray, at: int) -> None:
    """Not through a memory map, which would hold all that was written in this process's memory."""
    left = pixels.reshape(-1).data
    while left:
        written = os.pwrite(handle, left, at)
        left, at = left[written:], at + written
