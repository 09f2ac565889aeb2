"""Many small decodings into one array on disk: in parallel, with a bar, once for all processes, and going on where one
that was killed left off.

A cache is a folder `NAME-HASH` under data.root/cache, its hash of all that it was made of:

    images.npy       uint8 [N, H, W, channels]
    about.json       what it is, for people
    images.bad.json  the rows that could not be decoded, with the reason; absent where all could
    images.partial, images.state    while it is being made: the array, and which of its rows are there
"""

import hashlib
import io
import json
import math
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import numpy as np
from pydantic import Field, TypeAdapter

from raylt.errors import DataError, RayltError
from raylt.store import Folder, folder_for

ABOUT = "about.json"
AT_ONCE = 512           # rows between two notes of how far it is
WRITTEN = 2**19         # bytes that are written at once: a call for each small image takes a twentieth of its decoding
GONE, COLOUR, GREY, BAD = range(4)
_BAD = TypeAdapter(dict[Annotated[str, Field(pattern="^[0-9]{1,15}$")], str])

Decode = Callable[[int], np.ndarray]


def place_of(name: str, key: Any, cache: Path) -> Path:
    """The folder of a cache; another key is another cache."""
    return cache.resolve() / f"{name}-{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]}"


def pack(path: Path, shape: tuple[int, ...], decode: Decode, about: Mapping[str, Any],
         grey: bool = False, whole: bool = True) -> dict[int, str]:
    """Makes the array of a cache where it is not there yet.

    Args:
        path: of the array.
        shape: [N, ...] of it.
        decode: row -> uint8 of that shape, called by several threads; a DataError of it is kept as the row's reason.
        about: what the cache is.
        grey: whether an array of [N, H, W, 3] becomes [N, H, W, 1] where all rows are grey: `decode` then gives rows
            of one channel too.
        whole: whether the cache stays unfinished where a row could not be decoded; those are then tried again.

    Returns:
        The rows that could not be decoded, with what their errors say.

    Raises:
        DataError: it does not fit on the disk.
    """
    with folder_for(path.parent) as folder:
        if not path.exists():
            # trials that start together decode once
            lock = folder.lock("lock", wait=True)
            assert lock is not None
            try:
                if not path.exists():
                    _make(folder, path, shape, decode, about, grey, whole)
            finally:
                os.close(lock)
        bad = folder.read_json(_bad(path), _BAD) if folder.has(_bad(path)) else {}
        return {int(row): reason for row, reason in bad.items()}


def _bad(path: Path) -> str:
    return f"{path.stem}.bad.json"


def _make(folder: Folder, path: Path, shape: tuple[int, ...], decode: Decode, about: Mapping[str, Any],
          grey: bool, whole: bool) -> None:
    partial, state = f"{path.stem}.partial", f"{path.stem}.state"
    known = np.zeros(shape[0], np.uint8)
    with suppress(RayltError):                          # what an earlier process noted, if its array is as it was
        noted = np.frombuffer(folder.read(state, shape[0]), np.uint8)
        if len(noted) == len(known) and path.with_name(partial).stat().st_size == _bytes(shape):
            known = noted.copy()
    reasons: dict[int, str] = {}
    todo = np.flatnonzero((known == GONE) | (known == BAD))
    with _array(path.with_name(partial), shape) as stream:
        size, handle = math.prod(shape[1:]), stream.fileno()
        start = stream.seek(0, os.SEEK_END) - math.prod(shape)

        def write(rows: np.ndarray) -> list[int]:
            kinds = []
            for part in _runs(rows, max(1, WRITTEN // size)):
                pixels = np.zeros((len(part), *shape[1:]), np.uint8)
                for place, row in enumerate(part.tolist()):
                    kinds.append(fill(pixels[place], row))
                _write(handle, pixels, start + int(part[0]) * size)
            return kinds

        def fill(pixels: np.ndarray, row: int) -> int:
            try:
                decoded = decode(row)
            except DataError as error:
                reasons[row] = str(error)
                return BAD
            pixels[...] = decoded
            return GREY if grey and decoded.shape[-1] == 1 else COLOUR

        for rows, kinds in _in_parallel(write, todo):
            os.fsync(stream.fileno())
            known[rows] = kinds
            folder.write(state, known.tobytes())
    folder.remove(_bad(path))
    if reasons:
        folder.write(_bad(path), json.dumps(dict(sorted(reasons.items()))))
        if whole:
            return
    if grey and shape[-1] == 3 and not (known == COLOUR).any() and (known == GREY).any():
        _drop_channels(path.with_name(partial), shape)
    folder.write(ABOUT, json.dumps(dict(about)))
    folder.rename(partial, path.name)
    folder.remove(state)


def _runs(rows: np.ndarray, most: int) -> list[np.ndarray]:
    """Rows that follow each other, at most so many of them at a time."""
    runs = np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1)
    return [run[at:at + most] for run in runs for at in range(0, len(run), most)]


def _write(handle: int, pixels: np.ndarray, at: int) -> None:
    """Not through a memory map, which would hold all that was written in this process's memory."""
    left = pixels.reshape(-1).data
    while left:
        written = os.pwrite(handle, left, at)
        left, at = left[written:], at + written


def _in_parallel(write: Callable[[np.ndarray], list[int]], todo: np.ndarray) -> Iterator[tuple[np.ndarray, list[int]]]:
    from PIL.Image import DecompressionBombWarning
    from rich.console import Console
    from rich.progress import track

    parts = [todo[at:at + AT_ONCE] for at in range(0, len(todo), AT_ONCE)]
    cores = len(os.sched_getaffinity(0))

    with ThreadPoolExecutor(cores) as pool, warnings.catch_warnings():      # PIL decodes outside the interpreter lock
        warnings.simplefilter("ignore", DecompressionBombWarning)      # there is a limit of our own
        warnings.filterwarnings("ignore", module="PIL")                # what cannot be decoded is told all at once
        # a whole share for each thread: to hand over one image takes as long as a tenth of its decoding
        done = ((rows, [kind for kinds in pool.map(write, np.array_split(rows, cores)) for kind in kinds])
                for rows in parts)
        yield from track(done, f"decoding {len(todo)} images", len(parts), console=Console(stderr=True),
                         disable=not sys.stderr.isatty())


def _bytes(shape: tuple[int, ...]) -> int:
    return len(_header(shape)) + math.prod(shape)


def _header(shape: tuple[int, ...]) -> bytes:
    content = io.BytesIO()
    np.lib.format.write_array_header_1_0(content, {"descr": "|u1", "fortran_order": False, "shape": shape})
    return content.getvalue()


@contextmanager
def _array(path: Path, shape: tuple[int, ...]) -> Iterator[BinaryIO]:
    """The file of an array, whose place on the disk is taken from the start."""
    size, there = _bytes(shape), path.stat().st_size if path.is_file() else 0
    free = shutil.disk_usage(path.parent).free
    if size - there > free:
        raise DataError(f"{path.parent}: the cache of {shape[0]} images at data.size = {shape[1]} takes "
                        f"{size / 1e9:.1f} GB, {free / 1e9:.1f} are free; lower data.size or move data.root")
    with path.open("r+b" if there == size else "w+b") as stream:
        stream.write(_header(shape))
        stream.truncate(size)
        with suppress(OSError):                         # a file system that cannot
            os.posix_fallocate(stream.fileno(), 0, size)
        stream.flush()
        yield stream


def _drop_channels(path: Path, shape: tuple[int, ...]) -> None:
    """Three equal channels become one, in place of the file."""
    narrow = path.with_suffix(".narrow")
    before = np.memmap(path, np.uint8, "r", len(_header(shape)), shape)
    with narrow.open("wb") as stream:
        stream.write(_header((*shape[:-1], 1)))
        for at in range(0, shape[0], AT_ONCE):
            stream.write(before[at:at + AT_ONCE, ..., :1].tobytes())
    del before
    narrow.replace(path)
