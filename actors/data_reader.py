"""The process that reads a `ray:` source with Ray Data into the cache of decoded images.

`raylt.data.sources.ray_data` starts the process, sends a `Reading` and receives None or an error. The process has its
own Ray session, in the cluster that RAYLT_ADDRESS or the Ray job names, or in a new local one. It ends when its parent
closes the pipe.
"""

import logging
import os
import signal
import sys
import threading
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from multiprocessing.connection import Connection
from pathlib import PurePosixPath
from typing import Any

import numpy as np

from actors.cluster.session import session
from raylt.data.images.cache_builder import BAD, DecodedRows, append, unfinished
from raylt.data.images.decoding import Undecodable
from raylt.data.images.image_files import shown_name
from raylt.data.images.image_trees import undecodable
from raylt.data.sources.labels import CodedLabels, NameCodes
from raylt.data.sources.ray_data import (
    INDEX,
    Columns,
    DecodeBatch,
    Reading,
    file_system,
    find_columns,
    image_parts,
    index_bytes,
)
from raylt.errors import DataError, RayltError, describe_error
from raylt.store import Folder, folder_for


def main() -> None:
    """Read the data set that the parent process requests; send the parent None, or the error if reading fails."""
    channel = Connection(int(sys.argv[1]))
    reading = channel.recv()
    threading.Thread(target=_end_with, args=(channel,), daemon=True).start()
    problem: RayltError | None = None
    try:
        read(reading)
    except RayltError as error:
        problem = error
    except KeyboardInterrupt:
        return
    except Exception as error:
        problem = RayltError(
            f"data.source: {reading.name} cannot be read ({describe_error(error)}). Please report it.",
            code="data.decoding-failed",
            key="data.source",
            value=reading.name,
        )
    channel.send(problem)


def _end_with(channel: Connection) -> None:
    """End this process when its parent closes the pipe or dies."""
    try:
        channel.recv()
    except (EOFError, OSError):
        os.kill(os.getpid(), signal.SIGTERM)


def read(reading: Reading) -> None:
    """Write a source's images and labels to its cache, unless another process has already done so.

    Raises:
        ConfigError: See `find_columns`.
        DataError: Files cannot be read, labels are not classes, or images cannot be decoded and are not skipped.
    """
    with folder_for(reading.array.parent) as folder, unfinished(folder, reading.array) as missing:
        if missing:
            with session(None):
                _Read(reading, folder).run()


class _Read:
    """One pass that reads a source into its cache, and the labels read so far."""

    def __init__(self, reading: Reading, folder: Folder):
        import ray.data

        logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # it logs each step
        context = ray.data.DataContext.get_current()
        context.execution_options.preserve_order = True
        context.enable_progress_bars = False
        context.print_on_execution_start = False
        self.data: Any = ray.data
        self.reading = reading
        self.folder = folder
        self.labels = NameCodes("data.label_column", reading.name)
        self.clients = NameCodes("data.client_column", reading.name)
        self.parts = image_parts(reading) if reading.kind == "images" else []
        self.count = 0
        self.training = 0
        self.deep: bool | None = None

    def run(self) -> None:
        """Read all parts, and finish the cache if every image is usable or may be skipped."""
        how = self.reading.how
        self.columns = self._find_columns()
        decode = DecodeBatch(self.columns, how)
        grey = self.columns.shape is None and how.channels == "auto"
        with closing(self._rows(decode)) as rows:
            bad = append(self.folder, self.reading.array, decode.row, rows, self._finish, grey, how.bad == "stop")
        if bad and how.bad == "stop":
            raise undecodable(bad, self.reading.array)

    def _finish(self, count: int) -> dict[str, Any]:
        """Write the index of all rows, and return the description of the cache."""
        reading = self.reading
        if self.parts:
            self.labels.add(np.array([name for part in self.parts for name in part.classes]))
            if self.parts[0].clients is not None:
                self.clients.add(np.array([name for part in self.parts for name in part.clients or ()]))
        tar = reading.kind == "webdataset"
        class_names, classes = self.labels.sorted(self.columns.numbers or (tar and self.labels.integers))
        client_names = clients = None
        if self.clients.count:
            client_names, clients = self.clients.sorted(self.columns.client_numbers or (tar and self.clients.integers))
        labels = CodedLabels(classes, class_names, clients, client_names, self.training, reading.test is not None)
        self.folder.write(INDEX, index_bytes(labels, bool(self.deep)))
        return {"of": reading.name, "images": count, "size": (self.columns.shape or (reading.how.size,))[0]}

    def _find_columns(self) -> Columns:
        if self.parts:
            return Columns("bytes", None, None, "path")
        with self._errors():
            data = self._open(self.reading.train)
            first = next(iter(data.limit(1).iter_batches(batch_size=1, batch_format="numpy")), None)
        if first is None:
            raise DataError(
                f"data.source: {self.reading.name} has no rows. Give a data set with images.",
                code="data.too-few",
                key="data.source",
                value=self.reading.name,
            )
        return find_columns(self.reading, {name: values[0] for name, values in first.items()})

    def _open(self, files: tuple[str, ...]) -> Any:
        """Return the rows of some files as a Ray data set, in the order of the files."""
        system, top = file_system(self.reading.address)
        paths = [str(PurePosixPath(top, file)) for file in files]
        match self.reading.kind:
            case "parquet":
                return self.data.read_parquet(paths, filesystem=system, partitioning=None)
            case "webdataset":
                return self.data.read_webdataset(paths, filesystem=system, decoder=None)
            case "images":
                return self.data.read_binary_files(paths, filesystem=system, include_paths=True)

    def _rows(self, decode: DecodeBatch) -> Generator[DecodedRows, None, None]:
        """Yield the decoded rows of all parts, and collect their labels."""
        for files in (self.reading.train, self.reading.test):
            if files is None:
                continue
            expected = iter(files)
            with self._errors():
                decoded = (
                    self._open(files)
                    .select_columns(self.columns.named)
                    .map_batches(decode, batch_size=decode.rows, batch_format="numpy", zero_copy_batch=True)
                )
                for batch in decoded.iter_batches(batch_size=None, batch_format="numpy"):
                    yield self._take(batch, expected)
            if files is self.reading.train:
                self.training = self.count

    def _take(self, batch: dict[str, np.ndarray], expected: Iterator[str]) -> DecodedRows:
        """Collect the labels of a batch, and return its rows."""
        if self.parts:
            for file, name in zip(batch["file"].tolist(), expected, strict=False):
                assert file.endswith(name), f"Ray Data returned {file} instead of {name}"
        else:
            self.labels.add(batch["label"])
            if self.columns.client is not None:
                self.clients.add(batch["client"])
        if self.deep is None and (batch["state"] != BAD).any():
            self.deep = bool(batch["deep"][np.argmax(batch["state"] != BAD)])
        reasons = {}
        for position in np.flatnonzero(batch["state"] == BAD).tolist():
            name = batch["file"][position] or f"row {self.count + position}"
            reasons[position] = Undecodable(shown_name(name), batch["cause"][position]).reason
        self.count += len(batch["state"])
        # copy the states, because a view would keep the whole block in the object store
        return DecodedRows(np.ascontiguousarray(batch["pixels"]), batch["state"].copy(), reasons)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Convert errors of Ray Data and of the file system to a DataError with a message of one line."""
        try:
            yield
        except RayltError:
            raise
        except Exception as error:  # Ray Data and pyarrow raise errors of many types
            raise DataError(
                f"data.source: Ray Data cannot read {self.reading.name} ({_last_line(error)}). Check that its files "
                "are complete and have the same columns.",
                code="data.malformed",
                key="data.source",
                value=self.reading.name,
            ) from None


def _last_line(error: Exception) -> str:
    """Return the last line of an error message, which in Ray's errors names the cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
