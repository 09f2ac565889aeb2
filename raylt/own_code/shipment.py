"""Pickles values for another process together with the source of the user's own modules.

Ray's workers and other nodes cannot import a plugin or a module next to a user's script. A `Shipment` holds a pickled
value and the source text of such modules. The process that opens it imports each module from that text under the same
name, so that pickle finds classes and functions by reference, as in an installed package.

Code without a module file (a notebook, the script itself) is pickled by value, by cloudpickle.
"""

import copyreg
import importlib
import importlib.abc
import importlib.util
import pickle
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from raylt.errors import ConfigError, RayltError, one_line, user_fault
from raylt.own_code.module_sources import PLUGIN, Source, SourceLoader, sources_of
from raylt.own_code.unshippable import fault_in


class _ArrivedFinder(importlib.abc.MetaPathFinder):
    """Import finder for modules whose sources this process has received."""

    def __init__(self) -> None:
        self.sources: dict[str, Source] = {}

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        source = self.sources.get(fullname)
        return None if source is None else importlib.util.spec_from_loader(fullname, SourceLoader(source))


_arrived = _ArrivedFinder()


@dataclass(frozen=True)
class Shipment:
    """A pickled value and the module sources that are needed to unpickle it."""

    sources: tuple[Source, ...]
    content: bytes

    def open(self) -> Any:
        """Install the sources in this process and unpickle the value.

        Raises:
            ConfigError: A module of the user cannot be imported in this process.
        """
        _install(self.sources)
        for source in self.sources:
            if source.name.startswith(PLUGIN):
                try:
                    _import(source.name, self.sources)
                except RayltError:
                    _arrived.sources.pop(source.name, None)  # do not send a broken module to further processes
                    raise
        pickle_modules_by_name()
        try:
            return pickle.loads(self.content)
        except RayltError:
            raise
        except (ImportError, AttributeError, NameError, OSError, SyntaxError) as error:
            raise _not_imported(error, self.sources) from error


def ship(value: Any, modules: Iterable[ModuleType], dumps: Callable[[Any], bytes]) -> Shipment:
    """Pickle a value and collect the module sources that another process needs to unpickle it.

    Args:
        value: The value.
        modules: Modules that define the user's classes and functions. Installed modules need no source.
        dumps: `cloudpickle.dumps`, of Ray or of cloudpickle itself.

    Raises:
        ConfigError: A part of the value cannot be pickled. The message names the class, the file and the line.
    """
    pickle_modules_by_name()
    sources = dict(_arrived.sources)
    for module in modules:
        sources |= {source.name: source for source in sources_of(module)}
    try:
        return Shipment(tuple(sources.values()), dumps(value))
    except RayltError:
        raise
    except Exception as error:  # the user's __reduce__ may raise any exception
        fault = fault_in(value, dumps)
        message = fault or f"{type(value).__name__} cannot be sent to another process ({one_line(error)})"
        raise ConfigError(message, code="plugin.not-picklable", cause=one_line(error)) from error


def pickle_modules_by_name() -> None:
    """Make every loaded module picklable by name, even if its type is a subclass of `ModuleType`.

    cloudpickle also pickles submodules that a function may use: for `model.classes` in a function that also uses
    `torch`, it pickles `torch.classes`. It supports only plain modules, but torch has a dozen modules of other types.
    """
    for module in list(sys.modules.values()):
        kind = type(module)
        if isinstance(module, ModuleType) and kind is not ModuleType and kind.__reduce__ is object.__reduce__:
            copyreg.pickle(kind, _reduce_module)  # pyright: ignore[reportArgumentType]


def _reduce_module(module: ModuleType) -> tuple[Any, ...]:
    return importlib.import_module, (module.__name__,)


def _install(sources: Iterable[Source]) -> None:
    """Make received sources importable in this process; unload modules whose source has changed."""
    new = {source.name: source for source in sources}
    for name, source in new.items():
        module = sys.modules.get(name)
        if module is not None and name in _arrived.sources and _arrived.sources[name] != source:
            del sys.modules[name]
    if any(name not in sys.modules for name in new):
        _arrived.sources |= {
            name: source for name, source in new.items() if name not in sys.modules or name in _arrived.sources
        }
        if _arrived not in sys.meta_path:
            sys.meta_path.insert(0, _arrived)


def _import(name: str, sources: tuple[Source, ...]) -> None:
    try:
        importlib.import_module(name)
    except RayltError:
        raise
    except Exception as error:  # the user's module may raise any exception
        raise _not_imported(error, sources) from error


def _not_imported(error: Exception, sources: tuple[Source, ...]) -> ConfigError:
    files = ", ".join(Path(source.file).name for source in sources) or "no file"
    return ConfigError(
        f"--plugin: the code cannot be imported in another process ({user_fault(error)}). raylt sends {files} and "
        "their imports from the same folder. Install other modules on every node, or put them at the same path there.",
        code="plugin.not-importable",
        cause=user_fault(error),
    )
