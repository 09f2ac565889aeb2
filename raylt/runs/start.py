"""`raylt.run` and `raylt.resume`."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from raylt.config import Config, apply, assign, check, overlay, override, read
from raylt.core.method import Method
from raylt.data.drawing import check_judged
from raylt.data.hashes import hash_data
from raylt.data.outline import outline_of
from raylt.data.split_source import complete
from raylt.data.task import build_task
from raylt.errors import ConfigError
from raylt.methods import METHODS
from raylt.registry import GuestKind, origins, register, resolve
from raylt.runs import extension
from raylt.runs.callbacks import Callback, Callbacks
from raylt.runs.journal import Journal
from raylt.runs.run import Run
from raylt.runs.runner import FleetKind, carry_out
from raylt.runs.screen import Screen

VALUES: dict[str, GuestKind] = {"model": "model", "data": "source", "augment": "augmentation"}


def run(what: "str | Path | Config | Method", /, out: Path | str = "runs", name: str | None = None,
        fleet: FleetKind = "ray", address: str | None = None, quiet: bool = False, callbacks: Sequence[Callback] = (),
        overrides: Sequence[str] | Mapping[str, Any] = (), **settings: Any) -> Run:
    """Runs a configuration to its end in a new run folder.

        raylt.run("fedprox", data="cifar10", clients=20, rounds=200, local={"lr": 0.1}, mu=0.01)

    Args:
        what: a method's name or a Method; or the path of a YAML file, recipe:NAME, or a Config.
        out, name: the run folder is `out/name`; by default the name says method, data and time.
        fleet: "ray" for client actors on Ray; "local" for all clients in this process, to the same end.
        address: a running Ray cluster, HOST:PORT or auto; by default a new local one.
        quiet: whether nothing is shown of how it goes.
        callbacks: who is told of it.
        overrides: settings by their full keys, as ["local.lr=0.1"], {"local.lr": 0.1} or {"local": {"lr": 0.1}}.
        settings: a section with what is to change in it (`local={"lr": 0.1}`), `data="digits"` for the source, and any
            other setting or field of the method by the last part of its key (`rounds=30`). `model`, `data` and
            `augment` also take functions of one's own, see `raylt.register`.

    Raises:
        ConfigError, DataError: a setting that cannot be used, or data that are not there.
        CheckpointError: the run folder exists already.
        RayltError: the run failed; `Run.resume` goes on after what broke it is mended.
    """
    if name is not None and (Path(name).name != name or name in ("", ".", "..")):
        raise ConfigError(f"name {name}: must be the name of one folder; the folder that it is made in is out")
    config = configure(what, overrides, settings)
    method = resolve(config).method
    config = config.model_copy(update={"method": {"name": method.name, **method.model_dump()}})
    task = build_task(config.data)
    config = config.model_copy(update={"data": complete(config.data, task.split)})
    setup = resolve(config)
    setup.check(task.facts)
    check_judged(task.name, task.test.y, task.classes)
    source = Path(task.name.partition(":")[2] or task.name).stem        # of folder:PATH and npz:PATH, the last name
    name = name or f"{method.name}-{source}-{datetime.now():%Y%m%d-%H%M%S-%f}"[:-3]
    journal = Journal.create(Path(out) / name, config, task.split, hash_data(task), origins(config),
                             outline=outline_of(task))
    screen = [] if quiet else [Screen()]
    try:
        carry_out(setup, task, journal, fleet, address, Callbacks([*screen, *callbacks]))
    except ConfigError:             # the cluster is not there or too small, or a setting does not fit the data
        journal.discard()
        raise
    return Run(journal.folder)


def resume(folder: Path | str, overrides: Sequence[str] = (), fleet: FleetKind = "ray", address: str | None = None,
           quiet: bool = False, callbacks: Sequence[Callback] = ()) -> Run:
    """Continues the run in a folder after its last committed step, see `Run.resume`; with `federation.rounds=R` among
    the overrides, beyond its last round, in a folder of its own (`raylt.runs.extension`)."""
    return extension.resume(folder, overrides, fleet=fleet, address=address, quiet=quiet, callbacks=callbacks)


def configure(what: "str | Path | Config | Method", overrides: Sequence[str] | Mapping[str, Any] = (),
              settings: Mapping[str, Any] | None = None) -> Config:
    """The configuration that `run` runs; its arguments.

    Raises:
        ConfigError: a setting is unknown, ambiguous, of the wrong type or out of range.
    """
    keywords = dict(settings or {})
    tree = _tree(what)
    if isinstance(named := keywords.pop("method", None), Mapping) and "name" not in named:
        keywords["method"] = named
    elif named is not None:
        assign(tree, "method", dict(named) if isinstance(named, Mapping) else named)
    for key, kind in VALUES.items():
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


def _tree(what: "str | Path | Config | Method") -> dict[str, Any]:
    if isinstance(what, Config):
        return what.model_dump()
    if isinstance(what, Method):
        register(type(what))
        return {"method": {"name": what.name, **what.model_dump(mode="json")}}
    if not isinstance(what, str | Path):
        raise ConfigError(f"{what!r}: must be a method's name, a Method, a Config, a YAML file or recipe:NAME")
    if isinstance(what, Path) or what.startswith("recipe:") or what.endswith((".yaml", ".yml")) or "/" in what:
        return read(what)
    return {"method": {"name": what}}
