"""What the operating system says of files, as errors of one line; and folders for one user alone."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from raylt.errors import CheckpointError, DiskFull

_FULL = {errno.ENOSPC, errno.EDQUOT}


@contextmanager
def told(path: Path) -> Iterator[None]:
    """Failures of the operating system inside the block as errors of raylt about this path."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise DiskFull(path) from None
        # what O_NOFOLLOW says of a link, and O_DIRECTORY of a link to a folder
        if error.errno == errno.ELOOP or (error.errno == errno.ENOTDIR and path.is_symlink()):
            raise CheckpointError(f"{path}: is a link, and none is followed there; put the file itself in its place"
                                  ) from None
        if error.errno == errno.ENXIO:          # a FIFO without a reader, or a socket
            raise CheckpointError(f"{path}: is no plain file; remove it") from None
        raise CheckpointError(f"{path}: {error.strerror or error}") from None


def make(path: Path) -> None:
    """Makes a folder, and those it lies in where they are not there, for this user alone.

    Raises:
        FileExistsError: there is something of its name.
    """
    missing = [parent for parent in path.parents if not parent.is_dir()]
    for parent in reversed(missing):
        with suppress(FileExistsError):
            parent.mkdir(mode=0o700)
    path.mkdir(mode=0o700)


def sync(path: Path) -> None:
    """Waits until a file's or folder's content is on the disk."""
    with told(path):
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
