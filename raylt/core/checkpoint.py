"""Checkpoints: folders of safetensors files and a manifest with their hashes. Never pickle.

    000012/manifest.json            facts, and for each part: its file, the file's SHA-256, its tree
    000012/server.safetensors       the tensors of one part
    000012/clients-000012-0.safetensors         of the private states of several clients, see raylt/core/states.py

They are written beside their place, synced, and renamed into it, so a folder with a number is complete. A part is a
tree; its form is kept in the manifest with the tensors as `[name]`, so nothing is parsed back from names.

A part that is as it was is not written again. It must not be the same file as in the checkpoint before, either: one
damaged block would take both. So it becomes a second name of the file of the checkpoint before that one, and only where
that has it otherwise a copy: a part is written once, copied once, and from then on costs nothing.
"""

import hashlib
import json
import secrets
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from typing_extensions import TypedDict

from raylt.core.parts import Part, States, fill, write_part
from raylt.disk import sync
from raylt.errors import CheckpointError
from raylt.store import WRITING, Folder, folder_for
from raylt.tree import Tree
from raylt.typed import closed, hash_json

_FORMAT, _READ = 3, (2, 3)    # 2: each client had a part of its own
_MANIFEST = 2**30           # bytes at most
_DAMAGE = (CheckpointError, OSError, ValueError, KeyError, TypeError, SafetensorError)


@closed
class _Manifest(TypedDict):
    sha256: str
    format: int
    facts: dict[str, Any]
    parts: dict[str, Part]


_KIND = TypeAdapter(_Manifest)


@dataclass(frozen=True)
class Seal:
    """What binds a checkpoint to its run.

    Attributes:
        run: the run's SHA-256.
        line: the SHA-256 of the line of metrics.jsonl before that of the checkpoint's step; before the first, `run`.
    """

    run: str
    line: str


@dataclass(frozen=True)
class Checkpoint:
    """One that was complete and undamaged when it was opened."""

    folder: Path
    facts: dict[str, Any]
    parts: dict[str, Part]

    def read(self, part: str) -> Tree:
        """One part's tree, its tensors on the CPU."""
        entry = self.parts[part]
        try:
            tensors = load_file(self.folder / entry["file"]) if entry["file"] else {}
            return fill(entry["tree"], tensors)
        except (OSError, SafetensorError, KeyError, IndexError, TypeError) as error:
            raise CheckpointError(f"{self.folder}: {part} cannot be read ({' '.join(str(error).split())}); give "
                                  "another round, or start a new run") from None


def write(parent: Path, step: int, parts: Iterable[tuple[str, Tree | States | None]], facts: dict[str, Any],
          previous: Checkpoint | None, keep: int, lasting: Collection[int] = ()) -> Checkpoint:
    """Commits a checkpoint and then removes all but the newest `keep`.

    Args:
        parts: names and trees; None for a part that is as it was in `previous`.
        facts: what else the manifest says; JSON.
        lasting: steps whose checkpoints stay, too.

    Raises:
        DiskFull: there is no room; those that were committed are as they were.
    """
    final, entries = f"{step:06d}", {}
    facts = json.loads(json.dumps(facts))       # as it will be read: keys are texts
    with folder_for(parent.parent) as above, above.inner(parent.name, make=True) as folder:
        sweep(folder)
        beside = f".{final}.{secrets.token_hex(8)}{WRITING}"
        try:
            with folder.new(beside) as here, _Elders(folder, previous) as elders:
                for name, part in parts:
                    entries[name] = elders.carry(name, here) if part is None else write_part(here, name, part)
                content = {"format": _FORMAT, "facts": facts, "parts": entries}
                here.write("manifest.json", json.dumps({"sha256": hash_json(content), **content}))
            sync(folder.path / beside)
        except BaseException:
            with suppress(OSError, CheckpointError):
                folder.remove(beside)
            raise
        folder.remove(final)                # a damaged one that was passed over
        folder.rename(beside, final)
        sync(parent)
        for old in _numbered(folder)[:-keep]:
            if int(old) not in lasting:
                folder.remove(old)
    return Checkpoint(parent / final, facts, entries)


def latest(parent: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest undamaged checkpoint, and one line for each newer one that is damaged.

    Returns:
        (None, []) when none was ever committed.

    Raises:
        CheckpointError: there are some and all are damaged.
    """
    faults = []
    for step in reversed(steps(parent)):
        try:
            return at(parent, step), faults
        except CheckpointError as error:
            faults.append(f"checkpoint {step:06d} is damaged ({error})")
    if faults:
        raise CheckpointError(f"{parent}: no usable checkpoint: {'; '.join(faults)}; start a new run")
    return None, []


def steps(parent: Path) -> list[int]:
    """The steps whose checkpoints are kept, ascending."""
    if not parent.is_symlink() and not parent.exists():
        return []
    with Folder.open(parent.parent) as above, above.inner(parent.name) as folder:
        return [int(name) for name in _numbered(folder)]


def at(parent: Path, step: int) -> Checkpoint:
    """The checkpoint after a step.

    Raises:
        CheckpointError: it is damaged.
    """
    try:
        with Folder.open(parent.parent) as above, above.inner(parent.name) as folder:
            return _open(folder, f"{step:06d}")
    except _DAMAGE as error:
        raise CheckpointError(" ".join(str(error).removeprefix(f"{parent}/{step:06d}/").split())) from None


def sweep(folder: Folder) -> list[str]:
    """Removes what processes left that were killed while they wrote in this folder; by whoever holds the run alone."""
    left = folder.unfinished()
    for name in left:
        folder.remove(name)
    return left


def hash_tensors(tensors: dict[str, Tensor]) -> str:
    """SHA-256 over tensors of the CPU in name order: name, type, shape and bytes of each."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name].detach().clone(memory_format=torch.contiguous_format)
        digest.update(f"{name}\0{value.dtype}\0{list(value.shape)}\0".encode())
        digest.update(value.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


class _Elders:
    """The checkpoint before, and the one before that, for parts that are as they were."""

    def __init__(self, folder: Folder, previous: Checkpoint | None):
        self._folder, self._previous, self._twins = folder, previous, None
        self._entries: dict[str, Part] = {}
        if previous is None:
            return
        older = [name for name in _numbered(folder) if int(name) < int(previous.folder.name)]
        if older:
            with suppress(*_DAMAGE):
                twins = folder.inner(older[-1])
                self._entries = twins.read_json("manifest.json", _KIND, _MANIFEST)["parts"]
                self._twins = twins

    def __enter__(self) -> "_Elders":
        return self

    def __exit__(self, *_: object) -> None:
        if self._twins is not None:
            self._twins.__exit__()

    def carry(self, name: str, here: Folder) -> Part:
        """Puts a part that is as it was into a checkpoint that is being made."""
        assert self._previous is not None
        entry = self._previous.parts[name]
        if file := entry["file"]:
            twin = self._entries.get(name)
            if self._twins is not None and twin is not None and twin["sha256"] == entry["sha256"]:
                with suppress(OSError, CheckpointError):        # a file system without second names
                    self._twins.link(file, here)
                    return entry
            with self._folder.inner(self._previous.folder.name) as last:
                last.copy(file, here)
            if here.hash(file) != entry["sha256"]:
                raise CheckpointError(f"{self._previous.folder / file}: was damaged after it was written; go on from "
                                      "the checkpoint before with raylt resume")
        return entry


def _numbered(folder: Folder) -> list[str]:
    return sorted((name for name in folder.names() if name.isdigit() and len(name) >= 6), key=int)


def _open(folder: Folder, name: str) -> Checkpoint:
    with folder.inner(name) as here:
        manifest = here.read_json("manifest.json", _KIND, _MANIFEST)
        content = {key: value for key, value in manifest.items() if key != "sha256"}
        if manifest["sha256"] != hash_json(content):
            raise ValueError("manifest.json: its content does not match its hash")
        if manifest["format"] not in _READ:
            raise ValueError(f"format {manifest['format']}, this raylt reads {' and '.join(map(str, _READ))}")
        if manifest["facts"].get("step") != int(name):
            raise ValueError(f"it is that of step {manifest['facts'].get('step')}")
        for entry in manifest["parts"].values():
            if entry["file"] and here.hash(entry["file"]) != entry["sha256"]:
                raise ValueError(f"{entry['file']}: its content does not match its hash")
        return Checkpoint(folder.path / name, manifest["facts"], manifest["parts"])
