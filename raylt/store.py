"""Files of run, study and search folders. A folder may come from somebody else, so nothing in it is trusted to be what
its name says.

A `Folder` is held open, and what is in it is reached by plain names from there: a link is never followed, a FIFO or a
device is never opened to wait for it, a file that is written has another name until it is whole, in a place that was
made for it alone, and a file that is read has a limit. Folders are made with mode 700, files with 600. Every failure is
one line (raylt.errors): what is the matter with which file.
"""

import fcntl
import hashlib
import os
import secrets
import shutil
import stat
from contextlib import AbstractContextManager, suppress
from io import BufferedReader, BufferedWriter
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter

from raylt.disk import make, told
from raylt.errors import CheckpointError
from raylt.typed import as_json

T = TypeVar("T")
MIB = 2**20
LIMIT = 64 * MIB            # of a file that is read whole, unless whoever reads it knows better
WRITING = ".writing"        # how names end that a file has until it is whole
# NONBLOCK: opening a FIFO would otherwise wait for somebody at its other end
_PLAIN = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class Folder:
    """A folder that is held open.

    Args:
        path: what errors call it.
        handle: of the folder, closed with it.
    """

    def __init__(self, path: Path, handle: int):
        self.path, self._handle = path, handle

    @classmethod
    def open(cls, path: Path) -> "Folder":
        """The folder at a path. The path itself is its user's, who may have put a link there."""
        with told(path):
            return cls(path, os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))

    def __enter__(self) -> "Folder":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._handle)

    def inner(self, name: str, make: bool = False) -> "Folder":
        """A folder in this one, made where it is not there yet if `make` says so."""
        with self._told(name):
            if make:
                with suppress(FileExistsError):
                    os.mkdir(name, 0o700, dir_fd=self._handle)
            handle = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=self._handle)
        return Folder(self.path / name, handle)

    def new(self, name: str) -> "Folder":
        """A folder in this one that was not there before."""
        with self._told(name):
            os.mkdir(name, 0o700, dir_fd=self._handle)
        return self.inner(name)

    def names(self) -> list[str]:
        """What is in it, in order."""
        return sorted(os.listdir(self._handle))

    def unfinished(self) -> list[str]:
        """Names of files that are being written, or that a process left that was killed while it wrote."""
        return [name for name in self.names() if name.startswith(".") and name.endswith(WRITING)]

    def has(self, name: str) -> bool:
        """Whether there is a plain file of this name."""
        with self._told(name), suppress(FileNotFoundError):
            return stat.S_ISREG(os.stat(name, dir_fd=self._handle, follow_symlinks=False).st_mode)
        return False

    def read(self, name: str, limit: int = LIMIT) -> bytes:
        """The content of a file of at most `limit` bytes."""
        with self.stream(name) as stream, self._told(name):
            if (size := os.fstat(stream.fileno()).st_size) > limit:
                raise CheckpointError(f"{self.path / name}: has {size:,} bytes, at most {limit:,} can be right")
            return stream.read(limit)

    def stream(self, name: str) -> BufferedReader:
        """A plain file, opened to be read."""
        with self._told(name):
            return os.fdopen(self._plain(name, os.O_RDONLY), "rb")

    def read_text(self, name: str, limit: int = LIMIT) -> str:
        """The same of a text."""
        try:
            return self.read(name, limit).decode()
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self.path / name}: is not UTF-8 ({error})") from None

    def read_json(self, name: str, kind: "TypeAdapter[T]", limit: int = LIMIT) -> T:
        """The content of a JSON file that is of a kind."""
        return as_json(self.read(name, limit), kind, str(self.path / name))

    def hash(self, name: str) -> str:
        """SHA-256 of a file's content."""
        with self.stream(name) as stream, self._told(name):
            return hashlib.file_digest(stream, "sha256").hexdigest()

    def place(self, name: str) -> Path:
        """The path of a plain file, for libraries that read by path."""
        with self._told(name):
            os.close(self._plain(name, os.O_RDONLY))
        return self.path / name

    def write(self, name: str, content: bytes | str) -> None:
        """Puts a file there, or in the place of what is there, in one step."""
        content = content.encode() if isinstance(content, str) else content
        beside = f".{name}.{secrets.token_hex(8)}{WRITING}"
        with self._told(name):
            handle = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _PLAIN, 0o600, dir_fd=self._handle)
            try:
                with os.fdopen(handle, "wb") as stream:
                    stream.write(content)
                    stream.flush()
                    os.fsync(handle)
                os.replace(beside, name, src_dir_fd=self._handle, dst_dir_fd=self._handle)
            except BaseException:
                with suppress(OSError):
                    os.unlink(beside, dir_fd=self._handle)
                raise
            os.fsync(self._handle)

    def append(self, name: str, content: bytes | str) -> None:
        """Adds to the end of a file, and waits until that is on the disk."""
        with self._told(name), self.log(name) as stream:
            stream.write(content.encode() if isinstance(content, str) else content)
            stream.flush()
            os.fsync(stream.fileno())

    def log(self, name: str) -> BufferedWriter:
        """A file that is added to at its end."""
        with self._told(name):
            stream = os.fdopen(self._plain(name, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab")
        if os.fstat(stream.fileno()).st_nlink > 1:
            stream.close()
            raise CheckpointError(f"{self.path / name}: has a second name elsewhere, whose content would change; "
                                  "put a copy in its place")
        return stream

    def lock(self, name: str, wait: bool = False) -> int | None:
        """A handle that holds the lock of this name until it is closed; None where another process has it, unless it is
        waited for."""
        with self._told(name):
            handle = self._plain(name, os.O_RDWR | os.O_CREAT)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                os.close(handle)
                return None
            return handle

    def held(self, name: str) -> bool:
        """Whether a process has the lock of this name."""
        with suppress(OSError, CheckpointError):
            handle = self._plain(name, os.O_RDONLY)
            try:
                fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            finally:
                os.close(handle)
        return False            # never run by anyone, or nobody's to look at

    def rename(self, old: str, new: str) -> None:
        """Gives something in this folder another name, and waits until that is on the disk."""
        with self._told(new):
            os.replace(old, new, src_dir_fd=self._handle, dst_dir_fd=self._handle)
            os.fsync(self._handle)

    def move(self, name: str, target: "Folder") -> None:
        """Moves a file into another folder, in the place of what has its name there."""
        with self._told(name):
            os.replace(name, name, src_dir_fd=self._handle, dst_dir_fd=target._handle)
            os.fsync(target._handle)

    def link(self, name: str, target: "Folder") -> None:
        """Gives a file the same name in another folder, as a second name of the same file.

        Raises:
            OSError: the file system cannot do that.
        """
        os.close(self._plain(name, os.O_RDONLY))
        os.link(name, name, src_dir_fd=self._handle, dst_dir_fd=target._handle, follow_symlinks=False)

    def copy(self, name: str, target: "Folder") -> None:
        """Copies a file into another folder, where there is none of its name, and waits until it is on the disk."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _PLAIN
        with target._told(name), os.fdopen(self._plain(name, os.O_RDONLY), "rb") as source, os.fdopen(
                os.open(name, flags, 0o600, dir_fd=target._handle), "wb") as stream:
            shutil.copyfileobj(source, stream, MIB)
            stream.flush()
            os.fsync(stream.fileno())

    def remove(self, name: str) -> None:
        """Removes what has this name: a file, a link but not what it leads to, or a folder with what is in it."""
        with self._told(name), suppress(FileNotFoundError):
            if stat.S_ISDIR(os.stat(name, dir_fd=self._handle, follow_symlinks=False).st_mode):
                shutil.rmtree(name, dir_fd=self._handle)
            else:
                os.unlink(name, dir_fd=self._handle)

    def _plain(self, name: str, flags: int) -> int:
        """A handle of a plain file."""
        handle = os.open(name, flags | _PLAIN, 0o600, dir_fd=self._handle)
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            os.close(handle)
            raise CheckpointError(f"{self.path / name}: is no plain file; remove it")
        return handle

    def _told(self, name: str) -> AbstractContextManager[None]:
        if name in ("", ".", "..") or "/" in name or "\0" in name:
            raise CheckpointError(f"{self.path}: {name!r} is not the name of a file")
        return told(self.path / name)


def folder_for(path: Path) -> Folder:
    """The folder of a path, made where it is not there yet."""
    with told(path), suppress(FileExistsError):
        make(path)
    return Folder.open(path)


def read(path: Path, limit: int = LIMIT) -> bytes:
    """The content of a file that its user named, who may have named a link."""
    with told(path):
        path = path.resolve()
    with Folder.open(path.parent) as folder:
        return folder.read(path.name, limit)


def write(path: Path, content: bytes | str) -> None:
    """`Folder.write` of a file by its path."""
    with Folder.open(path.parent) as folder:
        folder.write(path.name, content)
