"""Builds caches of decoded images: one array on disk from many small image files.

Decoding runs in parallel, with a progress bar, once for all processes. A second call continues where a killed one
ended. A cache is a folder `NAME-HASH` under data.root/cache. The hash covers everything from which the cache was made:

    images.npy       uint8 [N, H, W, channels]
    about.json       a description for users
    images.bad.json  the rows that could not be decoded, with the reason; absent if all rows could be decoded
    images.partial, images.state    during decoding: the array, and the state of each row
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
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO, NamedTuple

import numpy as np
from pydantic import Field, TypeAdapter

from raylt.data.images.decoding import Undecodable
from raylt.data.images.image_files import shown_name
from raylt.data.images.workers import call_in_processes
from raylt.disk import FULL, file_errors
from raylt.errors import CheckpointError, DataError, RayltError
from raylt.machine import cores
from raylt.store import Folder, folder_for

ABOUT = "about.json"
ROWS_PER_SAVE = 512  # rows between two writes of the state
SHARE = 64  # rows per call, since sending a single row takes half as long as decoding it
SHARE_BYTES = 2**22  # limit on the bytes of contents in a call, which may then have fewer rows
WORTH_S = 1.0  # seconds of decoding that justify a process, whose start takes a fifth of a second
WRITE_BYTES = 2**19  # bytes per write; a write for each small image would take a twentieth of the decoding time
GONE, COLOUR, GREY, BAD = range(4)  # states of a row
_BAD = TypeAdapter(dict[Annotated[str, Field(pattern="^[0-9]{1,15}$")], str])

Decode = Callable[[int, Any], np.ndarray]


def place_of(name: str, key: Any, cache: Path) -> Path:
    """Return the path of the cache folder that belongs to `name` and `key`."""
    return cache.resolve() / f"{name}-{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]}"


def pack(
    path: Path,
    shape: tuple[int, ...],
    given: Callable[[int], Any],
    decode: Decode,
    about: Mapping[str, Any],
    grey: bool = False,
    whole: bool = True,
) -> dict[int, str]:
    """Make a cache array: decode its rows and write them to a file, unless the array already exists.

    Args:
        path: Path of the array.
        shape: Shape of the array, [N, ...].
        given: Row -> input of `decode`: a path, a content, an array; called in this process.
        decode: Row, input -> uint8 of a row's shape. It is called in other processes if there are many rows, so it must
            be picklable. A DataError of `given` or `decode` is kept as the row's reason.
        about: Description of the cache.
        grey: Turn an array of [N, H, W, 3] into [N, H, W, 1] if all rows are grey; `decode` may then return rows of
            one channel.
        whole: Leave the cache unfinished if a row cannot be decoded; the next call retries these rows.

    Returns:
        The rows that could not be decoded, with the reason.

    Raises:
        DataError: The array does not fit on the disk.
        RayltError: A decoding process died; a second call continues where this one ended.
    """
    with folder_for(path.parent) as folder:
        with unfinished(folder, path) as missing:
            if missing:
                _Build(folder, path, shape, given, decode, grey).run(about, whole)
        return bad_rows(folder, path)


@contextmanager
def unfinished(folder: Folder, path: Path) -> Iterator[bool]:
    """Yield whether an array is missing, and lock it against other processes until the block ends.

    Raises:
        DataError: Another process removed the cache in the meantime.
    """
    if path.exists():
        yield False
        return
    try:
        lock = folder.lock("lock", wait=True)  # trials that start together decode once
    except CheckpointError:
        if path.parent.exists():
            raise
        raise _removed(path) from None
    assert lock is not None
    try:
        if not _is_in_place(path, lock):
            raise _removed(path)
        yield not path.exists()
    finally:
        os.close(lock)


def _is_in_place(path: Path, lock: int) -> bool:
    """Return whether the lock of an array's folder is still in that folder, which may have been removed meanwhile."""
    with suppress(OSError):
        return os.path.samestat(os.fstat(lock), os.stat(path.with_name("lock")))
    return False


def _removed(path: Path) -> DataError:
    return DataError(
        f"data.root: the cache {path.parent} was removed while this process waited for it. Run the same command again.",
        code="data.cache-unreadable",
        key="data.root",
        path=str(path),
    )


def bad_rows(folder: Folder, path: Path) -> dict[int, str]:
    """Map the index of each row of an array that could not be decoded to the cause of the failure."""
    bad = folder.read_json(_bad_file(path), _BAD) if folder.has(_bad_file(path)) else {}
    return {int(row): reason for row, reason in bad.items()}


def _bad_file(path: Path) -> str:
    return f"{path.stem}.bad.json"


def _partial(path: Path) -> Path:
    return path.with_name(f"{path.stem}.partial")


class DecodedRows(NamedTuple):
    """Consecutive rows of an array that another process has decoded.

    Attributes:
        pixels: uint8 [n, ...].
        states: COLOUR, GREY or BAD of each row, uint8 [n].
        reasons: Reason of each bad row, by its position among these rows.
    """

    pixels: np.ndarray
    states: np.ndarray
    reasons: dict[int, str]


def append(
    folder: Folder,
    path: Path,
    row: tuple[int, ...],
    parts: Iterable[DecodedRows],
    about: Callable[[int], Mapping[str, Any]],
    grey: bool = False,
    whole: bool = True,
) -> dict[int, str]:
    """Make a cache array from rows that arrive in order, without knowing the number of rows in advance.

    The caller has the folder's lock. After a killed process, the next one starts again with the first row.

    Args:
        folder: The folder of `path`.
        path: Path of the array.
        row: Shape of a row.
        parts: The rows in order.
        about: Number of rows -> description of the cache; called after the last row, before the cache is finished.
        grey, whole: See `pack`.

    Returns:
        The rows that could not be decoded, with the reason.

    Raises:
        DiskFull: The array does not fit on the disk.
    """
    start = len(_header((0, *row)))
    states = [np.empty(0, np.uint8)]
    reasons: dict[int, str] = {}
    count = 0
    with file_errors(path.parent), _partial(path).open("w+b") as stream, _bar(None) as advance:
        for part in parts:
            _write(stream.fileno(), part.pixels, start + count * math.prod(row))
            reasons |= {count + position: reason for position, reason in part.reasons.items()}
            states.append(part.states)
            count += len(part.states)
            advance(len(part.states))
        stream.write(_header((count, *row)))
        stream.flush()
        os.fsync(stream.fileno())
    _finish(folder, path, (count, *row), np.concatenate(states), reasons, grey, about(count), whole)
    return reasons


def _finish(
    folder: Folder,
    path: Path,
    shape: tuple[int, ...],
    states: np.ndarray,
    reasons: dict[int, str],
    grey: bool,
    about: Mapping[str, Any],
    whole: bool,
) -> bool:
    """Rename a completely written array to its final name; return whether the cache is finished."""
    folder.remove(_bad_file(path))
    if reasons:
        folder.write(_bad_file(path), json.dumps(dict(sorted(reasons.items()))))
        if whole:
            return False
    all_grey = not (states == COLOUR).any() and (states == GREY).any()
    if grey and shape[-1] == 3 and all_grey:
        _drop_channels(_partial(path), shape)
    folder.write(ABOUT, json.dumps(dict(about)))
    folder.rename(_partial(path).name, path.name)
    return True


@dataclass(frozen=True, eq=False)
class Filling:
    """The function and settings that decode rows of a cache array.

    It is defined in this module because the module is light to import in processes that only decode.

    Args:
        decode: Row, input -> uint8 of a row's shape.
        shape: Shape of the array, [N, ...].
        start: Number of bytes in the file before its first row.
        grey: Whether `decode` may return rows of one channel for an array of three.
    """

    decode: Decode
    shape: tuple[int, ...]
    start: int
    grey: bool

    def fill(self, handle: int, rows: Sequence[int], given: Sequence[Any]) -> tuple[list[int], dict[int, str]]:
        """Decode rows and write them into the array file.

        Args:
            handle: Handle of the file in this process.
            rows: Numbers of the rows.
            given: Input of each row, or the DataError that was raised instead.

        Returns:
            COLOUR, GREY or BAD for each row, and the reasons of the bad rows.
        """
        states = []
        reasons = {}
        size = math.prod(self.shape[1:])
        for run in _runs(rows, max(1, WRITE_BYTES // size)):
            pixels = np.zeros((len(run), *self.shape[1:]), np.uint8)
            for position, index in enumerate(run):
                try:
                    states.append(self._decode_into(pixels[position], rows[index], given[index]))
                except DataError as error:
                    states.append(BAD)
                    reasons[rows[index]] = error.reason if isinstance(error, Undecodable) else str(error)
            _write(handle, pixels, self.start + rows[run[0]] * size)
        return states, reasons

    def _decode_into(self, pixels: np.ndarray, row: int, given: Any) -> int:
        if isinstance(given, DataError):
            raise given
        decoded = self.decode(row, given)
        pixels[...] = decoded
        return GREY if self.grey and decoded.shape[-1] == 1 else COLOUR


def _runs(rows: Sequence[int], most: int) -> list[range]:
    """Split rows into index ranges of consecutive rows, each of at most `most` rows."""
    begins = [i for i in range(len(rows)) if i == 0 or rows[i] != rows[i - 1] + 1]
    ends = [*begins[1:], len(rows)]
    runs = []
    for begin, end in zip(begins, ends, strict=True):
        runs += [range(i, min(i + most, end)) for i in range(begin, end, most)]
    return runs


def _write(handle: int, pixels: np.ndarray, offset: int) -> None:
    """Write pixels at an offset of a file.

    A memory map would fill this process's memory with them.
    """
    left = pixels.reshape(-1).data
    while left:
        written = os.pwrite(handle, left, offset)
        left = left[written:]
        offset += written


class _Share(NamedTuple):
    """Rows to decode in one call, with their inputs."""

    rows: list[int]
    given: list[Any]

    def __str__(self) -> str:
        first, last = self.given[0], self.given[-1]
        if isinstance(first, str) and isinstance(last, str):
            return f"one of the images from {shown_name(first)} to {shown_name(last)}"
        return f"one of the images {self.rows[0]} to {self.rows[-1]}"


class _Build:
    """A cache that is being built by one process, with the decoding state of each row."""

    def __init__(
        self,
        folder: Folder,
        path: Path,
        shape: tuple[int, ...],
        given: Callable[[int], Any],
        decode: Decode,
        grey: bool,
    ):
        self.folder = folder
        self.path = path
        self.shape = shape
        self.given = given
        self.partial = _partial(path)
        self.state_file = f"{path.stem}.state"
        self.filling = Filling(decode, shape, len(_header(shape)), grey)
        self.states = self._earlier_states()

    def run(self, about: Mapping[str, Any], whole: bool) -> None:
        """Decode the missing rows and finish the cache, as `pack` describes."""
        reasons = self._decode_missing()
        if _finish(self.folder, self.path, self.shape, self.states, reasons, self.filling.grey, about, whole):
            self.folder.remove(self.state_file)

    def _earlier_states(self) -> np.ndarray:
        """Return the decoding state of each row as an earlier process saved it.

        All rows are GONE if that process's array has another size.
        """
        states = np.zeros(self.shape[0], np.uint8)
        with suppress(RayltError):
            written = np.frombuffer(self.folder.read(self.state_file, self.shape[0]), np.uint8)
            if len(written) == len(states) and self.partial.stat().st_size == _bytes(self.shape):
                states = written.copy()
        return states

    def _decode_missing(self) -> dict[int, str]:
        """Decode the rows that are missing or bad; return the cause of each failure by row."""
        reasons: dict[int, str] = {}
        todo = np.flatnonzero((self.states == GONE) | (self.states == BAD))
        unwritten = 0
        with file_errors(self.path.parent), _array(self.partial, self.shape) as stream:
            try:
                with _bar(len(todo)) as advance, closing(self._decoded(stream.fileno(), todo)) as shares:
                    for rows, states, bad in shares:
                        self.states[rows] = states
                        reasons |= bad
                        advance(len(rows))
                        unwritten += len(rows)
                        if unwritten >= ROWS_PER_SAVE:
                            self._write_states(stream)
                            unwritten = 0
            finally:  # save the state even after an interrupt
                if unwritten:
                    self._write_states(stream)
        return reasons

    def _write_states(self, stream: BinaryIO) -> None:
        os.fsync(stream.fileno())
        self.folder.write(self.state_file, self.states.tobytes())

    def _decoded(
        self, handle: int, todo: np.ndarray
    ) -> Generator[tuple[list[int], list[int], dict[int, str]], None, None]:
        """Decode rows in this process, or in one process per CPU core once the remaining work justifies that.

        Yields:
            Rows, their states, and the reasons of the bad ones.
        """
        shares = self._shares(todo)
        left = len(todo)
        most = len(cores())
        for share in shares:
            began = time.perf_counter()
            first = left == len(todo)
            filled = self.filling.fill(handle, *share)
            seconds = time.perf_counter() - began
            yield share.rows, *filled
            left -= len(share.rows)
            workers = min(most, int(seconds / len(share.rows) * left / WORTH_S))
            if workers > 1 and not first:  # do not measure the first call, which also imports modules
                yield from self._in_processes(workers, handle, shares, len(todo))

    def _in_processes(
        self, workers: int, handle: int, shares: Iterator[_Share], total: int
    ) -> Generator[tuple[list[int], list[int], dict[int, str]], None, None]:
        calls = ((share, (self.filling.fill, handle, *share)) for share in shares)
        try:
            with closing(call_in_processes(workers, calls, (handle,))) as results:
                for share, result in results:
                    yield share.rows, *result
        except RayltError as error:
            raise RayltError(
                f"decoding of {total} images: {str(error).removesuffix('.')}. Decoded images are kept; run the same "
                "command again.",
                code="data.decoding-failed",
            ) from None

    def _shares(self, todo: np.ndarray) -> Iterator[_Share]:
        share = _Share([], [])
        size = 0
        for row in todo.tolist():
            try:
                given = self.given(row)
            except DataError as error:
                given = error
            share.rows.append(row)
            share.given.append(given)
            size += len(given) if isinstance(given, bytes) else getattr(given, "nbytes", 0)
            if len(share.rows) == SHARE or size > SHARE_BYTES:
                yield share
                share = _Share([], [])
                size = 0
        if share.rows:
            yield share


@contextmanager
def _bar(total: int | None) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on a terminal until the block ends; `total` is None if it is unknown.

    PIL's warnings are suppressed meanwhile.
    """
    from PIL.Image import DecompressionBombWarning
    from rich.console import Console
    from rich.progress import Progress

    with warnings.catch_warnings(), Progress(console=Console(stderr=True), disable=not sys.stderr.isatty()) as progress:
        warnings.simplefilter("ignore", DecompressionBombWarning)  # decoding.PIXELS is the limit
        warnings.filterwarnings("ignore", module="PIL")  # undecodable images are reported together at the end
        task = progress.add_task("decoding images" if total is None else f"decoding {total} images", total=total)
        yield lambda done: progress.advance(task, done)


def _bytes(shape: tuple[int, ...]) -> int:
    return len(_header(shape)) + math.prod(shape)


def _header(shape: tuple[int, ...]) -> bytes:
    content = io.BytesIO()
    np.lib.format.write_array_header_1_0(content, {"descr": "|u1", "fortran_order": False, "shape": shape})
    return content.getvalue()


@contextmanager
def _array(path: Path, shape: tuple[int, ...]) -> Iterator[BinaryIO]:
    """Open the file of an array for writing, with disk space allocated for all of its bytes."""
    size = _bytes(shape)
    existing = path.stat().st_size if path.is_file() else 0
    free = shutil.disk_usage(path.parent).free
    if size - existing > free:
        raise DataError(
            f"data.size: the cache of {shape[0]} images takes {size / 1e9:.1f} GB, {free / 1e9:.1f} GB are free in "
            f"{path.parent} ({shape[1]}). Lower data.size, or move data.root.",
            code="disk.full",
            key="data.size",
            value=shape[1],
            path=str(path.parent),
        )
    with path.open("r+b" if existing == size else "w+b") as stream:
        stream.write(_header(shape))
        stream.truncate(size)
        if hasattr(os, "posix_fallocate"):  # macOS has none
            try:
                os.posix_fallocate(stream.fileno(), 0, size)
            except OSError as error:
                if error.errno in FULL:
                    if existing != size:  # the file has no decoded row
                        path.unlink()
                    raise
                # ignore other errors: not every file system can allocate space
        stream.flush()
        yield stream


def _drop_channels(path: Path, shape: tuple[int, ...]) -> None:
    """Replace the three equal channels of an array file by a single channel."""
    narrow = path.with_suffix(".narrow")
    with file_errors(path.parent):
        before = np.memmap(path, np.uint8, "r", len(_header(shape)), shape)
        try:
            with narrow.open("wb") as stream:
                stream.write(_header((*shape[:-1], 1)))
                for row in range(0, shape[0], ROWS_PER_SAVE):
                    stream.write(before[row : row + ROWS_PER_SAVE, ..., :1].tobytes())
        except BaseException:
            narrow.unlink(missing_ok=True)
            raise
        del before
        narrow.replace(path)
