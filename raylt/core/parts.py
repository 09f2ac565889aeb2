"""A part of a checkpoint: a tree whose tensors stand in a safetensors file, and whose form stands in the manifest.

The private states of several clients are one part: of clients whose states look alike the form stands there once.
"""

import json
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
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

PACKS = "clients-"          # how names of parts begin that are states of clients


@closed
class Part(TypedDict):
    """What a manifest says of a part; one without tensors has no file."""

    file: str | None
    sha256: str | None
    tree: dict[str, Any]


@dataclass(frozen=True)
class States:
    """Private states of several clients, by id; `size` in bytes."""

    by_client: dict[int, Tree]
    size: int


def write_part(here: Folder, name: str, part: Tree | States) -> Part:
    """Writes a part into a folder that is being made."""
    tensors: dict[str, Tensor] = {}
    if isinstance(part, States):
        numbers: dict[str, int] = {}
        clients = {str(id): numbers.setdefault(json.dumps(_form(state)), len(numbers))
                   for id, state in part.by_client.items()}
        form = {"bytes": part.size, "forms": [json.loads(text) for text in numbers], "clients": clients}
        for id, state in part.by_client.items():
            tensors |= {f"{id}.{path}": value for path, value in _tensors(state).items()}
    else:
        form, tensors = _form(part), _tensors(part)
    if not tensors:                 # most clients of most methods have none
        return {"file": None, "sha256": None, "tree": form}
    file = f"{name}.safetensors"
    save_tensors(tensors, here.path / file)
    sync(here.path / file)
    return {"file": file, "sha256": here.hash(file), "tree": form}


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


def _tensors(part: Tree) -> dict[str, Tensor]:
    # copies: safetensors refuses tensors that share memory
    tensors = {path: leaf.clone(memory_format=torch.contiguous_format) for path, leaf in tree.leaves(part)
               if isinstance(leaf, Tensor)}
    assert len(tensors) == sum(isinstance(leaf, Tensor) for _, leaf in tree.leaves(part)), "two tensors with one name"
    return tensors


def _form(part: Tree, path: str = "") -> dict[str, Any]:
    form = {}
    for key, value in part.items():
        assert isinstance(key, str), f"key {key!r}: states are dicts with string keys"
        here = f"{path}.{key}" if path else key
        assert isinstance(value, dict | Tensor | str | int | float | None), f"{here} is a {type(value).__name__}"
        form[key] = _form(value, here) if isinstance(value, dict) else [here] if isinstance(value, Tensor) else value
    return form


def paths(form: dict[str, Any]) -> Iterator[str]:
    """The names of a form's tensors."""
    for value in form.values():
        if isinstance(value, dict):
            yield from paths(value)
        elif isinstance(value, list):
            yield value[0]


def fill(form: dict[str, Any], tensors: dict[str, Tensor]) -> Tree:
    """The tree of a form."""
    return {key: fill(value, tensors) if isinstance(value, dict) else tensors[value[0]] if isinstance(value, list)
            else value for key, value in form.items()}
