"""What a run is: everything that its result follows from, and one SHA-256 over it.

    identity.json    the configuration without resources and output, the split's seal, the hashes of the data, the
                     guests and raylt's version; beside them their SHA-256

That hash stands in every checkpoint, is the root of the chain of metrics.jsonl, and stands in summary.json. A run
folder is only read where all of it agrees: files of two runs, or a file that was changed, are no run. It is no
signature: whoever writes every file of a folder anew can write another run. The code's own hash is kept beside, in
provenance.jsonl, so that a change which no number depends on breaks nothing.
"""

import importlib.metadata
import json
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import TypeAdapter
from typing_extensions import TypedDict

from raylt.config import Config, completed, differences, settled
from raylt.data.split import Split
from raylt.errors import CheckpointError
from raylt.store import Folder
from raylt.typed import closed, hash_json

FILE, ORIGINS = "identity.json", "origins.json"
_FORMAT = 1


@closed
class Guest(TypedDict):
    """A record of the registry, see raylt/registry.py."""

    kind: str
    name: str
    origin: str
    sha256: str | None


@closed
class Parent(TypedDict):
    """The run that one was branched from, see raylt/runs/branch.py: its folder's name, its SHA-256, the stage that is
    done otherwise and the last step that is shared."""

    name: str
    run: str
    stage: str
    step: int


@closed
class Identity(TypedDict):
    """The content of identity.json."""

    format: int
    config: dict[str, Any]
    split: str
    data: dict[str, str]
    guests: list[Guest]
    raylt: str
    parent: Parent | None
    sha256: str


_GUESTS = TypeAdapter(list[Guest])
_IDENTITY = TypeAdapter(Identity)


def version() -> str:
    """Of raylt."""
    return importlib.metadata.version("raylt")


def identify(config: Config, split: Split, data: Mapping[str, str], guests: Iterable[Mapping[str, Any]],
             parent: Mapping[str, Any] | None = None) -> Identity:
    """The identity of a run that begins.

    Args:
        data: from `raylt.data.hashes.hash_data`.
        guests: from `raylt.registry.origins`.
        parent: the run that it is branched from.
    """
    content: Any = {"format": _FORMAT, "config": settled(config), "split": split.seal, "data": dict(data),
                    "guests": [dict(guest) for guest in guests], "raylt": version(),
                    "parent": None if parent is None else dict(parent)}
    content["sha256"] = hash_json(content)
    return content


def write(folder: Folder, identity: Identity) -> None:
    folder.write(FILE, as_text(identity))


def as_text(tree: Any) -> str:
    """JSON that a person can read."""
    return json.dumps(tree, indent=2) + "\n"


def read_identity(folder: Folder) -> Identity:
    """The identity of the run in a folder.

    Raises:
        CheckpointError: there is none, or it was changed.
    """
    if FILE not in folder.names():
        raise CheckpointError(f"{folder.path}: has no {FILE}: an older raylt made it, or it is not whole; run it again")
    identity = folder.read_json(FILE, _IDENTITY)
    content = {key: value for key, value in identity.items() if key != "sha256"}
    if identity["sha256"] != hash_json(content):
        raise CheckpointError(f"{folder.path / FILE}: was changed after the run was made; put the original back")
    if identity["format"] != _FORMAT:
        raise CheckpointError(f"{folder.path / FILE}: has format {identity['format']}, this raylt reads {_FORMAT}; run "
                              "it again")
    return identity


def check_config(identity: Identity, config: Config, folder: Folder) -> None:
    """Raises a CheckpointError where config.yaml is not what the run was made with; names the settings."""
    other = [f"{key} is {now!r}, the run was made with {then!r}"
             for key, then, now in differences(completed(identity["config"]), settled(config))]
    if other:
        raise CheckpointError(f"{folder.path / 'config.yaml'}: {'; '.join(other)}; put that back, or start a new run")


def check_split(identity: Identity, split: Split, folder: Folder) -> None:
    """Raises a CheckpointError where split.json is that of another run."""
    if split.seal != identity["split"]:
        raise CheckpointError(f"{folder.path / 'split.json'}: is another split ({split.seal[:12]}) than the run was "
                              f"made with ({identity['split'][:12]}); put that back")


def guests_of(identity: Identity, folder: Folder) -> list[Guest]:
    """What origins.json says.

    Raises:
        CheckpointError: it is not what the run was made with.
    """
    recorded = folder.read_json(ORIGINS, _GUESTS) if ORIGINS in folder.names() else []
    if recorded != identity["guests"]:
        raise CheckpointError(f"{folder.path / ORIGINS}: was changed after the run was made; put the original back")
    return recorded


def check_data(identity: Identity, data: Mapping[str, str], folder: Folder) -> None:
    """Raises a CheckpointError where the data are not those that the run was made with; names what differs."""
    other = [name for name, sha256 in identity["data"].items() if data.get(name) != sha256]
    if other:
        raise CheckpointError(f"{folder.path}: the run was made with other data ({', '.join(other)} differ); bring "
                              "those to data.root, or start a new run")


def check_version(identity: Identity, folder: Folder) -> None:
    """Raises a CheckpointError where another raylt made the run: it may compute something else."""
    if identity["raylt"] != version():
        raise CheckpointError(f"{folder.path}: was made by raylt {identity['raylt']}, this is {version()}; go on with "
                              "that one, or start a new run")
