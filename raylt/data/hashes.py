"""What the pixels and labels of a task hash to: two runs with the same hashes saw the same data."""

import hashlib
import json
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import numpy as np
from pydantic import TypeAdapter
from typing_extensions import TypedDict

from raylt import store
from raylt.data.cache import Mapped, Stored
from raylt.data.outline import outline_of
from raylt.data.task import Task
from raylt.errors import DataError, RayltError
from raylt.typed import closed, hash_json


@closed
class _Known(TypedDict):
    """What is written beside a file of decoded images: its hash, of the file of this size and time."""

    bytes: int
    time_ns: int
    sha256: str


_KNOWN = TypeAdapter(_Known)
BESIDE = ".sha256"
OUTLINE = "clients and classes"         # the name of the outline's hash


def hash_data(task: Task) -> dict[str, str]:
    """SHA-256 of what a run sees: by name, training and test images and labels, and what a model is told of them.

    Training images and labels are taken client by client, validation samples and the server's own last.
    """
    training = [*task.shards, *(part for part in (task.validation, task.auxiliary) if part is not None)]
    tests = {} if task.own_tests is None else {"clients of test images": _hash(task.own_tests)}
    facts = [task.name, task.kind, list(task.class_names), list(task.shape), list(task.mean), list(task.std)]
    return {
        "training images": _hash(shard.x for shard in training),
        "training labels": _hash(shard.y for shard in training),
        "test images": _hash([task.test.x]),
        "test labels": _hash([task.test.y]),
        "classes and normalisation": hash_json(facts),
        OUTLINE: hash_json(outline_of(task)),
        **tests,
    }


def _hash(parts: Iterable[Stored]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        if isinstance(part, Mapped):            # the file once, not the rows of each client
            digest.update(f"{_hash_file(Path(part.path))}\0".encode())
            part = part.rows
        digest.update(f"{part.dtype.str}{list(part.shape)}\0".encode())
        digest.update(np.ascontiguousarray(part).data)
    return digest.hexdigest()


def _hash_file(file: Path) -> str:
    """Of a file of decoded images, which may have gigabytes: read once, as long as it is not written again."""
    try:
        now = file.stat()
    except OSError as error:
        raise DataError(f"{file}: {error.strerror}; data.root must be a folder that every node sees") from None
    with store.Folder.open(file.parent) as folder:
        with suppress(RayltError):
            known = folder.read_json(file.name + BESIDE, _KNOWN)
            if (known["bytes"], known["time_ns"]) == (now.st_size, now.st_mtime_ns):
                return known["sha256"]
        sha256 = folder.hash(file.name)
        with suppress(RayltError):              # a cache that others may not write
            folder.write(file.name + BESIDE, json.dumps(
                {"bytes": now.st_size, "time_ns": now.st_mtime_ns, "sha256": sha256}))
    return sha256
