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
import time
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, BinaryIO, NamedTuple

import numpy as np
from pydantic import Field, TypeAdapter

from raylt.data.filling import BAD, COLOUR, GONE, GREY, Decode, Filling
from raylt.data.listing import shown_name
from raylt.data.processes import call_in_processes
from raylt.errors import DataError, RayltError
from raylt.store import Folder, folder_for

ABOUT = "about.json"
AT_ONCE = 512           # rows between two notes of how far it is
SHARE = 64              # rows that are decoded in one call: to hand over one alone takes as long as half its decoding
SHARE_BYTES = 2**22     # contents in a call, beyond which it has fewer rows
WORTH_S = 1.0           # decoding that a process must have before it: to start it takes a fifth of that
_BAD = TypeAdapter(dict[Annotated[str, Field(pattern="^[0-9]{1,15}$")], str])


class _Share(NamedTuple):
    """Rows, and what each is decoded from."""

    rows: list[int]
    given: list[Any]

    def __str__(self) -> str:
        first, last = self.given[0], self.given[-1]
        if isinstance(first, str) and isinstance(last, str):
            return f"one of the images from {shown_name(first)} to {shown_name(last)}"
        return f"one of the images {self.rows[0]} to {self.rows[-1]}"


_Done = tuple[list[int], list[int], dict[int, str]]        # rows, their kinds, reasons of the bad ones


def place_of(name: str, key: Any, cache: Path) -> Path:
    """The folder of a cache; another key is another cache."""
    return cache.resolve() / f"{name}-{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]}"


def pack(path: Path, shape: tuple[int, ...], given: Callable[[int], Any], decode: Decode, about: Mapping[str, Any],
         grey: bool = False, whole: bool = True) -> dict[int, str]:
    """Makes the array of a cache where it is not there yet.

    Args:
        path: of the array.
        shape: [N, ...] of it.
        given: row -> what it is decoded from: a path, a content, an array; called in this process.
        decode: row, what `given` gave for it -> uint8 of that shape; called in other processes where there are many, so
            it is a value that pickles. A DataError of either is kept as the row's reason.
        about: what the cache is.
        grey: whether an array of [N, H, W, 3] becomes [N, H, W, 1] where all rows are grey: `decode` then gives rows
            of one channel too.
        whole: whether the cache stays unfinished where a row could not be decoded; those are then tried again.

    Returns:
        The rows that could not be decoded, with what their errors say.

    Raises:
        DataError: it does not fit on the disk.
        RayltError: a process that decoded died; a second call goes on where this one was.
    """
    with folder_for(path.parent) as folder:
        if not path.exists():
            # trials that start together decode once
            lock = folder.lock("lock", wait=True)
            assert lock is not None
            try:
                if not path.exists():
                    _make(folder, path, shape, given, decode, about, grey, whole)
            finally:
                os.close(lock)
        bad = folder.read_json(_bad(path), _BAD) if folder.has(_bad(path)) else {}
        return {int(row): reason for row, reason in bad.items()}


def _bad(path: Path) -> str:
    return f"{path.stem}.bad.json"


def _make(folder: Folder, path: Path, shape: tuple[int, ...], given: Callable[[int], Any], decode: Decode,
          about: Mapping[str, Any], grey: bool, whole: bool) -> None:
    partial, state = f"{path.stem}.partial", f"{path.stem}.state"
    known = np.zeros(shape[0], np.uint8)
    with suppress(RayltError):                          # what an earlier process noted, if its array is as it was
        noted = np.frombuffer(folder.read(state, shape[0]), np.uint8)
        if len(noted) == len(known) and path.with_name(partial).stat().st_size == _bytes(shape):
            known = noted.copy()
    reasons: dict[int, str] = {}
    todo = np.flatnonzero((known == GONE) | (known == BAD))
    with _array(path.with_name(partial), shape) as stream:
        filling = Filling(decode, shape, len(_header(shape)), grey)
        unnoted = 0

        def note() -> None:
            os.fsync(stream.fileno())
            folder.write(state, known.tobytes())

        try:
            with _bar(len(todo)) as advance, closing(_decoded(stream.fileno(), filling, todo, given)) as shares:
                for rows, kinds, bad in shares:
                    known[rows] = kinds
                    reasons |= bad
                    advance(len(rows))
                    unnoted += len(rows)
                    if unnoted >= AT_ONCE:
                        note()
                        unnoted = 0
        finally:                                        # also where it was interrupted
            if unnoted:
                note()
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


def _decoded(handle: int, filling: Filling, todo: np.ndarray, given: Callable[[int], Any],
             ) -> Generator[_Done, None, None]:
    """Decodes all, here, and as soon as what is left is worth it in a process for each core."""
    shares, left, cores = _shares(todo, given), len(todo), len(os.sched_getaffinity(0))
    for share in shares:
        began, first = time.perf_counter(), left == len(todo)
        filled = filling.fill(handle, *share)
        seconds = time.perf_counter() - began
        yield share.rows, *filled
        left -= len(share.rows)
        workers = min(cores, int(seconds / len(share.rows) * left / WORTH_S))
        if workers > 1 and not first:                   # the first waits for imports
            calls = ((share, (filling.fill, handle, *share)) for share in shares)
            try:
                with closing(call_in_processes(workers, calls, (handle,))) as done:
                    yield from ((share.rows, *result) for share, result in done)
            except RayltError as error:
                raise RayltError(f"decoding of {len(todo)} images: {error}; what was decoded is kept, the same command "
                                 "goes on there") from None


def _shares(todo: np.ndarray, given: Callable[[int], Any]) -> Iterator[_Share]:
    share, size = _Share([], []), 0
    for row in todo.tolist():
        try:
            of_row = given(row)
        except DataError as error:
            of_row = error
        share.rows.append(row)
        share.given.append(of_row)
        size += len(of_row) if isinstance(of_row, bytes) else getattr(of_row, "nbytes", 0)
        if len(share.rows) == SHARE or size > SHARE_BYTES:
            yield share
            share, size = _Share([], []), 0
    if share.rows:
        yield share


@contextmanager
def _bar(total: int) -> Iterator[Callable[[int], None]]:
    """Shows how far it is, on a terminal; hushes what PIL warns of."""
    from PIL.Image import DecompressionBombWarning
    from rich.console import Console
    from rich.progress import Progress

    with (warnings.catch_warnings(),
          Progress(console=Console(stderr=True), disable=not sys.stderr.isatty()) as progress):
        warnings.simplefilter("ignore", DecompressionBombWarning)      # there is a limit of our own
        warnings.filterwarnings("ignore", module="PIL")                # what cannot be decoded is told all at once
        task = progress.add_task(f"decoding {total} images", total=total)
        yield lambda done: progress.advance(task, done)


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
