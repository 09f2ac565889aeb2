"""Imports plugin files as Python modules."""

import hashlib
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

from raylt import store
from raylt.disk import is_file
from raylt.errors import CheckpointError, ConfigError, user_fault, without_remedy
from raylt.own_code.module_sources import (
    PLUGIN,
    Source,
    SourceLoader,
    imported_names,
    is_imported_from,
    paths_of,
    with_imports,
)

MAX_BYTES = 16 * store.MIB


def run_plugin(file: Path) -> ModuleType:
    """Import a plugin file as a module.

    Other processes import the same text under the same name.

    Raises:
        ConfigError: The file cannot be read or run. The message names the line.
    """
    source = _read(file)
    name = source.name
    folder = str(file.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)  # a plugin may import files next to it, as a script may
    _check_imports(file, source)
    spec = importlib.util.spec_from_loader(name, SourceLoader(source))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # pickle looks up the module's classes there
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, ConfigError | KeyboardInterrupt):
            raise
        raise ConfigError(
            f"{file}: {user_fault(error)}", code="plugin.failed", path=str(file), cause=user_fault(error)
        ) from error
    return module


def _read(file: Path) -> Source:
    if not is_file(file):
        raise ConfigError(
            f"{file}: no such file. Give a Python file that defines a method, or registers a model, a source "
            "or an augmentation.",
            code="file.not-found",
            path=str(file),
        )
    if file.suffix != ".py":
        raise ConfigError(
            f"{file}: is not a Python file. Give a file that ends in .py.",
            code="plugin.not-python",
            path=str(file),
        )
    digest = hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:8]  # two files may have the same name
    stem = re.sub(r"\W", "_", file.stem)  # a dot in a module's name would denote a package
    try:
        text = importlib.util.decode_source(store.read(file, MAX_BYTES))
    except (CheckpointError, SyntaxError, UnicodeDecodeError, LookupError) as error:
        raise ConfigError(
            f"{file}: the file cannot be read ({without_remedy(error)}). Give a Python file in UTF-8.",
            code="plugin.unreadable",
            path=str(file),
            cause=str(error),
        ) from error
    return Source(f"{PLUGIN}{stem}_{digest}", str(file.resolve()), text)


def _check_imports(file: Path, source: Source) -> None:
    """Raise ConfigError if the plugin, or a file next to it, imports a neighbour's name that Python finds elsewhere.

    The name may belong to a package of raylt, to an installed module, or to a file next to another plugin. Names of
    Python's own modules do not count, since an import of these rarely means a neighbour.
    """
    folder = file.resolve().parent
    for each in with_imports(folder, [source]):
        for name in dict.fromkeys(dotted.partition(".")[0] for dotted in imported_names(each)):
            neighbour = next(filter(is_file, (folder / name / "__init__.py", folder / f"{name}.py")), None)
            elsewhere = None if is_imported_from(name, folder) else next(filter(None, paths_of(name)), None)
            if neighbour in (None, file.resolve()) or elsewhere is None or name in sys.stdlib_module_names:
                continue
            raise ConfigError(
                f"{neighbour}: `import {name}` in {Path(each.file).name} would import another module of this name "
                f"({elsewhere}). Rename the file.",
                code="plugin.name-taken",
                path=str(neighbour),
                name=name,
            )
