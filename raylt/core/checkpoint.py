"""Checkpoints: folders of safetensors files and a manifest with their hashes. Never pickle.

    000012/manifest.json            facts, and for each part: its file, the file's SHA-256, its tree
    000012/server.safetensors       the tensors of one part
    000012/client-003.safetensors

They are written beside their place, synced, and renamed into it, so a folder with a number is complete. A part is a
tree; its form is kept in the manifest with the tensors as `[name]`, so nothing is parsed back from names.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from raylt import tree
from raylt.errors import CheckpointError
from raylt.tree import Tree

_FORMAT = 1


@dataclass(frozen=True)
class Checkpoint:
    """One that was found complete and undamaged."""

    folder: Path
    facts: dict[str, Any]
    parts: dict[str, dict[str, Any]]

    def read(self, part: str) -> Tree:
        """One part's tree, its tensors on the CPU."""
        entry = self.parts[part]
        tensors = load_file(self.folder / entry["file"]) if entry["file"] else {}
        return _fill(entry["tree"], tensors)


def write(parent: Path, step: int, parts: Iterable[tuple[str, Tree | None]], facts: dict[str, Any],
          previous: Checkpoint | None, keep: int) -> Checkpoint:
    """Commits a checkpoint and then removes all but the newest `keep`.

    Args:
        parts: names and trees; None for a part that is as it was in `previous` (its file is linked, not written).
        facts: what else the manifest says; JSON.
    """
    parent.mkdir(parents=True, exist_ok=True)
    for left in parent.glob(".writing-*"):          # of a process that was killed
        shutil.rmtree(left)
    here = parent / f".writing-{step:06d}"
    here.mkdir()
    entries = {}
    for name, part in parts:
        if part is None:
            assert previous is not None
            entries[name] = _link(previous, name, here)
        else:
            entries[name] = _write_part(here, name, part)
    content = {"format": _FORMAT, "facts": facts, "parts": entries}
    (here / "manifest.json").write_text(json.dumps({"sha256": _hash_json(content), **content}))
    for file in here.iterdir():
        sync(file)
    sync(here)
    final = parent / f"{step:06d}"
    if final.exists():              # a damaged one that was passed over
        shutil.rmtree(final)
    here.rename(final)
    sync(parent)
    for old in _numbered(parent)[:-keep]:
        shutil.rmtree(old)
    return Checkpoint(final, facts, entries)


def latest(parent: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest undamaged checkpoint, and one line for each newer one that is damaged.

    Returns:
        (None, []) when none was ever committed.

    Raises:
        CheckpointError: there are some and all are damaged.
    """
    faults = []
    for folder in reversed(_numbered(parent)):
        try:
            return _open(folder), faults
        except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
            faults.append(f"checkpoint {folder.name} is damaged ({' '.join(str(error).split())})")
    if faults:
        raise CheckpointError(f"{parent}: no usable checkpoint: {'; '.join(faults)}; start a new run")
    return None, []


def steps(parent: Path) -> list[int]:
    """The steps whose checkpoints are kept, ascending."""
    return [int(folder.name) for folder in _numbered(parent)]


def at(parent: Path, step: int) -> Checkpoint:
    """The checkpoint after a step.

    Raises:
        CheckpointError: it is damaged.
    """
    try:
        return _open(parent / f"{step:06d}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise CheckpointError(f"{parent}/{step:06d} is damaged ({' '.join(str(error).split())}); give another round"
                              ) from None


def sync(path: Path) -> None:
    """Waits until a file's or folder's content is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def hash_tensors(tensors: dict[str, Tensor]) -> str:
    """SHA-256 over tensors in name order: name, type, shape and bytes of each."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name].detach().cpu().clone(memory_format=torch.contiguous_format)
        digest.update(f"{name}\0{value.dtype}\0{list(value.shape)}\0".encode())
        digest.update(value.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _numbered(parent: Path) -> list[Path]:
    found = (folder for folder in parent.glob("[0-9]*") if folder.name.isdigit())
    return sorted(found, key=lambda folder: int(folder.name))


def _write_part(folder: Path, name: str, part: Tree) -> dict[str, Any]:
    # copies: safetensors refuses tensors that share memory
    tensors = {path: leaf.clone(memory_format=torch.contiguous_format) for path, leaf in tree.leaves(part)
               if isinstance(leaf, Tensor)}
    assert len(tensors) == sum(isinstance(leaf, Tensor) for _, leaf in tree.leaves(part)), "two tensors with one name"
    entry: dict[str, Any] = {"file": None, "sha256": None, "tree": _form(part)}
    if tensors:                     # most clients of most methods have none
        file = folder / f"{name}.safetensors"
        save_file(tensors, file)
        entry |= {"file": file.name, "sha256": _hash_file(file)}
    return entry


def _link(previous: Checkpoint, name: str, folder: Path) -> dict[str, Any]:
    entry = previous.parts[name]
    if entry["file"]:
        source, target = previous.folder / entry["file"], folder / entry["file"]
        try:
            os.link(source, target)
        except OSError:             # a file system without hard links
            shutil.copyfile(source, target)
    return entry


def _open(folder: Path) -> Checkpoint:
    manifest = json.loads((folder / "manifest.json").read_text())
    if manifest.pop("sha256") != _hash_json(manifest):
        raise ValueError("manifest.json: its content does not match its hash")
    if manifest["format"] != _FORMAT:
        raise ValueError(f"format {manifest['format']}, this raylt reads {_FORMAT}")
    for entry in manifest["parts"].values():
        if entry["file"] and _hash_file(folder / entry["file"]) != entry["sha256"]:
            raise ValueError(f"{entry['file']}: its content does not match its hash")
    return Checkpoint(folder, manifest["facts"], manifest["parts"])


def _hash_file(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _hash_json(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _form(part: Tree, path: str = "") -> dict[str, Any]:
    form = {}
    for key, value in part.items():
        assert isinstance(key, str), f"key {key!r}: states are dicts with string keys"
        here = f"{path}.{key}" if path else key
        assert isinstance(value, dict | Tensor | str | int | float | None), f"{here} is a {type(value).__name__}"
        form[key] = _form(value, here) if isinstance(value, dict) else [here] if isinstance(value, Tensor) else value
    return form


def _fill(form: dict[str, Any], tensors: dict[str, Tensor]) -> Tree:
    return {key: _fill(value, tensors) if isinstance(value, dict) else tensors[value[0]] if isinstance(value, list)
            else value for key, value in form.items()}
