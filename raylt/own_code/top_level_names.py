"""Prevents a user's files from shadowing raylt's top-level packages `actors` and `tune`.

`python script.py` puts the script's folder first on the import path, and Ray's workers also put the current folder
first. So a `tune.py` in one of them would be imported in place of raylt's package.
"""

import importlib.util
import json
import os
import sys
from collections.abc import Iterable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from raylt.errors import ConfigError

HOME = Path(__file__).resolve().parents[2]
TOP = ("actors", "tune")
VARIABLE = "RAYLT_SHADOWED"  # Environment variable for Ray's workers: folders, and names not to import from them.


def claim() -> None:
    """Import raylt's own packages `actors` and `tune`, even if a user's file has the same name.

    Raises:
        ConfigError: A user's file of this name was imported before.
    """
    for name in TOP:
        file = HOME / name / "__init__.py"
        module = sys.modules.get(name)
        if module is None:
            spec = importlib.util.spec_from_file_location(name, file, submodule_search_locations=[str(file.parent)])
            assert spec is not None
            assert spec.loader is not None
            module = sys.modules[name] = importlib.util.module_from_spec(spec)
            try:
                spec.loader.exec_module(module)
            except BaseException:
                del sys.modules[name]
                raise
        elif not _is(module, file):
            user_file = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", [])), name)
            raise ConfigError(
                f"{user_file}: the file has the name of raylt's package {name}, and was imported in its place. Rename "
                "it.",
                code="plugin.name-taken",
                path=user_file,
                name=name,
            )


def _is(module: ModuleType, file: Path) -> bool:
    module_file = getattr(module, "__file__", None)
    return module_file is not None and Path(module_file).resolve() == file


def shadowed(folders: Iterable[Path]) -> dict[str, list[str]]:
    """Return, for each folder, the modules that Ray's workers would import from it, unlike this process."""
    by_folder = {str(folder.resolve()): _names_shadowed(folder.resolve()) for folder in folders}
    return {folder: names for folder, names in by_folder.items() if names}


def worker_folders() -> list[Path]:
    """Return the folders that Ray puts first on its workers' path: the current folder and the script's folder."""
    script = os.path.dirname(os.path.realpath(sys.argv[0])) if sys.argv and sys.argv[0] else None
    return [Path.cwd(), *([Path(script)] if script and script in sys.path else [])]


def _names_shadowed(folder: Path) -> list[str]:
    if folder == HOME:
        return []
    try:
        entries = [entry for entry in folder.iterdir() if entry.suffix == ".py" or (entry / "__init__.py").is_file()]
    except OSError:
        return []
    names = sorted({entry.stem for entry in entries if entry.stem.isidentifier()})
    return [
        name
        for name in names
        if name in TOP or (_elsewhere(name, {folder}) is not None and not _comes_from(name, folder))
    ]


def _comes_from(name: str, folder: Path) -> bool:
    """Return whether this process imports a name from the folder."""
    module = sys.modules.get(name)
    file = getattr(module, "__file__", None) if module else getattr(PathFinder.find_spec(name), "origin", None)
    return file is not None and Path(file).resolve().is_relative_to(folder)


def _elsewhere(name: str, folders: set[Path]) -> ModuleSpec | None:
    return PathFinder.find_spec(name, [entry for entry in sys.path if Path(entry).resolve() not in folders])


def worker_environment() -> dict[str, Any]:
    """Return the runtime environment in which Ray's workers import the same modules as this process."""
    names = shadowed(worker_folders())
    if not names:
        return {}
    return {"worker_process_setup_hook": f"{__name__}.prefer_installed", "env_vars": {VARIABLE: json.dumps(names)}}


def check_session() -> None:
    """Check that workers of a Ray session that the user has started import raylt's packages.

    raylt cannot configure the workers of such a session.

    Raises:
        ConfigError: The workers would import a user's file in place of a package of raylt.
    """
    for folder, names in shadowed(worker_folders()).items():
        for name in names:
            if name in TOP:
                raise ConfigError(
                    f"{Path(folder) / name}: the file has the name of raylt's package {name}, and the workers of this "
                    "process's Ray session would import it instead. Rename it, or leave ray.init() to raylt.",
                    code="plugin.name-taken",
                    path=str(Path(folder) / name),
                    name=name,
                )


class _InstalledFirst(MetaPathFinder):
    """Import finder that imports shadowed top-level modules from outside the folders that shadow them."""

    def __init__(self, names: dict[str, list[str]]):
        self.names = set[str]().union(*names.values())
        self.folders = {Path(folder) for folder in names}

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname in TOP:
            file = HOME / fullname / "__init__.py"
            return importlib.util.spec_from_file_location(fullname, file, submodule_search_locations=[str(file.parent)])
        return _elsewhere(fullname, self.folders) if path is None and fullname in self.names else None


def prefer_installed() -> None:
    """Make a Ray worker import the same modules as the driver. Ray calls this when the worker starts."""
    sys.meta_path.insert(0, _InstalledFirst(json.loads(os.environ[VARIABLE])))
