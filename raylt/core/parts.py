"""A part of a checkpoint: a tree whose tensors stand in a safetensors file, and whose form stands in the manifest."""

import secrets
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from typing_extensions import TypedDict

from raylt import tree
from raylt.disk import sync, told
from raylt.errors import DiskFull
from raylt.store import WRITING, Folder
from raylt.tree import Tree
from raylt.typed import closed


@closed
class Part(TypedDict):
    """What a manifest says of a part; one without tensors has no file."""

    file: str | None
    sha256: str | None
    tree: dict[str, Any]


def write_part(here: Folder, name: str, part: Tree) -> Part:
    """Writes a part into a folder that is being made."""
    # copies: safetensors refuses tensors that share memory
    tensors = {path: leaf.clone(memory_format=torch.contiguous_format) for path, leaf in tree.leaves(part)
               if isinstance(leaf, Tensor)}
    assert len(tensors) == sum(isinstance(leaf, Tensor) for _, leaf in tree.leaves(part)), "two tensors with one name"
    if not tensors:                 # most clients of most methods have none
        return {"file": None, "sha256": None, "tree": _form(part)}
    file = f"{name}.safetensors"
    save_tensors(tensors, here.path / file)
    sync(here.path / file)
    return {"file": file, "sha256": here.hash(file), "tree": _form(part)}


def save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Writes a safetensors file where none can be: in a folder that was just made.

    Raises:
        DiskFull: there is no room.
    """
    with told(path):
        try:
            save_file(tensors, path)
            path.chmod(0o600)
        except SafetensorError as error:        # it tells of the system's errors by their texts
            if "os error 28" in str(error):
                raise DiskFull(path) from None
            raise


def replace_tensors(folder: Path, name: str, tensors: dict[str, Tensor]) -> None:
    """Puts a safetensors file into a folder, or in the place of what is there, in one step."""
    beside = f".{name}.{secrets.token_hex(8)}{WRITING}"
    with Folder.open(folder) as there:
        try:
            with there.new(beside) as here:
                save_tensors(tensors, here.path / name)
                sync(here.path / name)
                here.move(name, there)
        finally:
            there.remove(beside)


def _form(part: Tree, path: str = "") -> dict[str, Any]:
    form = {}
    for key, value in part.items():
        assert isinstance(key, str), f"key {key!r}: states are dicts with string keys"
        here = f"{path}.{key}" if path else key
        assert isinstance(value, dict | Tensor | str | int | float | None), f"{here} is a {type(value).__name__}"
        form[key] = _form(value, here) if isinstance(value, dict) else [here] if isinstance(value, Tensor) else value
    return form


def fill(form: dict[str, Any], tensors: dict[str, Tensor]) -> Tree:
    """The tree of a form."""
    return {key: fill(value, tensors) if isinstance(value, dict) else tensors[value[0]] if isinstance(value, list)
            else value for key, value in form.items()}
