"""Safe access to the files of run, study and search folders, which may come from other people.

A `Folder` keeps a handle of a folder open and reaches the folder's files by plain names from this handle:

- A symbolic link is never followed, and opening a FIFO or a device never blocks.
- A file is written under another name and renamed when it is complete.
- A file that is read has a size limit.
- Folders have mode 700, files mode 600.

Every failure raises one of raylt's errors, with the path.
"""

import errno
import hashlib
import os
import secrets
import shutil
import stat
import zipfile
from contextlib import AbstractContextManager, suppress
from io import BufferedReader, BufferedWriter
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter

from raylt.disk import file_errors, make
from raylt.errors import CheckpointError, RayltError
from raylt.typed_json import as_json

try:
    import fcntl
except ImportError:
    raise RayltError(
        "raylt: this Python has no fcntl module, which is needed to lock run folders (Windows). Install raylt in WSL, "
        "the Windows Subsystem for Linux (wsl --install).",
        code="system.unsupported",
    ) from None

T = TypeVar("T")
MIB = 2**20
MAX_BYTES = 64 * MIB  # Default size limit of a file that is read into memory.
LAST_LINE_BYTES = 64 * 1024  # Size of the first window at the end of a file in which the last line is searched.
WRITING = ".writing"  # Suffix of a file's name until the file is complete.
# without O_NONBLOCK, opening a FIFO waits for a process at its other end
_PLAIN = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class Folder:
    """A folder with an open handle, which finds the folder's files even if its path changes.

    Args:
        path: Path of the folder, for errors.
        handle: File descriptor of the open folder; `__exit__` closes it.
    """

    def __init__(self, path: Path, handle: int):
        self.path, self._handle = path, handle

    @classmethod
    def open(cls, path: Path) -> "Folder":
        """Open the folder at a path that the user named, which may be a symbolic link."""
        with file_errors(path):
            return cls(path, os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))

    def __enter__(self) -> "Folder":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._handle)

    def inner(self, name: str, make: bool = False) -> "Folder":
        """Open a subfolder; with `make`, make the subfolder first if it does not exist."""
        with self._errors(name):
            if make:
                with suppress(FileExistsError):
                    os.mkdir(name, 0o700, dir_fd=self._handle)
            handle = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=self._handle)
        return Folder(self.path / name, handle)

    def new(self, name: str) -> "Folder":
        """Make a subfolder, whose name must be free, and open it."""
        with self._errors(name):
            os.mkdir(name, 0o700, dir_fd=self._handle)
        return self.inner(name)

    def names(self) -> list[str]:
        """Return the sorted names of all files and folders in this folder."""
        return sorted(os.listdir(self._handle))

    def unfinished(self) -> list[str]:
        """Return the names of files that a process is writing, or was writing when the process was killed."""
        return [name for name in self.names() if name.startswith(".") and name.endswith(WRITING)]

    def has(self, name: str) -> bool:
        """Return whether the folder has a plain file of this name."""
        with self._errors(name), suppress(FileNotFoundError):
            return stat.S_ISREG(os.stat(name, dir_fd=self._handle, follow_symlinks=False).st_mode)
        return False

    def read(self, name: str, limit: int = MAX_BYTES) -> bytes:
        """Return the content of a file of at most `limit` bytes.

        Raises:
            CheckpointError: The file is larger than `limit`, or cannot be read.
        """
        with self.stream(name) as stream, self._errors(name):
            if (size := os.fstat(stream.fileno()).st_size) > limit:
                raise CheckpointError(
                    f"{self.path / name}: is too large ({size:,} bytes, at most {limit:,}). Remove it, or use an "
                    "intact copy.",
                    code="file.too-large",
                    path=str(self.path / name),
                )
            return stream.read(limit)

    def stream(self, name: str) -> BufferedReader:
        """Open a plain file for reading."""
        with self._errors(name):
            return os.fdopen(self._plain(name, os.O_RDONLY), "rb")

    def read_text(self, name: str, limit: int = MAX_BYTES) -> str:
        """Return the content of a text file of at most `limit` bytes.

        Raises:
            CheckpointError: The file is not UTF-8, is larger than `limit`, or cannot be read.
        """
        try:
            return self.read(name, limit).decode()
        except UnicodeDecodeError as error:
            raise CheckpointError(
                f"{self.path / name}: is not UTF-8 ({error}). Remove it, or use an intact copy.",
                code="file.malformed",
                path=str(self.path / name),
            ) from None

    def read_json(self, name: str, kind: "TypeAdapter[T]", limit: int = MAX_BYTES) -> T:
        """Return the content of a JSON file, checked against a type."""
        return as_json(self.read(name, limit), kind, str(self.path / name))

    def last_line(self, name: str) -> bytes:
        """Return the last line of a file that ends with a line break, or nothing if there is no such line."""
        with self.stream(name) as stream, self._errors(name):
            size = stream.seek(0, os.SEEK_END)
            window = LAST_LINE_BYTES
            while True:
                start = max(0, size - window)
                stream.seek(start)
                whole, _, _ = stream.read(size - start).rpartition(b"\n")
                _, earlier, line = whole.rpartition(b"\n")
                if earlier or start == 0:
                    return line
                window *= 8

    def hash(self, name: str) -> str:
        """Return the SHA-256 of a file's content."""
        with self.stream(name) as stream, self._errors(name):
            return hashlib.file_digest(stream, "sha256").hexdigest()

    def place(self, name: str) -> Path:
        """Return the path of a plain file in the folder, for libraries that read by path."""
        with self._errors(name):
            os.close(self._plain(name, os.O_RDONLY))
        return self.path / name

    def write(self, name: str, content: bytes | str) -> None:
        """Write a whole file atomically, replacing any file of the same name.

        Raises:
            CheckpointError: The name belongs to a device, a FIFO or a socket, such as /dev/null, which must not be
                replaced.
        """
        content = content.encode() if isinstance(content, str) else content
        temporary = f".{name}.{secrets.token_hex(8)}{WRITING}"
        with self._errors(name):
            self._check_replaceable(name)
            handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _PLAIN, 0o600, dir_fd=self._handle)
            try:
                with os.fdopen(handle, "wb") as stream:
                    stream.write(content)
                    stream.flush()
                    os.fsync(handle)
                os.replace(temporary, name, src_dir_fd=self._handle, dst_dir_fd=self._handle)
            except BaseException:
                with suppress(OSError):
                    os.unlink(temporary, dir_fd=self._handle)
                raise
            os.fsync(self._handle)

    def append(self, name: str, content: bytes | str) -> None:
        """Append to a file, and flush the file to the disk."""
        with self._errors(name), self.log(name) as stream:
            stream.write(content.encode() if isinstance(content, str) else content)
            stream.flush()
            os.fsync(stream.fileno())

    def log(self, name: str) -> BufferedWriter:
        """Open a file for appending.

        Raises:
            CheckpointError: The file has other hard links, or cannot be opened.
        """
        with self._errors(name):
            stream = os.fdopen(self._plain(name, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab")
        links = os.fstat(stream.fileno()).st_nlink
        if links > 1:
            stream.close()
            raise CheckpointError(
                f"{self.path / name}: the file has other hard links, which would change too ({links} links). Replace "
                "it with a copy.",
                code="file.not-plain",
                path=str(self.path / name),
            )
        return stream

    def lock(self, name: str, wait: bool = False) -> int | None:
        """Take the named lock and return its handle. Closing the handle releases the lock.

        Args:
            name: Name of the lock file.
            wait: Whether to wait if another process holds the lock. Otherwise the method returns None.
        """
        with self._errors(name):
            handle = self._plain(name, os.O_RDWR | os.O_CREAT)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                os.close(handle)
                return None
            except BaseException:
                os.close(handle)
                raise
            return handle

    def is_locked(self, name: str) -> bool:
        """Return whether a process holds the named lock."""
        with suppress(OSError, CheckpointError):
            handle = self._plain(name, os.O_RDONLY)
            try:
                fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            finally:
                os.close(handle)
        return False  # the file does not exist, or this user may not open it

    def rename(self, old: str, new: str) -> None:
        """Rename a file or folder in this folder, and flush the change to the disk."""
        with self._errors(new):
            os.replace(old, new, src_dir_fd=self._handle, dst_dir_fd=self._handle)
            os.fsync(self._handle)

    def move(self, name: str, target: "Folder") -> None:
        """Move a file into another folder, replacing any file of the same name there."""
        with self._errors(name):
            os.replace(name, name, src_dir_fd=self._handle, dst_dir_fd=target._handle)
            os.fsync(target._handle)

    def link(self, name: str, target: "Folder") -> None:
        """Make a hard link to a file, under the same name, in another folder.

        Raises:
            OSError: The file system cannot link files.
        """
        os.close(self._plain(name, os.O_RDONLY))
        os.link(name, name, src_dir_fd=self._handle, dst_dir_fd=target._handle, follow_symlinks=False)

    def copy(self, name: str, target: "Folder") -> None:
        """Copy a file into another folder, where its name must be free, and flush the copy to the disk."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _PLAIN
        with (
            target._errors(name),
            os.fdopen(self._plain(name, os.O_RDONLY), "rb") as source,
            os.fdopen(os.open(name, flags, 0o600, dir_fd=target._handle), "wb") as stream,
        ):
            shutil.copyfileobj(source, stream, MIB)
            stream.flush()
            os.fsync(stream.fileno())

    def remove(self, name: str) -> None:
        """Remove a file, a symbolic link (not its target), or a folder with its content."""
        with self._errors(name), suppress(FileNotFoundError):
            if stat.S_ISDIR(os.stat(name, dir_fd=self._handle, follow_symlinks=False).st_mode):
                shutil.rmtree(name, dir_fd=self._handle)
            else:
                os.unlink(name, dir_fd=self._handle)

    def _plain(self, name: str, flags: int) -> int:
        """Open a plain file in the folder and return its handle."""
        handle = os.open(name, flags | _PLAIN, 0o600, dir_fd=self._handle)
        mode = os.fstat(handle).st_mode
        if not stat.S_ISREG(mode):
            os.close(handle)
            remedy = "Give the path of a file" if stat.S_ISDIR(mode) else "Remove it"
            raise CheckpointError(
                f"{self.path / name}: is not a plain file ({stat.filemode(mode)}). {remedy}.",
                code="file.not-plain",
                path=str(self.path / name),
            )
        return handle

    def _check_replaceable(self, name: str) -> None:
        with suppress(FileNotFoundError):
            mode = os.stat(name, dir_fd=self._handle).st_mode
            link = stat.S_ISLNK(os.lstat(name, dir_fd=self._handle).st_mode)
            # /dev/stdout is a link into /proc, and may lead to a plain file
            stream = link and os.readlink(name, dir_fd=self._handle).startswith("/proc/")
            if stream or not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                raise CheckpointError(
                    f"{self.path / name}: is not a plain file ({stat.filemode(mode)}). Give the path of a file.",
                    code="file.not-plain",
                    path=str(self.path / name),
                )

    def _errors(self, name: str) -> AbstractContextManager[None]:
        """Return a context manager that adds the path of a file to file errors.

        Raises:
            CheckpointError: The name is not a valid file name.
        """
        if name in ("", ".", "..") or "/" in name or "\0" in name:
            raise CheckpointError(
                f"{self.path}: cannot have a file of this name ({name!r}). Use a name without slashes.",
                code="file.bad-name",
                name=name,
            )
        return file_errors(self.path / name)


def folder_for(path: Path) -> Folder:
    """Open the folder at a path; make the folder first if it does not exist."""
    with file_errors(path), suppress(FileExistsError):
        make(path)
    return Folder.open(path)


def read(path: Path, limit: int = MAX_BYTES) -> bytes:
    """Return the content of a file that the user named. The path may be a symbolic link."""
    path = resolved_path(path)
    with Folder.open(path.parent) as folder:
        return folder.read(path.name, limit)


def plain_file(path: Path) -> Path:
    """Resolve the path of a plain file that the user named, for libraries that read by path.

    Raises:
        CheckpointError: The path does not exist, or is not a plain file.
    """
    path = resolved_path(path)
    with Folder.open(path.parent) as folder:
        return folder.place(path.name)


def check_archive(path: Path) -> None:
    """Check that a zip file does not unpack to more than its own size.

    Raises:
        CheckpointError: The entries declare more bytes than the file has, or the file is damaged.
    """
    if not zipfile.is_zipfile(path):
        return
    try:
        with zipfile.ZipFile(path) as archive:
            declared = sum(entry.file_size for entry in archive.infolist())
    except (zipfile.BadZipFile, ValueError, NotImplementedError, EOFError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(
            f"{path}: is damaged ({reason}). Use an intact copy.", code="file.malformed", path=str(path)
        ) from None
    size = path.stat().st_size
    if declared > size:
        raise CheckpointError(
            f"{path}: declares an uncompressed size larger than the file ({declared:,} of {size:,} bytes). Use another "
            "file.",
            code="file.too-large",
            path=str(path),
        )


def resolved_path(path: Path) -> Path:
    """Make a path absolute and resolve its symbolic links.

    Raises:
        CheckpointError: The links form a loop, or the path is invalid.
    """
    try:
        with file_errors(path):
            target = path.resolve()
            if _is_loop(target):
                raise RuntimeError
            return target
    except (RuntimeError, ValueError) as error:  # a loop, before Python 3.13 also from resolve; a null character
        reason = "is a loop of links" if isinstance(error, RuntimeError) else str(error)
        raise CheckpointError(
            f"{path}: cannot be used ({reason}). Give the path of a file.", code="file.not-plain", path=str(path)
        ) from None


def _is_loop(path: Path) -> bool:
    try:
        path.stat()
    except OSError as error:
        return error.errno == errno.ELOOP
    return False


def write(path: Path, content: bytes | str) -> None:
    """Write a file given by its path, as `Folder.write` does."""
    with Folder.open(path.parent) as folder:
        folder.write(path.name, content)
