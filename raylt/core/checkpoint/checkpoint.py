"""Checkpoints: folders of safetensors files and a manifest with their hashes. They never contain pickle.

    000012/manifest.json            facts, and for each part: its file, the file's SHA-256, its tree
    000012/server.safetensors       the tensors of one part
    000012/clients-000012-0.safetensors         private states of several clients, see client_states.py

A part is a tree. The manifest keeps the tree with each tensor as `[name]`, so no structure is parsed from names. The
private states of several clients are one part, in which clients with the same structure share one tree.

A checkpoint is written next to its final place, synced, and renamed into it, so a folder with a number is complete.

An unchanged part is not written again. It does not share a file with the previous checkpoint either, since one damaged
block would destroy both checkpoints. It becomes a hard link to the file in the checkpoint before the previous one, or a
copy of the previous file if that older file has other content. So a part is written once, copied once, and costs
nothing afterwards.
"""

import hashlib
import json
import os
import secrets
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from safetensors.torch import save as as_safetensors
from torch import Tensor
from typing_extensions import TypedDict

from raylt import tree
from raylt.disk import sync
from raylt.errors import CheckpointError, spoken, without_remedy
from raylt.store import WRITING, Folder, folder_for
from raylt.tree import Tree
from raylt.typed_json import as_json, closed, hash_json

PACKS = "clients-"  # prefix of the parts that hold client states
_FORMAT = 3
_MANIFEST = "manifest.json"
_MANIFEST_LIMIT = 2**30  # size limit of a manifest in bytes
_HEADER = TypeAdapter(dict[str, dict[str, Any]])  # header of a safetensors file without metadata
_DAMAGE = (CheckpointError, OSError, ValueError, KeyError, TypeError, SafetensorError)


@dataclass(frozen=True)
class ClientStates:
    """Private states of several clients, by id.

    Attributes:
        size: Total size in bytes.
    """

    by_client: dict[int, Tree]
    size: int


@dataclass(frozen=True)
class Seal:
    """The hashes that bind a checkpoint to its run.

    Attributes:
        run: The run's SHA-256.
        line: The SHA-256 of the line of metrics.jsonl before the checkpoint's step; before the first step, `run`.
        provenance: The SHA-256 of the line of provenance.jsonl of the process that took the step.
    """

    run: str
    line: str
    provenance: str | None = None


@closed
class CheckpointPart(TypedDict):
    """The manifest's entry for one part of a checkpoint. A part without tensors has no file."""

    file: str | None
    sha256: str | None
    tree: dict[str, Any]


@closed
class _Manifest(TypedDict):
    sha256: str
    format: int
    facts: dict[str, Any]
    parts: dict[str, CheckpointPart]


_MANIFEST_TYPE = TypeAdapter(_Manifest)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was complete and undamaged when it was opened."""

    folder: Path
    facts: dict[str, Any]
    parts: dict[str, CheckpointPart]

    def read(self, part: str) -> Tree:
        """Return the tree of a checkpoint part, with its tensors on the CPU.

        Raises:
            KeyError: The checkpoint has no part of this name.
            CheckpointError: The part's file cannot be read.
        """
        entry = self.parts[part]
        try:
            tensors = load_file(self.folder / entry["file"]) if entry["file"] else {}
            return fill(entry["tree"], tensors)
        except (OSError, SafetensorError, KeyError, IndexError, TypeError) as error:
            raise unreadable(self.folder, part, error) from None


def write(
    parent: Path,
    step: int,
    parts: Iterable[tuple[str, Tree | ClientStates | None]],
    facts: dict[str, Any],
    previous: Checkpoint | None,
    keep: int,
    lasting: Collection[int] = (),
) -> Checkpoint:
    """Write a checkpoint, then remove all but the newest `keep` checkpoints.

    Args:
        parent: The folder of all checkpoints.
        step: Number of the step after which the checkpoint is saved.
        parts: Names and trees; None for a part that is unchanged since `previous`.
        facts: Other JSON values for the manifest.
        previous: The last checkpoint of the run.
        keep: Number of checkpoints to keep.
        lasting: Steps whose checkpoints are never removed.

    Raises:
        DiskFull: The disk has no room; the committed checkpoints are unchanged.
    """
    final = f"{step:06d}"
    entries: dict[str, CheckpointPart] = {}
    facts = json.loads(json.dumps(facts))  # make keys strings, as in a manifest that was read
    with folder_for(parent.parent) as above, above.inner(parent.name, make=True) as folder:
        sweep(folder)
        unfinished = f".{final}.{secrets.token_hex(8)}{WRITING}"
        try:
            with folder.new(unfinished) as new, _EarlierCheckpoints(folder, previous) as earlier:
                for name, part in parts:
                    entries[name] = earlier.carry(name, new) if part is None else _write_part(new, name, part)
                content = {"format": _FORMAT, "facts": facts, "parts": entries}
                new.write(_MANIFEST, json.dumps({"sha256": hash_json(content), **content}))
            sync(folder.path / unfinished)
        except BaseException:
            with suppress(OSError, CheckpointError):
                folder.remove(unfinished)
            raise
        folder.remove(final)  # a damaged checkpoint that was skipped
        folder.rename(unfinished, final)
        sync(parent)
        for old in _numbered(folder)[:-keep]:
            if int(old) not in lasting:
                folder.remove(old)
    return Checkpoint(parent / final, facts, entries)


def latest(parent: Path) -> tuple[Checkpoint | None, list[str]]:
    """Open the newest undamaged checkpoint.

    Returns:
        The checkpoint, and one line for each newer one that is damaged; (None, []) when none was ever committed.

    Raises:
        CheckpointError: All checkpoints are damaged.
    """
    faults = []
    for step in reversed(steps(parent)):
        try:
            return at(parent, step), faults
        except CheckpointError as error:
            faults.append(f"checkpoint {step:06d} is damaged ({error})")
    if faults:
        raise CheckpointError(
            f"{parent}: no usable checkpoint: {'; '.join(faults)}. Start a new run.",
            code="checkpoint.damaged",
            path=str(parent),
        )
    return None, []


def steps(parent: Path) -> list[int]:
    """Return the steps whose checkpoints exist, ascending."""
    if not parent.is_symlink() and not parent.exists():
        return []
    with Folder.open(parent.parent) as above, above.inner(parent.name) as folder:
        return [int(name) for name in _numbered(folder)]


def at(parent: Path, step: int) -> Checkpoint:
    """Open the checkpoint that was saved after a given step.

    Raises:
        CheckpointError: It is damaged.
    """
    path = parent / f"{step:06d}"
    try:
        with Folder.open(parent.parent) as above, above.inner(parent.name) as folder:
            return _open(folder, path.name)
    except _DAMAGE as error:
        cause = " ".join(without_remedy(error).removeprefix(f"{path}/").split())
        raise CheckpointError(cause, code="checkpoint.damaged", path=str(path), step=step) from None


def sweep(folder: Folder) -> list[str]:
    """Remove unfinished files of killed processes. The caller must hold the run's lock.

    Returns:
        The names of the removed files and folders.
    """
    unfinished = folder.unfinished()
    for name in unfinished:
        folder.remove(name)
    return unfinished


def replace_tensors(folder: Path, name: str, tensors: dict[str, Tensor]) -> None:
    """Write tensors to a safetensors file in a folder; replace an existing file of that name atomically."""
    unfinished = f".{name}.{secrets.token_hex(8)}{WRITING}"
    with Folder.open(folder) as target:
        try:
            with target.new(unfinished) as new:
                _save(new, name, tensors)
                new.move(name, target)
        finally:
            target.remove(unfinished)


def hash_tensors(tensors: dict[str, Tensor]) -> str:
    """Return one SHA-256 over named CPU tensors: their names, types, shapes and bytes, in name order."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name].detach().clone(memory_format=torch.contiguous_format)
        digest.update(f"{name}\0{value.dtype}\0{list(value.shape)}\0".encode())
        digest.update(value.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def tensor_names(form: dict[str, Any]) -> Iterator[str]:
    """Yield the names of the tensors in a tree that was read from a checkpoint's manifest."""
    for value in form.values():
        if isinstance(value, dict):
            yield from tensor_names(value)
        elif isinstance(value, list):
            yield value[0]


def fill(form: dict[str, Any], tensors: dict[str, Tensor]) -> Tree:
    """Return a tree from a checkpoint's manifest with the tensors filled in."""
    filled: Tree = {}
    for key, value in form.items():
        if isinstance(value, dict):
            filled[key] = fill(value, tensors)
        elif isinstance(value, list):
            filled[key] = tensors[value[0]]
        else:
            filled[key] = value
    return filled


def unreadable(folder: Path, part: str, error: Exception) -> CheckpointError:
    """Return the error for a checkpoint part that cannot be read."""
    return CheckpointError(
        f"{folder}: {part} cannot be read ({' '.join(str(error).split())}). Give another round, or start a new run.",
        code="checkpoint.damaged",
        path=str(folder),
        part=part,
    )


def _write_part(folder: Folder, name: str, part: Tree | ClientStates) -> CheckpointPart:
    """Write one part of a checkpoint into the checkpoint's folder, and return the manifest's entry."""
    if isinstance(part, ClientStates):
        form, tensors = _pack(part)
    else:
        form, tensors = _form(part), _tensors(part)
    if not tensors:  # most clients of most methods have none
        return {"file": None, "sha256": None, "tree": form}
    file = f"{name}.safetensors"
    _save(folder, file, tensors)
    return {"file": file, "sha256": folder.hash(file), "tree": form}


def _save(folder: Folder, name: str, tensors: dict[str, Tensor]) -> None:
    """Write tensors to a safetensors file in a newly made folder.

    Raises:
        DiskFull: The disk has no room.
    """
    path = folder.path / name
    try:
        save_file(tensors, path)
        path.chmod(0o600)
        sync(path)
    except SafetensorError:
        # safetensors reports system errors as text only; this write raises the same error with its errno
        folder.write(name, as_safetensors(tensors))


def _pack(states: ClientStates) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Split clients' states into one tree for the manifest and a dict of tensors by client id and path."""
    numbers: dict[str, int] = {}
    clients: dict[str, int] = {}
    tensors: dict[str, Tensor] = {}
    for id, state in states.by_client.items():
        clients[str(id)] = numbers.setdefault(json.dumps(_form(state)), len(numbers))
        tensors |= {f"{id}.{path}": value for path, value in _tensors(state).items()}
    return {"bytes": states.size, "forms": [json.loads(text) for text in numbers], "clients": clients}, tensors


def _tensors(part: Tree) -> dict[str, Tensor]:
    # copy, because safetensors refuses tensors that share memory
    tensors = {
        path: leaf.clone(memory_format=torch.contiguous_format)
        for path, leaf in tree.leaves(part)
        if isinstance(leaf, Tensor)
    }
    assert len(tensors) == sum(isinstance(leaf, Tensor) for _, leaf in tree.leaves(part)), "two tensors with one name"
    return tensors


def _form(part: Tree, path: str = "") -> dict[str, Any]:
    """Return a copy of a tree for the manifest, with each tensor replaced by `[name]`."""
    form = {}
    for key, value in part.items():
        assert isinstance(key, str), f"key {key!r}: states are dicts with string keys"
        inner = f"{path}.{key}" if path else key
        assert isinstance(value, dict | Tensor | str | int | float | None), f"{inner} is a {type(value).__name__}"
        if isinstance(value, dict):
            form[key] = _form(value, inner)
        elif isinstance(value, Tensor):
            form[key] = [inner]
        else:
            form[key] = value
    return form


class _EarlierCheckpoints:
    """The last two checkpoints, which supply a new checkpoint with the files of unchanged parts."""

    def __init__(self, folder: Folder, previous: Checkpoint | None):
        self._folder, self._previous = folder, previous
        self._open = ExitStack()
        self._older: Folder | None = None
        self._older_parts: dict[str, CheckpointPart] = {}
        if previous is None:
            return
        older = [name for name in _numbered(folder) if int(name) < int(previous.folder.name)]
        if older:
            with suppress(*_DAMAGE):
                self._older = self._open.enter_context(folder.inner(older[-1]))
                self._older_parts = self._older.read_json(_MANIFEST, _MANIFEST_TYPE, _MANIFEST_LIMIT)["parts"]

    def __enter__(self) -> "_EarlierCheckpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def carry(self, name: str, new: Folder) -> CheckpointPart:
        """Link or copy the file of an unchanged part from an earlier checkpoint into the new one's folder.

        Raises:
            CheckpointError: The file has changed since it was written.
        """
        assert self._previous is not None
        entry = self._previous.parts[name]
        file = entry["file"]
        if file is None:
            return entry
        older = self._older_parts.get(name)
        if self._older is not None and older is not None and older["sha256"] == entry["sha256"]:
            with suppress(OSError, CheckpointError):  # a file system without hard links
                self._older.link(file, new)
                return entry
        with self._folder.inner(self._previous.folder.name) as previous:
            previous.copy(file, new)
        if new.hash(file) != entry["sha256"]:
            path = self._previous.folder / file
            raise CheckpointError(
                f"{path}: the file was damaged after it was written. Continue from the previous checkpoint with "
                f"{spoken('raylt resume', 'raylt.resume')}.",
                code="checkpoint.damaged",
                path=str(path),
            )
        return entry


def _numbered(folder: Folder) -> list[str]:
    return sorted((name for name in folder.names() if name.isdigit() and len(name) >= 6), key=int)


def _open(folder: Folder, name: str) -> Checkpoint:
    with folder.inner(name) as inner:
        manifest = inner.read_json(_MANIFEST, _MANIFEST_TYPE, _MANIFEST_LIMIT)
        content = {key: value for key, value in manifest.items() if key != "sha256"}
        if manifest["sha256"] != hash_json(content):
            raise ValueError(f"{_MANIFEST}: its content does not match its hash")
        if manifest["format"] != _FORMAT:
            raise ValueError(f"format {manifest['format']}, this raylt reads {_FORMAT}")
        if manifest["facts"].get("step") != int(name):
            raise ValueError(f"it belongs to step {manifest['facts'].get('step')}")
        for entry in manifest["parts"].values():
            if entry["file"] and not (
                _size_matches_header(inner, entry["file"]) and inner.hash(entry["file"]) == entry["sha256"]
            ):
                raise ValueError(f"{entry['file']}: its content does not match its hash")
        return Checkpoint(folder.path / name, manifest["facts"], manifest["parts"])


def _size_matches_header(folder: Folder, file: str) -> bool:
    """Return whether a safetensors file is as long as its header says, without reading its tensors.

    A sparse file of terabytes takes no disk space, but hours to hash.
    """
    with folder.stream(file) as stream:
        length = int.from_bytes(stream.read(8), "little")
        size = os.fstat(stream.fileno()).st_size
        if length > min(size, _MANIFEST_LIMIT):
            return False
        header = stream.read(length)
    try:
        tensors = as_json(header, _HEADER, file)
        return size == 8 + length + max((each["data_offsets"][1] for each in tensors.values()), default=0)
    except (CheckpointError, LookupError, TypeError):
        return False
