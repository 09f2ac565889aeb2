"""What the names of a configuration stand for, found once, where a run is started. Other processes get the values.

Beside what raylt brings there are guests: methods, models, data sources and augmentations of one's own, registered as
values (`raylt.register`), by a plug-in file (`--plugin FILE`), or by an installed package through the entry points
`raylt.methods`, `raylt.models`, `raylt.sources` and `raylt.augmentations`. A run folder records the guests that a run
used, with the SHA-256 of their source; to go on with it they must be there again, unchanged.
"""

import difflib
import hashlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from raylt.config import Config
from raylt.core.method import Method
from raylt.core.setup import Setup
from raylt.data.augment import AUGMENTATIONS
from raylt.data.sources import NAMES, SOURCES
from raylt.data.transforms import in_turn
from raylt.errors import ConfigError
from raylt.methods import METHODS, make_method
from raylt.models import MODELS, build

GuestKind = Literal["method", "model", "source", "augmentation"]
TABLES: dict[GuestKind, dict[str, Any]] = {
    "method": METHODS, "model": MODELS, "source": SOURCES, "augmentation": AUGMENTATIONS}
PLUGIN = "raylt_plugin_"                # what the modules of plug-in files are called


@dataclass(frozen=True)
class Guest:
    """One thing that raylt did not bring.

    Attributes:
        origin: the plug-in's file name, the package and its version, or "value".
        sha256: of the file that its source stands in; None where there is none (a notebook).
    """

    kind: GuestKind
    name: str
    value: Any
    origin: str
    sha256: str | None

    def record(self) -> dict[str, str | None]:
        """What a run folder keeps of it."""
        return {"kind": self.kind, "name": self.name, "origin": self.origin, "sha256": self.sha256}


_guests: dict[tuple[GuestKind, str], Guest] = {}


def register(value: Any, name: str | None = None, *, kind: GuestKind | None = None) -> str:
    """Makes a method, a model, a data source or an augmentation known under a name, in this process.

    Args:
        value: a subclass of `Method`; or a function: of a model (classes, (height, width, channels)) -> SplitModel, of
            a source (DataConfig) -> Source, of an augmentation (x, y, generator) -> (x, y).
        name: by default the method's `name`, or the function's.
        kind: needed for functions.

    Returns:
        The name.

    Raises:
        ConfigError: it is none of these, or the name is taken.
    """
    return _add(value, name, kind, "value")


def load_plugin(file: Path) -> list[Guest]:
    """Runs a Python file, which may call `raylt.register`; its subclasses of `Method` are registered in any case.

    Raises:
        ConfigError: it cannot be read or run, or brings nothing.
    """
    if not file.is_file():
        raise ConfigError(f"--plugin {file}: no such file; give a Python file that defines a method, or registers a "
                          "model, a source or an augmentation")
    digest = hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:8]       # two may be called alike
    name = f"{PLUGIN}{file.stem.replace('-', '_')}_{digest}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ConfigError(f"--plugin {file}: not a Python file; give one that ends in .py")
    module = importlib.util.module_from_spec(spec)
    before = set(_guests)
    sys.modules[name] = module          # where pickle finds its classes again
    if (beside := str(file.resolve().parent)) not in sys.path:
        sys.path.append(beside)         # it may import files beside it, as a script may
    try:
        spec.loader.exec_module(module)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"--plugin {file}: {type(error).__name__}: {error}; run it by itself to see where") from error
    for value in vars(module).values():
        if inspect.isclass(value) and issubclass(value, Method) and value.__module__ == name and hasattr(value, "name"):
            _add(value, None, "method", file.name)
    brought = [guest for key, guest in _guests.items() if key not in before or guest.value.__module__ == name]
    if not brought:
        raise ConfigError(f"--plugin {file}: defines no method (a subclass of raylt.Method with a `name`), and "
                          "registers nothing (raylt.register)")
    return brought


def guests() -> list[Guest]:
    """All guests of this process, for processes that resolve configurations themselves."""
    return list(_guests.values())


def adopt(others: Iterable[Guest]) -> None:
    """Takes over the guests of the process that sent them."""
    for guest in others:
        TABLES[guest.kind][guest.name] = guest.value
        _guests[guest.kind, guest.name] = guest


def resolve(config: Config) -> Setup:
    """The method, the model and the augmentation that a configuration names.

    Raises:
        ConfigError: no such name, or a field of the method that cannot be.
    """
    seek(config)
    _known("model", config.model, "model")
    for name in config.augment.split("+"):
        _known("augmentation", name, "augment")
    model = partial(build, name=config.model, factory=MODELS.get(config.model), weights=config.weights)
    return Setup(config, make_method(config.method), model,
                 in_turn([AUGMENTATIONS[name] for name in config.augment.split("+")]))


def seek(config: Config) -> None:
    """Registers what installed packages offer under the names of a configuration, where nobody else has them."""
    for kind, name in sorted(_named(config)):
        if name in TABLES[kind] or (kind == "source" and name.partition(":")[0] in NAMES):
            continue
        for point in entry_points(group=f"raylt.{kind}s", name=name):
            package = f"{point.dist.name} {point.dist.version}" if point.dist else point.value
            try:
                value = point.load()
            except Exception as error:
                raise ConfigError(f"{kind} = {name!r}: the package {package} that offers it cannot be loaded "
                                  f"({type(error).__name__}: {error}); mend or remove it") from error
            _add(value, name, kind, package)


def plugin_files() -> list[str]:
    """Files that this process was given; what was registered by a call has no file that another could read."""
    return [str(module.__file__) for name, module in sys.modules.items() if name.startswith(PLUGIN)]


def origins(config: Config) -> list[dict[str, str | None]]:
    """The records of the guests that a configuration names."""
    named = _named(config)
    return [guest.record() for key, guest in _guests.items() if key in named]


def _named(config: Config) -> set[tuple[GuestKind, str]]:
    """What a configuration names that may be a guest."""
    augmentations: set[tuple[GuestKind, str]] = {("augmentation", name) for name in config.augment.split("+")}
    return augmentations | {("method", config.method["name"]), ("model", config.model), ("source", config.data.source)}


def check_origins(recorded: list[dict[str, Any]], folder: Path) -> None:
    """Whether the guests that a run was made with are here, unchanged. No code is ever run from a run folder.

    Raises:
        ConfigError: one is missing or has another source; names it and the remedy.
    """
    for record in recorded:
        kind, name, origin = record["kind"], record["name"], record["origin"]
        remedy = f"give --plugin {origin} again" if origin.endswith(".py") else (
            "register it again (raylt.register)" if origin == "value" else f"install {origin}")
        guest = _guests.get((kind, name))
        if guest is None:
            raise ConfigError(f"{folder}: was made with the {kind} {name!r} ({origin}), which is not here; {remedy}")
        if record["sha256"] and guest.sha256 and guest.sha256 != record["sha256"]:
            raise ConfigError(f"{folder}: was made with another version of the {kind} {name!r} ({origin}, SHA-256 "
                              f"{record['sha256'][:16]}, now {guest.sha256[:16]}); bring the file of then, or start "
                              "a new run")


def _add(value: Any, name: str | None, kind: GuestKind | None, origin: str) -> str:
    if inspect.isclass(value) and issubclass(value, Method):
        kind, name = "method", name or value.name
    elif kind is None or kind == "method" or not callable(value):
        raise ConfigError(f"register: {value!r} is no subclass of raylt.Method; of a function say what it makes, as in "
                          "register(my_net, kind=\"model\")")
    name = name or value.__name__
    known = TABLES[kind].get(name) if kind != "source" or name not in NAMES else NAMES
    guest = _guests.get((kind, name))
    if known is not None and known is not value and (guest is None or _place(guest.value) != _place(value)):
        raise ConfigError(f"register: there is a {kind} called {name!r} already; give yours another name")
    module = sys.modules.get(value.__module__)
    if module is not None and module.__name__.startswith(PLUGIN):
        origin = Path(str(module.__file__)).name
    TABLES[kind][name] = value
    _guests[kind, name] = Guest(kind, name, value, origin, _source_hash(module))
    return name


def _place(value: Callable[..., Any]) -> tuple[str, str]:
    """Where something is defined: a cell or a file that is run again defines the same thing anew."""
    return value.__module__.removeprefix(PLUGIN), value.__qualname__


def _source_hash(module: ModuleType | None) -> str | None:
    file = getattr(module, "__file__", None)
    return hashlib.sha256(Path(file).read_bytes()).hexdigest() if file and Path(file).is_file() else None


def _known(kind: GuestKind, name: str, key: str) -> None:
    table = TABLES[kind]
    if name not in table and not (kind == "model" and ":" in name):
        nearest = difflib.get_close_matches(name, table, 1)
        hint = f"did you mean {nearest[0]}? " if nearest else ""
        raise ConfigError(f"{key} = {name!r}: no such {kind}; {hint}There are: {', '.join(table)}; one's own comes by "
                          "--plugin FILE")
