"""`ValueStore`: keeps the first gibibytes of clients' values in memory and writes the rest to a file.

A method that compares clients requests the update of every client (`each`). With 1,000 clients and ResNet-18 the
updates take 45 GB. The store writes values beyond IN_MEMORY to a file and returns views of the file. The views have the
same bits, and the operating system drops their pages when it needs memory. The file is in the folder for temporary
files (TMPDIR), which must not itself be in memory. It has no name, so it vanishes with its last view or with its
process.
"""

import mmap
import os
import tempfile
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from raylt.disk import file_errors
from raylt.tree import Tree, leaves, map_tensors

IN_MEMORY = 2 * 2**30  # limit on the bytes in memory
# Smaller replies, in bytes, stay in memory: each reply in the file takes one of a process's 65,530 memory mappings.
SMALLEST = 2**20
ALIGNED = 64  # bytes; torch's vector instructions need this alignment


class ValueStore:
    """Stores the values that clients send, in memory or in a file."""

    def __init__(self) -> None:
        self._in_memory = 0
        self._file: IO[bytes] | None = None

    def keep(self, parts: Tree) -> Tree:
        """Store the parts of one reply, and return them unchanged or, once memory is full, as views of a file.

        All tensors of a reply are moved to the file together, since one remaining tensor would keep the memory of all.

        Args:
            parts: The reply's parts by name, on the CPU.

        Raises:
            DiskFull: The folder for temporary files has no room.
        """
        size = sum(leaf.nbytes for _, leaf in leaves(parts) if isinstance(leaf, Tensor))
        if size < SMALLEST or self._in_memory + size <= IN_MEMORY:
            self._in_memory += size
            return parts
        with file_errors(Path(tempfile.gettempdir())):
            return self._in_file(parts)

    def _in_file(self, tree: Tree) -> Tree:
        if self._file is None:
            self._file = tempfile.TemporaryFile(prefix="raylt-")  # noqa: SIM115
        start = _rounded_up(self._file.seek(0, os.SEEK_END), mmap.ALLOCATIONGRANULARITY)
        length = 0
        offsets: dict[int, int] = {}  # by the identity of a tensor, after `start`
        for _, leaf in leaves(tree):
            if isinstance(leaf, Tensor) and leaf.numel():
                self._file.seek(start + length)
                self._file.write(leaf.contiguous().flatten().view(torch.uint8).numpy().data)
                offsets[id(leaf)] = length
                length += _rounded_up(leaf.nbytes, ALIGNED)
        self._file.truncate(start + length)
        # copy on write: a change in place is visible in its view only, as in memory
        mapped = mmap.mmap(self._file.fileno(), length, access=mmap.ACCESS_COPY, offset=start)

        def view(leaf: Tensor) -> Tensor:
            if id(leaf) not in offsets:
                return leaf
            flat = torch.frombuffer(mapped, dtype=leaf.dtype, count=leaf.numel(), offset=offsets[id(leaf)])
            return flat.view(leaf.shape)

        return map_tensors(view, tree)


def _rounded_up(size: int, unit: int) -> int:
    """Return the smallest multiple of `unit` that is at least `size`."""
    return -(-size // unit) * unit
