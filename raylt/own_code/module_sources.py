"""Collects the sources of the user's own modules: plugins, modules next to a script, and their imports."""

import ast
import importlib.abc
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

from raylt.errors import INSTALLED

PLUGIN = "raylt_plugin_"  # Prefix of the module names of plugin files.
OWN_PACKAGES = ("raylt", "actors", "tune")


@dataclass(frozen=True)
class Source:
    """The source code of one module.

    Attributes:
        name: Dotted name of the module.
        file: Path for tracebacks, which need not exist in the process that imports the module.
        text: The source code.
        package: Whether the module is a package.
    """

    name: str
    file: str
    text: str
    package: bool = False


class SourceLoader(importlib.abc.ExecutionLoader):
    """Import loader that executes the source code in a `Source`."""

    def __init__(self, source: Source):
        self.source = source

    def get_source(self, fullname: str) -> str:
        return self.source.text

    def get_filename(self, fullname: str) -> str:
        return self.source.file

    def is_package(self, fullname: str) -> bool:
        return self.source.package


def sources_of(module: ModuleType) -> list[Source]:
    """Return the sources of a user's module and of the modules in its folder that it imports.

    They include the modules that one of them imports, at its top or inside a function, and all modules that this
    process has loaded from that folder. Modules from other folders must be importable in every process.
    """
    folder = own_folder(module)
    if folder is None or module.__name__ == "__main__":
        return []
    loaded = [
        (name, other)
        for name, other in list(sys.modules.items())
        if _in_folder(other, folder) and name == other.__name__ and name != "__main__"
    ]
    modules = [(module.__name__, module), *loaded]
    return with_imports(folder, [_source(name, Path(str(other.__file__)), other) for name, other in modules])


def own_imports_of(module: ModuleType) -> list[Source]:
    """Return the sources of the modules that a user's module or script imports from its own folder, directly or not.

    They are sorted by name. `importlib.import_module` does not count as an import.
    """
    folder = own_folder(module)
    if folder is None:
        return []
    own = _source(module.__name__, Path(str(module.__file__)), module)
    return sorted((source for source in with_imports(folder, [own]) if source is not own), key=lambda each: each.name)


def with_imports(folder: Path, waiting: list[Source | None]) -> list[Source]:
    """Return the given sources, and those of the modules in a folder that they import, directly or not."""
    sources: dict[str, Source] = {}
    while waiting:
        source = waiting.pop()
        if source is None or source.name in sources:
            continue
        sources[source.name] = source
        waiting += [_source_in(folder, name) for name in imported_names(source) if name not in sources]
    return list(sources.values())


def own_folder(module: ModuleType) -> Path | None:
    """Return the folder of a user's module; None for modules of Python, installed packages and raylt.

    For a module in a package, it is the folder that contains the package.
    """
    file = getattr(module, "__file__", None)
    if not file or module.__name__.partition(".")[0] in OWN_PACKAGES:
        return None
    path = Path(_real(file))
    if path.suffix != ".py" or str(path).startswith(_installed()) or not INSTALLED.isdisjoint(path.parts):
        return None
    levels = module.__name__.count(".") + (path.name == "__init__.py")
    for _ in range(levels):
        path = path.parent
    return path.parent


def _in_folder(module: ModuleType, folder: Path) -> bool:
    """Return whether a module is the user's own and its file is in or below a folder."""
    file = getattr(module, "__file__", None)
    if not isinstance(file, str) or not _real(file).startswith(f"{folder}{os.sep}"):
        return False
    module_folder = own_folder(module)
    return module_folder is not None and module_folder.is_relative_to(folder)


@cache
def _installed() -> tuple[str, ...]:
    kinds = ("stdlib", "platstdlib", "purelib", "platlib")
    return tuple(f"{os.path.realpath(sysconfig.get_path(kind))}{os.sep}" for kind in kinds)


@cache
def _real(file: str) -> str:
    return os.path.realpath(file)


def _source(name: str, file: Path, module: ModuleType | None = None) -> Source | None:
    """Return the source of a module: the text from which it was loaded or, if unknown, the content of its file."""
    loader = getattr(module, "__loader__", None)
    if isinstance(loader, SourceLoader):
        return loader.source
    try:
        text = importlib.util.decode_source(file.read_bytes())
    except (OSError, SyntaxError, UnicodeDecodeError):
        return None
    return Source(name, str(file), text, file.name == "__init__.py")


def _source_in(folder: Path, name: str) -> Source | None:
    """Return the source of the module with this import name, if its file is in the folder.

    The file is ignored if this process imports the name from elsewhere, such as from the standard library.
    """
    top = name.partition(".")[0]
    if top in OWN_PACKAGES or top in sys.builtin_module_names:
        return None
    if not is_imported_from(top, folder):
        return None
    path = folder.joinpath(*name.split("."))
    for file in (path / "__init__.py", path.with_name(path.name + ".py")):
        if file.is_file():
            return _source(name, file.resolve(), sys.modules.get(name))
    return Source(name, str(path / "__init__.py"), "", True) if path.is_dir() else None  # a namespace package


def is_imported_from(top: str, folder: Path) -> bool:
    """Return whether this process imports a top-level module from the folder."""
    return any(path and Path(path).resolve().is_relative_to(folder) for path in paths_of(top))


def paths_of(top: str) -> list[str]:
    """Return the file of a top-level module, or the folders of a package."""
    module = sys.modules.get(top)
    if module is not None:
        return [getattr(module, "__file__", None) or "", *getattr(module, "__path__", [])]
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return []
    if spec is None:
        return []
    if spec.origin and spec.has_location:
        return [spec.origin]
    return list(spec.submodule_search_locations or [])


def imported_names(source: Source) -> Iterator[str]:
    """Yield the dotted names that a source imports anywhere, and their parent packages."""
    try:
        nodes = list(ast.walk(ast.parse(source.text)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the import of the module reports the error
        return
    package = source.name if source.package else source.name.rpartition(".")[0]
    for node in nodes:
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = _base_of(node, package)
            names = [base, *(f"{base}.{alias.name}" for alias in node.names)] if base else []
        for name in names:
            parts = name.split(".")
            yield from (".".join(parts[:end]) for end in range(1, len(parts) + 1))


def _base_of(node: ast.ImportFrom, package: str) -> str:
    """Return the absolute name of the module in `from module import ...`; "" if there is none."""
    parents: list[str] = []
    if node.level:
        parts = package.split(".")
        parents = parts[: len(parts) - node.level + 1]
    return ".".join([*parents, *([node.module] if node.module else [])])
