"""`located`: resolves the relative paths of a configuration against a folder."""

import os
import re
from pathlib import Path

from raylt.config.sections import Config, DataConfig

TEACHER = "teacher"  # Field of a method that may name a file; see raylt/models/clip.py.


def located(config: Config, start: Path | None) -> Config:
    """Return a configuration whose relative paths are made absolute.

    A path that exists only relative to this process's working directory is resolved there, because a run may have been
    copied from another machine together with its data.

    Args:
        config: The configuration.
        start: Folder to which the paths are relative, the working directory of the process that made a run; None
            leaves them unchanged.
    """
    if start is None or start == Path.cwd():
        return config
    changes: dict[str, object] = {"data": located_data(config.data, start)}
    kind, _, name = config.model.partition(":")
    if kind == "clip":
        changes["model"] = f"clip:{_teacher(name, start)}"
    if config.weights not in (None, "imagenet"):
        changes["weights"] = _path(config.weights, start)
    if teacher := config.method.get(TEACHER):
        changes["method"] = {**config.method, TEACHER: _teacher(teacher, start)}
    return config.model_copy(update=changes)


def located_data(data: DataConfig, start: Path | None) -> DataConfig:
    """Return data settings whose relative paths are made absolute; see `located`."""
    if start is None or start == Path.cwd():
        return data
    changes: dict[str, object] = {"root": _path(data.root, start), "source": _source(data.source, start)}
    if data.split is not None:
        changes["split"] = _path(data.split, start)
    return data.model_copy(update=changes)


def _source(source: str, start: Path) -> str:
    kind, _, address = source.partition(":")
    if kind in ("folder", "npz") and address:
        return f"{kind}:{_path(address, start)}"
    if kind == "ray" and address and "://" not in address:
        return f"{kind}:{_path(address, start)}"
    if kind == "hf" and address:  # a path of a saved data set, or a name on the Hub
        path = _path(address, start)
        return f"{kind}:{path}" if os.path.isdir(path) else source
    return source


def _teacher(teacher: str, start: Path) -> str:
    kind, _, address = teacher.partition(":")
    if address and (kind in ("npz", "local-dir") or re.fullmatch(r"[^/:]+/[^/:]+", kind)):
        return f"{kind}:{_path(address, start)}"
    return teacher


def _path(text: str, start: Path) -> str:
    path = Path(text).expanduser()
    from_start = start / path
    return str(path.absolute() if path.exists() and not from_start.exists() else from_start)
