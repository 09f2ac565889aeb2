"""identity.json: everything that determines a run's result, with one SHA-256 over it all.

The file contains the configuration without resources and output, the split's seal, the hashes of the data, the plugins,
raylt's version, and the SHA-256 of all of these.

This hash is also in every checkpoint and in summary.json, and is the root of the hash chain in metrics.jsonl. A run
folder can be read only if all of these agree. Mixed files of two runs, or a changed file, raise an error. The hash is
not a signature: anyone who rewrites all files of a folder can forge a run. The hash of the code is in provenance.jsonl
instead, so that a code change without effect on results does not invalidate a run.
"""

import importlib.metadata
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from typing_extensions import TypedDict

from raylt.config import Config, completed, differences, settled
from raylt.data.splits.split import Split
from raylt.errors import CheckpointError
from raylt.store import Folder
from raylt.typed_json import closed, hash_json

FILE, ORIGINS = "identity.json", "origins.json"
_FORMAT = 1


@closed
class PluginRecord(TypedDict):
    """The record of a plugin that a run uses, see raylt/registry.py."""

    kind: str
    name: str
    origin: str
    sha256: str | None


@closed
class Parent(TypedDict):
    """The parent of a branched run, see continuation.py.

    Attributes:
        name: Name of the parent's folder.
        run: SHA-256 of the parent.
        stage: First stage that the new run repeats with other fields.
        step: Last shared step.
    """

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
    guests: list[PluginRecord]
    raylt: str
    parent: Parent | None
    sha256: str


_PLUGINS = TypeAdapter(list[PluginRecord])
_IDENTITY = TypeAdapter(Identity)


def version() -> str:
    """Return the version of raylt."""
    return importlib.metadata.version("raylt")


def identify(
    config: Config,
    split: Split,
    data: Mapping[str, str],
    plugins: Iterable[Mapping[str, Any]],
    parent: Mapping[str, Any] | None = None,
) -> Identity:
    """Return the identity of a new run.

    Args:
        config: The configuration of the run.
        split: The split of the data.
        data: Hashes of the data, from `raylt.data.fingerprint.hash_data`.
        plugins: Records of the plugins, from `raylt.registry.origins`.
        parent: Record of the run that this run branches from.
    """
    content: Any = {
        "format": _FORMAT,
        "config": settled(config),
        "split": split.seal,
        "data": dict(data),
        "guests": [dict(plugin) for plugin in plugins],
        "raylt": version(),
        "parent": None if parent is None else dict(parent),
    }
    content["sha256"] = hash_json(content)
    return content


def write(folder: Folder, identity: Identity) -> None:
    """Write identity.json into a run folder."""
    folder.write(FILE, as_text(identity))


def as_text(tree: Any) -> str:
    """Return a tree of values as indented JSON."""
    return json.dumps(tree, indent=2) + "\n"


def read_identity(folder: Folder) -> Identity:
    """Read the identity of the run in a folder.

    Raises:
        CheckpointError: It is missing, or was changed.
    """
    path = folder.path / FILE
    if FILE not in folder.names():
        raise CheckpointError(
            f"{folder.path}: the folder has no {FILE}, so the run is incomplete. Run it again.",
            code="run.not-found",
            path=str(folder.path),
        )
    identity = folder.read_json(FILE, _IDENTITY)
    content = {key: value for key, value in identity.items() if key != "sha256"}
    if identity["sha256"] != hash_json(content):
        raise _changed(f"{path}: the file was changed after the run was made. Put the original back.", path)
    if identity["format"] != _FORMAT:
        raise _changed(f"{path}: has format {identity['format']}, but this raylt reads {_FORMAT}. Run it again.", path)
    return identity


def plugins_of(identity: Identity, folder: Folder) -> list[PluginRecord]:
    """Read the records of a run's plugins from origins.json.

    Raises:
        CheckpointError: The records differ from those in the run's identity.
    """
    path = folder.path / ORIGINS
    plugins = folder.read_json(ORIGINS, _PLUGINS) if ORIGINS in folder.names() else []
    if plugins != identity["guests"]:
        raise _changed(f"{path}: the file was changed after the run was made. Put the original back.", path)
    return plugins


def check_config(identity: Identity, config: Config, folder: Folder) -> None:
    """Check that config.yaml is still the configuration that the run was made with.

    Raises:
        CheckpointError: Settings differ. The message names them.
    """
    changed = list(differences(completed(identity["config"]), settled(config)))
    if changed:
        path = folder.path / "config.yaml"
        settings = "; ".join(f"{key} is {now!r}, the run was made with {then!r}" for key, then, now in changed)
        keys = [key for key, *_ in changed]
        raise _changed(f"{path}: {settings}. Put the original back, or start a new run.", path, keys=keys)


def check_split(identity: Identity, split: Split, folder: Folder) -> None:
    """Check that split.json is still the split that the run was made with.

    Raises:
        CheckpointError: The split belongs to another run.
    """
    if split.seal != identity["split"]:
        path = folder.path / "split.json"
        raise _changed(
            f"{path}: the split ({split.seal[:12]}) differs from the run's split ({identity['split'][:12]}). Put the "
            "original back.",
            path,
        )


def check_data(identity: Identity, data: Mapping[str, str], folder: Folder) -> None:
    """Check that the data are the same as when the run was made.

    Raises:
        CheckpointError: The data differ. The message names the difference.
    """
    changed = [name for name, sha256 in identity["data"].items() if data.get(name) != sha256]
    if changed:
        raise _changed(
            f"{folder.path}: the run was made with other data ({', '.join(changed)} differ). Put the original data "
            "into data.root, or start a new run.",
            folder.path,
            names=changed,
        )


def check_version(identity: Identity, folder: Folder) -> None:
    """Check that this version of raylt made the run, since another version may compute other numbers.

    Raises:
        CheckpointError: Another version made it.
    """
    if identity["raylt"] != version():
        raise CheckpointError(
            f"{folder.path}: raylt {identity['raylt']} made the run, this is {version()}. Continue with that version, "
            "or start a new run.",
            code="run.other-version",
            path=str(folder.path),
            version=identity["raylt"],
        )


def _changed(message: str, path: Path, **details: object) -> CheckpointError:
    return CheckpointError(message, code="run.changed", path=str(path), **details)
