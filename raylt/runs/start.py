"""The functions `raylt.run` and `raylt.resume`."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from raylt.config import Config, apply, assign, check, overlay, override, read
from raylt.core.exchange import check_exchange
from raylt.core.method import Method
from raylt.core.protection.protection import check_delta
from raylt.core.setup import Setup, shared_entries
from raylt.core.training.schedules import scheduled_rate
from raylt.data.augment import try_augmentation
from raylt.data.fingerprint import hash_data
from raylt.data.sources.sources import check_size
from raylt.data.splits.check import complete
from raylt.data.splits.draw import check_judged
from raylt.data.task import Task, TaskSpec, build_task, outline_of
from raylt.disk import check_name, folder_path
from raylt.errors import ConfigError, RayltError, no_exit, own_function, spoken
from raylt.methods import METHODS
from raylt.models import check_weights, try_model
from raylt.models.split import SplitModel, StateDict
from raylt.registry import PluginKind, is_plugin, origins, register, resolve
from raylt.runs import continuation
from raylt.runs.callbacks.base import Callback, Callbacks, checked
from raylt.runs.callbacks.notebook_progress import progress_display
from raylt.runs.folder.writer import Journal
from raylt.runs.preparation import prepare_method
from raylt.runs.run import Run
from raylt.runs.runner import FleetKind, carry_out
from raylt.seeds import seeded

# Error codes for missing files, which may exist on the machine that will run the plan.
_LACKING_FILES = ("data.not-found", "model.weights-unavailable", "model.teacher-unavailable")
# Keywords of `run` that also accept a function, and the kind of plugin that it becomes.
PLUGIN_KEYWORDS: dict[str, PluginKind] = {
    "model": "model",
    "data": "source",
    "augment": "augmentation",
    "partition": "partition",
    "schedule": "schedule",
}


def run(
    what: "str | Path | Config | Method",
    /,
    out: Path | str = "runs",
    name: str | None = None,
    fleet: FleetKind = "ray",
    address: str | None = None,
    quiet: bool = False,
    callbacks: Sequence[Callback] = (),
    overrides: Sequence[str] | Mapping[str, Any] = (),
    **settings: Any,
) -> Run:
    """Run a configuration to its end in a new run folder.

        raylt.run("fedprox", data="cifar10", clients=20, rounds=200, local={"lr": 0.1}, mu=0.01)

    Args:
        what: A method's name, a Method, the path of a YAML file, recipe:NAME, or a Config.
        out: Folder in which to create the run folder.
        name: Name of the run folder in `out`; by default composed of method, data and time.
        fleet: "ray" for client actors on Ray; "local" for all clients in this process; "processes" for forks of this
            process, one per core. The result is the same.
        address: Address of a running Ray cluster, HOST:PORT or auto; by default a new local cluster.
        quiet: Whether to show nothing on the terminal.
        callbacks: Observers of the run.
        overrides: Settings by full key: ["local.lr=0.1"], {"local.lr": 0.1} or {"local": {"lr": 0.1}}.
        settings: Changes to a section (`local={"lr": 0.1}`), `data="digits"` for the source, and any other setting or
            method field by the last part of its key (`rounds=30`). `model`, `data`, `augment`, `partition` and
            `schedule` also accept functions, see `raylt.register`.

    Raises:
        ConfigError: A setting cannot be used.
        DataError: The data are missing or cannot be split as configured.
        CheckpointError: The run folder exists.
        RayltError: The run failed. `Run.resume` continues it once the cause is removed.
    """
    if name is not None:
        check_name(name, spoken("--name", "name"))
    out = folder_path(out, "out")
    callbacks = checked(callbacks)
    setup, task, _ = plan_run(configure(what, overrides, settings))
    config = setup.config
    method = setup.method
    source = Path(task.name.partition(":")[2] or task.name).stem  # the last name of folder:PATH and npz:PATH
    source = "".join(letter if letter.isprintable() else "_" for letter in source)[:80]
    name = name or f"{method.name}-{source}-{datetime.now():%Y%m%d-%H%M%S-%f}"[:-3]
    journal = Journal.create(out / name, config, task.split, hash_data(task), origins(config), outline=outline_of(task))
    screen = [] if quiet else [progress_display()]
    try:
        carry_out(setup, task, journal, fleet, address, Callbacks([*screen, *callbacks]))
    except ConfigError:  # the cluster is unknown or too small, or a setting does not fit the data
        journal.discard()
        raise
    return Run(journal.folder)


@no_exit()
def plan_run(config: Config, task: Task | None = None) -> tuple[Setup, Task, SplitModel]:
    """Resolve a configuration, build its task and check for conflicting settings, without starting anything.

    Args:
        config: The configuration.
        task: Task for the same data settings, if it is already built.

    Returns:
        The values that the configuration names, the task and the untrained model.

    Raises:
        ConfigError: A setting cannot be used.
        DataError: The data are missing or cannot be split as configured.
    """
    check_size(config.data)
    method = resolve(config).method
    config = config.model_copy(update={"method": {"name": method.name, **method.model_dump()}})
    task = task or build_task(config.data)
    config = config.model_copy(update={"data": complete(config.data, task.split)})
    setup = resolve(config)
    model = check_setup(setup, task.spec)
    check_delta(config, [size for k, size in enumerate(task.sizes) if k not in task.new_clients])
    check_judged(task.name, task.test.y, task.classes)
    return setup, task, model


@no_exit()
def preview_run(config: Config, task: Task | None = None) -> tuple[Setup, Task, SplitModel]:
    """Check a configuration as `run` does before its first round: by `plan_run`, and by the method itself."""
    setup, task, model = plan_run(config, task)
    prepare_method(setup, task, model)
    return setup, task, model


def lacks_files(error: RayltError) -> bool:
    """Return whether an error of `preview_run` is about missing files, which another machine may have."""
    return error.code in _LACKING_FILES


def check_setup(setup: Setup, spec: TaskSpec) -> SplitModel:
    """Raise an error for conflicting settings or own functions that do not work, before anything starts.

    The user's own model, schedule and augmentation are tried, and the model that the user's own method builds.

    Returns:
        The untrained model.

    Raises:
        ConfigError: Method, model, data and settings do not fit together.
    """
    model = setup.new_model(spec)
    setup.check(spec, model)
    config = setup.config
    if is_plugin("schedule", config.local.schedule):
        with own_function("local.schedule", config.local.schedule):
            for round in range(1, max(config.federation.rounds, 1) + 1):
                scheduled_rate(setup.schedule, config.local, round, config.federation.rounds)
    if setup.augment is not None and any(is_plugin("augmentation", name) for name in config.augment.split("+")):
        with own_function("augment", config.augment), seeded(config.seed, "trial of the augmentation"):
            try_augmentation(setup.augment, spec.shape, spec.classes, spec.kind == "segmentation")
    name = config.model
    trained: StateDict = {}
    if is_plugin("model", name):
        with seeded(config.seed, "trial of the model"):
            again = setup.model(spec.classes, spec.shape)
        with seeded(config.seed, "trial of the model"):
            tried = setup.model(spec.classes, spec.shape)
            check_weights(name, tried, again)
            try_model(name, tried, spec.shape)
        trained = tried.state_dict()
    if is_plugin("method", setup.method.name) and type(setup.method).build is not Method.build:
        tried = setup.new_model(spec)
        check_weights(setup.method.name, tried, model, "method")
        with seeded(config.seed, "trial of the model"):
            try_model(setup.method.name, tried, spec.shape, "method")
    check_exchange(config, model, shared_entries(setup.method, model), trained)
    return model


def resume(
    folder: Path | str,
    overrides: Sequence[str] = (),
    fleet: FleetKind = "ray",
    address: str | None = None,
    quiet: bool = False,
    callbacks: Sequence[Callback] = (),
) -> Run:
    """Continue the run in a folder after its last committed step, see `Run.resume`.

    If the overrides contain a larger `federation.rounds`, continue beyond the last round in a new folder, see
    `raylt.runs.continuation`.
    """
    return continuation.resume(folder, overrides, fleet=fleet, address=address, quiet=quiet, callbacks=callbacks)


def configure(
    what: "str | Path | Config | Method",
    overrides: Sequence[str] | Mapping[str, Any] = (),
    settings: Mapping[str, Any] | None = None,
) -> Config:
    """Return the configuration that `run` would use for these arguments.

    Args:
        what: See `run`.
        overrides: See `run`.
        settings: Further keyword arguments of `run`.

    Raises:
        ConfigError: A setting is unknown, ambiguous, of the wrong type or out of range.
    """
    keywords = dict(settings or {})
    tree = _tree_of(what)
    named = keywords.pop("method", None)
    _check_one_method(what, named)
    if isinstance(named, Mapping) and "name" not in named:
        keywords["method"] = named
    elif named is not None:
        fields = dict(named) if isinstance(named, Mapping) else {}
        assign(tree, "method", fields or named)
        keywords |= {"method": {key: value for key, value in fields.items() if key != "name"}} if fields else {}
    for key, kind in PLUGIN_KEYWORDS.items():
        if callable(keywords.get(key)):
            keywords[key] = register(keywords[key], kind=kind)
    chosen = tree.get("method")
    chosen = chosen.get("name") if isinstance(chosen, dict) else chosen
    apply(tree, keywords, METHODS[chosen].model_fields if chosen in METHODS else ())
    if isinstance(overrides, Mapping):
        overlay(tree, overrides)
    else:
        override(tree, overrides)
    return check(Config, tree)


def _check_one_method(what: "str | Path | Config | Method", named: Any) -> None:
    """Check that the first argument of `run` and its keyword `method` do not name two methods."""
    first = what.name if isinstance(what, Method) else what
    other = named.get("name") if isinstance(named, Mapping) else named
    if isinstance(first, str) and first in METHODS and other not in (None, first):
        raise ConfigError(
            f"method: two methods are named ({first} and {other}). Leave one out.",
            code="config.conflict",
            key="method",
            value=other,
        )


def _tree_of(what: "str | Path | Config | Method") -> dict[str, Any]:
    """Return the settings that the first argument of `run` stands for."""
    if isinstance(what, Config):
        return what.to_tree("python")
    if isinstance(what, Method):
        register(type(what))
        return {"method": {"name": what.name, **what.model_dump(mode="json")}}
    if isinstance(what, type) and issubclass(what, Method):
        raise ConfigError(
            f"run: {what.__name__} is a class. Give a method with values for its fields: {what.__name__}().",
            code="config.wrong-type",
            key="run",
            value=what.__name__,
        )
    if not isinstance(what, str | Path):
        raise ConfigError(
            f"run: cannot run a {type(what).__name__} ({what!r}). Give a method's name, a Method, a Config, a YAML "
            "file or recipe:NAME.",
            code="config.wrong-type",
            key="run",
            value=repr(what),
        )
    if isinstance(what, Path) or what.startswith("recipe:") or what.endswith((".yaml", ".yml")) or "/" in what:
        return read(what)
    return {"method": {"name": what}}
