"""Convert the operating system's file errors to raylt's errors, and make folders that only the user can open."""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from raylt.errors import CheckpointError, ConfigError, DiskFull, shorten, spoken, type_name

LONGEST_NAME = 240  # Maximum length of a name in bytes; file systems allow 255, and raylt appends suffixes.
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}  # EFBIG: the file would exceed `ulimit -f`.


@contextmanager
def file_errors(path: Path) -> Iterator[None]:
    """Convert operating system errors inside the block to raylt's errors about this path."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise DiskFull(path, error.errno == errno.EFBIG) from None
        # O_NOFOLLOW gives ELOOP for a link, O_DIRECTORY gives ENOTDIR for a link to a folder
        if error.errno == errno.ELOOP or (error.errno == errno.ENOTDIR and path.is_symlink()):
            raise CheckpointError(
                f"{path}: is a symbolic link, which raylt does not follow here. Replace the link with the file itself.",
                code="file.not-plain",
                path=str(path),
            ) from None
        if error.errno == errno.ENXIO:  # a FIFO without a reader, or a socket
            raise CheckpointError(
                f"{path}: is not a plain file. Remove it.", code="file.not-plain", path=str(path)
            ) from None
        raise CheckpointError(
            f"{path}: cannot be used ({error.strerror or error}). Check the path and its permissions.",
            code="file.unreadable",
            path=str(path),
        ) from None


@contextmanager
def continuable(folder: Path, command: str) -> Iterator[None]:
    """Wrap the work on a run or search, so that the error of a full disk names the command that continues it."""
    try:
        yield
    except DiskFull as error:
        raise error.continued(folder, command) from None


def is_file(path: Path) -> bool:
    """Return whether a path is a plain file. An invalid path gives False.

    Raises:
        CheckpointError: The user may not enter the path's folder.
    """
    return stat.S_ISREG(_mode(path))


def is_folder(path: Path) -> bool:
    """Return whether a path is a folder. An invalid path gives False.

    Raises:
        CheckpointError: The user may not enter the path's folder.
    """
    return stat.S_ISDIR(_mode(path))


def exists(path: Path) -> bool:
    """Return whether a path exists. An invalid path gives False.

    Raises:
        CheckpointError: The user may not enter the path's folder.
    """
    return _mode(path) != 0


def _mode(path: Path) -> int:
    """Return the type and permissions of a path, as `os.stat` gives them; 0 if there is no such path."""
    try:
        return os.stat(path).st_mode
    except PermissionError:  # to say that the path does not exist may be wrong
        with file_errors(path):
            raise
    except (OSError, ValueError):
        return 0


def as_path(value: Path | str, key: str) -> Path:
    """Return a path that the user gave.

    Args:
        value: The path.
        key: The argument, for the error.

    Raises:
        ConfigError: The value is neither a string nor a path.
    """
    if isinstance(value, os.PathLike | str):
        return Path(value)
    raise ConfigError(
        f"{key}: is not a path ({type_name(value)}). Give a string or a pathlib.Path.",
        code="config.wrong-type",
        key=key,
        value=type_name(value),
    )


def folder_path(value: Path | str, key: str) -> Path:
    """Return a folder that the user gave, as a path that stays valid when the current folder changes.

    At the shell, where the current folder stays the same, the path stays as the user typed it.

    Args:
        value: The path.
        key: The argument, for the error.

    Raises:
        ConfigError: The value is neither a string nor a path.
    """
    path = as_path(value, key)
    return Path(spoken(str(path), str(path.absolute())))


def check_target(path: Path, key: str) -> None:
    """Check that a file can be written, before the work whose result it will hold.

    Args:
        path: The file.
        key: The option or argument that names it, for the error.

    Raises:
        ConfigError: The path is a folder, or its folder does not exist or cannot be written to.
    """
    if not is_folder(path.parent):
        reason = "there is no such folder"
    elif is_folder(path):
        reason = "it is a folder"
    elif not os.access(path.parent, os.W_OK):
        reason = "its folder cannot be written to"
    else:
        return
    raise ConfigError(
        f"{key}: {path} cannot be written ({reason}). Give a file in a folder that can be written to.",
        code="file.unwritable",
        key=key,
        path=str(path),
    )


def named(path: Path) -> Path:
    """Return a path that ends in the name of its folder: `.` and paths that end in `..` become absolute."""
    return path.resolve() if path.name in ("", "..") else path


def check_name(name: str, key: str) -> None:
    """Check that a name is printable and usable as the name of a single folder.

    Args:
        name: The name of the folder.
        key: The setting or argument that holds the name, for the error.

    Raises:
        ConfigError: The name is empty, a path, too long for a file system, or has a character that cannot be printed.
    """
    text = str(name)  # an argument in Python may be of any type
    plain = text == name and text.isprintable() and "/" not in text and text not in ("", ".", "..")
    if not plain or len(text.encode()) > LONGEST_NAME:
        raise ConfigError(
            f"{key}: must be the name of one folder, printable and of at most {LONGEST_NAME} bytes "
            f"({ascii(shorten(text)) if text == name else type_name(name)}). Give another name.",
            code="config.out-of-range",
            key=key,
            value=name,
        )


def make(path: Path) -> None:
    """Make a folder and its missing parents, with mode 700.

    Raises:
        FileExistsError: The path exists already.
    """
    missing = [parent for parent in path.parents if not parent.is_dir()]
    for parent in reversed(missing):
        with suppress(FileExistsError):
            parent.mkdir(mode=0o700)
    path.mkdir(mode=0o700)


def sync(path: Path) -> None:
    """Flush the content of a file or folder to the disk."""
    with file_errors(path):
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
