"""The registry: maps names in a configuration to values, once, in the process that starts a run.

Plugins are a user's own methods, models, data sources, augmentations, partitions and schedules. They come as values
(`raylt.register`), from a file (`--plugin FILE`), or from an installed package through the entry points
`raylt.methods`, `raylt.models`, `raylt.sources`, `raylt.augmentations`, `raylt.partitions` and `raylt.schedules`. A run
folder records its plugins with the SHA-256 of their sources. To continue the run they must be registered again,
unchanged.
"""

import functools
import hashlib
import inspect
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from raylt.config import Config
from raylt.core.method import Method
from raylt.core.setup import Setup
from raylt.core.training.schedules import SCHEDULES
from raylt.data.augment import AUGMENTATIONS, Augmentation, Checked, in_turn
from raylt.data.sources.sources import NAMES, SOURCES
from raylt.data.splits.partitions import PARTITIONS
from raylt.errors import ConfigError, did_you_mean, spoken
from raylt.methods import METHODS, make_method
from raylt.models import LIBRARIES, MODELS, build
from raylt.own_code.module_sources import PLUGIN, own_imports_of
from raylt.own_code.plugin_file import run_plugin
from raylt.typed_json import hash_json

PluginKind = Literal["method", "model", "source", "augmentation", "partition", "schedule"]
TABLES: dict[PluginKind, dict[str, Any]] = {
    "method": METHODS,
    "model": MODELS,
    "source": SOURCES,
    "augmentation": AUGMENTATIONS,
    "partition": PARTITIONS,
    "schedule": SCHEDULES,
}
IN_TASK: frozenset[PluginKind] = frozenset({"source", "partition"})
IN_SETUP = frozenset(TABLES) - IN_TASK


@dataclass(frozen=True)
class Plugin:
    """A registered method, model, data source or augmentation that is not part of raylt.

    Attributes:
        kind: Kind of the value.
        name: Name in a configuration.
        value: The method or the function.
        origin: Name of the plugin's file, the package with its version, or "value".
        sha256: SHA-256 of its source, see `_source_hash`; None without a file (a notebook).
    """

    kind: PluginKind
    name: str
    value: Any
    origin: str
    sha256: str | None

    def record(self) -> dict[str, str | None]:
        """Return the record of this plugin that a run folder stores."""
        return {"kind": self.kind, "name": self.name, "origin": self.origin, "sha256": self.sha256}


_plugins: dict[tuple[PluginKind, str], Plugin] = {}


def register(value: Any, name: str | None = None, *, kind: PluginKind | None = None) -> str:
    """Register a method, a model, a data source or an augmentation under a name, in this process.

    Args:
        value: A subclass of `Method`, or a function. A model is (classes, (height, width, channels)) -> SplitModel, a
            source (DataConfig) -> Source, an augmentation (x, y, generator) -> (x, y), a partition
            (labels, clients, generator, DataConfig) -> rows of each client, a schedule
            (LocalConfig, round, rounds) -> learning rate.
        name: Name in a configuration; by default the method's `name`, or the function's.
        kind: Kind of a function; not needed for a method.

    Returns:
        The name.

    Raises:
        ConfigError: The value has another type, or the name is taken.
    """
    return _add(value, name, kind, "value")


def load_plugin(file: Path) -> list[Plugin]:
    """Run a Python file, register its subclasses of `Method`, and return all plugins that the file registers.

    The file may also call `raylt.register`.

    Raises:
        ConfigError: The file cannot be read or run, or registers nothing.
    """
    before, module = set(_plugins), run_plugin(file)
    name = module.__name__
    for value in vars(module).values():
        if inspect.isclass(value) and issubclass(value, Method) and value.__module__ == name and hasattr(value, "name"):
            _add(value, None, "method", file.name)
    brought = [plugin for key, plugin in _plugins.items() if key not in before or plugin.value.__module__ == name]
    if not brought:
        raise ConfigError(
            f"{file}: registers nothing. Define a subclass of raylt.Method with a `name`, or call raylt.register.",
            code="plugin.no-method",
            path=str(file),
        )
    return brought


def plugin_modules() -> list[ModuleType]:
    """Return the modules that define this process's plugins, and the modules of the classes they inherit from."""
    kinds = [kind for plugin in _plugins.values() for kind in getattr(plugin.value, "__mro__", (plugin.value,))]
    names = dict.fromkeys(getattr(kind, "__module__", None) or "" for kind in kinds)
    return [sys.modules[name] for name in names if name in sys.modules]


def is_plugin(kind: PluginKind, name: str) -> bool:
    """Return whether a name belongs to a plugin, registered by the user or by an installed package."""
    return (kind, name) in _plugins


def plugins() -> list[Plugin]:
    """Return all plugins of this process, so that they can be sent to other processes."""
    return list(_plugins.values())


def adopt(others: Iterable[Plugin]) -> None:
    """Register the plugins that another process sent."""
    for plugin in others:
        TABLES[plugin.kind][plugin.name] = plugin.value
        _plugins[plugin.kind, plugin.name] = plugin


def resolve(config: Config) -> Setup:
    """Return a configuration together with the method, model and augmentation that it names.

    Raises:
        ConfigError: A name is unknown, or a field of the method is wrong.
    """
    seek(config)
    if config.data.partition is not None:
        _check_name("partition", config.data.partition, "data.partition")
    return resolve_setup(config)


def resolve_setup(config: Config) -> Setup:
    """Return the same as `resolve`, but accept that the data source or partition is missing."""
    seek(config, IN_SETUP)
    _check_name("model", config.model, "model")
    for name in config.augment.split("+"):
        _check_name("augmentation", name, "augment")
    _check_name("schedule", config.local.schedule, "local.schedule")
    model = partial(
        build, name=config.model, factory=MODELS.get(config.model), weights=config.weights, side=config.input
    )
    augment = in_turn([_augmentation(name) for name in config.augment.split("+")])
    return Setup(config, make_method(config.method), model, augment, SCHEDULES[config.local.schedule])


def _augmentation(name: str) -> Augmentation | None:
    augmentation = AUGMENTATIONS[name]
    if augmentation is None or not is_plugin("augmentation", name):
        return augmentation
    return Checked(name, augmentation)


def seek(config: Config, kinds: Collection[PluginKind] = frozenset(TABLES)) -> None:
    """Load the plugins of installed packages that a configuration names, unless they are registered already.

    Args:
        config: The configuration.
        kinds: Kinds of plugins to load; all by default.

    Raises:
        ConfigError: A plugin cannot be loaded.
    """
    for kind, name in sorted(each for each in _named(config) if each[0] in kinds):
        # Scanning entry points dominates the cost of resolving a configuration.
        if name in TABLES[kind] or _is_built_in(kind, name):
            continue
        for point in entry_points(group=f"raylt.{kind}s", name=name):
            package = f"{point.dist.name} {point.dist.version}" if point.dist else point.value
            try:
                value = point.load()
            except (Exception, SystemExit) as error:
                raise ConfigError(
                    f"{kind}: {name!r} of the package {package} cannot be loaded ({type(error).__name__}: {error}). "
                    "Repair or remove the package.",
                    code="plugin.failed",
                    name=name,
                ) from error
            _add(value, name, kind, package)


def _is_built_in(kind: PluginKind, name: str) -> bool:
    """Return whether raylt itself opens or builds a named value, such as digits, folder:PATH or timm:NAME."""
    prefix, colon, _ = name.partition(":")
    if kind == "source":
        return prefix in NAMES
    return kind == "model" and colon == ":" and prefix in LIBRARIES


def origins(config: Config) -> list[dict[str, str | None]]:
    """Return the records of the plugins that a configuration names."""
    named = _named(config)
    return [plugin.record() for key, plugin in _plugins.items() if key in named]


def other_version(recorded: Mapping[str, str]) -> str | None:
    """Return the first of the recorded plugins whose source has changed, or None.

    Args:
        recorded: SHA-256 of plugins by kind and name ("method mine"). Those that are not registered do not count.
    """
    current = {f"{kind} {name}": plugin.sha256 for (kind, name), plugin in _plugins.items()}
    return next((name for name, sha256 in recorded.items() if current.get(name) not in (None, sha256)), None)


def _named(config: Config) -> set[tuple[PluginKind, str]]:
    """Return the kind and name of each configured value that may come from a plugin."""
    augmentations: set[tuple[PluginKind, str]] = {("augmentation", name) for name in config.augment.split("+")}
    named: set[tuple[PluginKind, str]] = {
        ("method", config.method["name"]),
        ("model", config.model),
        ("source", config.data.source),
        ("schedule", config.local.schedule),
    }
    if config.data.partition is not None:
        named.add(("partition", config.data.partition))
    return augmentations | named


def check_origins(recorded: list[dict[str, Any]], folder: Path) -> None:
    """Check that a run's plugins are registered and unchanged. Code from a run folder is never run.

    Args:
        recorded: Records of the run's plugins.
        folder: The run folder, for errors.

    Raises:
        ConfigError: A plugin is missing or has another source.
    """
    for record in recorded:
        kind, name, origin = record["kind"], record["name"], record["origin"]
        remedy = (
            f"Give --plugin {origin} again"
            if origin.endswith(".py")
            else ("Register it again (raylt.register)" if origin == "value" else f"Install {origin}")
        )
        plugin = _plugins.get((kind, name))
        if plugin is None:
            raise ConfigError(
                f"{folder}: the run's {kind} {name!r} is not registered ({origin}). {remedy}.",
                code="plugin.missing",
                name=name,
            )
        if record["sha256"] and plugin.sha256 and plugin.sha256 != record["sha256"]:
            raise ConfigError(
                f"{folder}: the run's {kind} {name!r} was another version ({origin} or a file that it imports, "
                f"SHA-256 {record['sha256'][:16]}, now {plugin.sha256[:16]}). Give the files of that version, or "
                "start a new run.",
                code="plugin.changed",
                name=name,
            )


def _add(value: Any, name: str | None, kind: PluginKind | None, origin: str) -> str:
    if inspect.isclass(value) and issubclass(value, Method):
        kind, name = "method", name or value.name
    elif kind is not None and kind not in TABLES:
        raise ConfigError(
            f"register: unknown kind ({kind!r}). {did_you_mean(str(kind), TABLES)}Give one of: {', '.join(TABLES)}.",
            code="plugin.wrong-type",
        )
    elif kind is None or kind == "method" or not callable(value):
        raise ConfigError(
            f"register: is neither a subclass of raylt.Method nor a function with a kind ({value!r}). Give the kind "
            'of the function, as in register(my_net, kind="model").',
            code="plugin.wrong-type",
        )
    function = _function_of(value)
    name = name or str(function.__name__)
    registered = TABLES[kind].get(name) if kind != "source" or name not in NAMES else NAMES
    plugin = _plugins.get((kind, name))
    is_same = registered is value or (plugin is not None and _place(plugin.value) == _place(function))
    if registered is not None and not is_same:
        raise ConfigError(
            f"register: a {kind} with this name exists already ({name!r}). Use another name.",
            code="plugin.name-taken",
            name=name,
        )
    module = sys.modules.get(function.__module__)
    if module is not None and module.__name__.startswith(PLUGIN):
        origin = Path(str(module.__file__)).name
    TABLES[kind][name] = value
    _plugins[kind, name] = Plugin(kind, name, value, origin, _source_hash(module))
    return name


def _function_of(value: Any) -> Any:
    """Return the function behind `functools.partial`, or the class of a callable object; other values unchanged."""
    while isinstance(value, functools.partial):
        value = value.func
    return value if hasattr(value, "__qualname__") else type(value)


def _place(value: Callable[..., Any]) -> tuple[str, str]:
    """Return the module and name of a value, which stay the same if the value is defined again."""
    function = _function_of(value)
    return function.__module__.removeprefix(PLUGIN), function.__qualname__


def _source_hash(module: ModuleType | None) -> str | None:
    """Return the SHA-256 of a module's file; if it imports modules from its own folder, of the file and of these."""
    file = getattr(module, "__file__", None)
    if module is None or not file or not Path(file).is_file():
        return None
    own = hashlib.sha256(Path(file).read_bytes()).hexdigest()
    helpers = [[source.name, source.text] for source in own_imports_of(module)]
    return hash_json([own, *helpers]) if helpers else own


def _check_name(kind: PluginKind, name: str, key: str) -> None:
    table = TABLES[kind]
    if name not in table and not (kind == "model" and ":" in name):
        raise ConfigError(
            f"{key}: unknown {kind} ({name!r}). {did_you_mean(name, table)}"
            f"Give one of: {', '.join(table)}; or "
            f"{spoken('--plugin FILE with your own', 'your own by raylt.register')}.",
            code="config.unknown-name",
            key=key,
            value=name,
        )
