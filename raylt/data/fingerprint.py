"""Hashes of a task's pixels and labels. Runs with equal hashes used the same data."""

import hashlib
import json
from collections.abc import Iterable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

import numpy as np
from pydantic import TypeAdapter
from typing_extensions import TypedDict

from raylt import store
from raylt.data.images.cache import Mapped, Stored
from raylt.data.task import Task, outline_of
from raylt.errors import DataError, RayltError
from raylt.typed_json import closed, hash_json

SIDECAR = ".sha256"  # suffix of the file that keeps the hash of a file of decoded images
OUTLINE_HASH = "clients and classes"  # the name of the outline's hash


@closed
class _FileHash(TypedDict):
    """The stored hash of a file of decoded images, valid while the file keeps its size and modification time."""

    bytes: int
    time_ns: int
    sha256: str


_FILE_HASH = TypeAdapter(_FileHash)


def hash_data(task: Task) -> dict[str, str]:
    """Return the SHA-256 hash of each part of a task, by the part's name, such as `training images`.

    Training images and labels are hashed client by client, then the validation samples and the server's own samples.
    """
    training = [*task.shards, *(part for part in (task.validation, task.auxiliary) if part is not None)]
    spec = [task.name, task.kind, list(task.class_names), list(task.shape), list(task.mean), list(task.std)]
    hashes = {
        "training images": _hash(shard.x for shard in training),
        "training labels": _hash(shard.y for shard in training),
        "test images": _hash([task.test.x]),
        "test labels": _hash([task.test.y]),
        "classes and normalisation": hash_json(spec),
        OUTLINE_HASH: hash_json(outline_of(task)),
    }
    if task.own_tests is not None:
        hashes["clients of test images"] = _hash(task.own_tests)
    return hashes


def _hash(parts: Iterable[Stored]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        if isinstance(part, Mapped):  # hash the file's hash and the row numbers instead of the rows
            digest.update(f"{_hash_file(Path(part.path))}\0".encode())
            part = part.rows
        digest.update(f"{part.dtype.str}{list(part.shape)}\0".encode())
        digest.update(np.ascontiguousarray(part).data)
    return digest.hexdigest()


def _hash_file(file: Path) -> str:
    """Return the hash of a file of decoded images. The file is read only if it has changed."""
    try:
        now = file.stat()
    except OSError as error:
        raise DataError(
            f"data.root: {file} cannot be read ({error.strerror}). Set data.root to a folder that every node sees.",
            code="data.cache-unreadable",
            key="data.root",
            path=str(file),
        ) from None
    return _hash_version(file, now.st_size, now.st_mtime_ns)


@lru_cache(maxsize=256)  # each client's part names the same file, and its folder may be read-only
def _hash_version(file: Path, size: int, time_ns: int) -> str:
    """Return the hash of a file that has this size and modification time."""
    with store.Folder.open(file.parent) as folder:
        with suppress(RayltError):
            saved = folder.read_json(file.name + SIDECAR, _FILE_HASH)
            if (saved["bytes"], saved["time_ns"]) == (size, time_ns):
                return saved["sha256"]
        sha256 = folder.hash(file.name)
        content = json.dumps({"bytes": size, "time_ns": time_ns, "sha256": sha256})
        with suppress(RayltError):  # another user's cache may be read-only
            folder.write(file.name + SIDECAR, content)
    return sha256
