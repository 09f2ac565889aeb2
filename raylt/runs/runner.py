"""A run from its configuration to its summary: start or resume, step, record, show."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, Protocol

from raylt.config import Config, load
from raylt.core.experiment import Report
from raylt.core.setup import Setup
from raylt.data.task import Task, build_task
from raylt.errors import CheckpointError, ConfigError, ServerLost
from raylt.registry import resolve
from raylt.runs import provenance
from raylt.runs.journal import Journal
from raylt.runs.summary import summarise

FleetKind = Literal["ray", "local"]
SERVER_LIVES = 3        # times that the server's process may die in the same step


class Steps(Protocol):
    """An experiment, here or in a server actor."""

    @property
    def done(self) -> bool: ...
    def advance(self) -> Report: ...
    def conclude(self) -> dict[str, str]: ...


class Watcher(Protocol):
    """Told what happens, to show it; what is minor, only to someone at a terminal."""

    def says(self, text: str, minor: bool = False) -> None: ...
    def starts(self, folder: Path, config: Config, reports: list[dict[str, Any]]) -> None: ...
    def steps(self, report: Report) -> None: ...


def start(config: Config, out: Path, name: str | None, fleet: FleetKind, address: str | None,
          watcher: Watcher) -> tuple[dict[str, Any], Path]:
    """Runs a configuration to its end in a new run folder.

    Returns:
        The summary and the run folder.
    """
    method = resolve(config).method
    config = config.model_copy(update={"method": {"name": method.name, **method.model_dump()}})
    task = build_task(config.data)
    resolve(config).check(task.facts)
    source = Path(task.name.partition(":")[2] or task.name).stem        # of folder:PATH and npz:PATH, the last name
    name = name or f"{method.name}-{source}-{datetime.now():%Y%m%d-%H%M%S-%f}"[:-3]
    journal = Journal.create(out / name, config, task.split)
    try:
        return _run(config, task, journal, fleet, address, watcher)
    except ConfigError:             # the cluster is not there or too small, or a setting does not fit the data
        journal.discard()
        raise


def resume(folder: Path, overrides: Sequence[str], fleet: FleetKind, address: str | None,
           watcher: Watcher) -> tuple[dict[str, Any], Path]:
    """Continues a run after its last committed step.

    Args:
        overrides: `key=value`, of `resources` and `output` only.

    Raises:
        CheckpointError: another configuration or split, or no usable checkpoint.
    """
    journal = Journal.open(folder)
    before = journal.config()
    config = load(folder / "config.yaml", overrides)
    differences = [f"{key}: {old!r} -> {new!r}" for key, old, new in _differences(before, config)]
    if differences:
        raise CheckpointError(f"{folder}: a resumed run keeps its settings ({'; '.join(differences)}); only "
                              "resources.* and output.* may change; start a new run for others")
    task = build_task(config.data.model_copy(update={"split": str(folder / "split.json")}))
    return _run(config, task, journal, fleet, address, watcher)


def _run(config: Config, task: Task, journal: Journal, fleet: FleetKind, address: str | None,
         watcher: Watcher) -> tuple[dict[str, Any], Path]:
    folder = journal.folder
    deaths, committed = 0, -1
    with journal:
        while True:
            saved, faults = journal.rewind()
            for fault in faults:
                watcher.says(f"{fault}; continuing after step {saved.facts['step'] if saved else 0}")
            if deaths == 0:
                watcher.starts(folder, config, journal.reports())
                provenance.note(folder, fleet, len(journal.reports()))
            try:
                summary = _take_steps(config, task, journal, fleet, address, watcher)
                break
            except ServerLost as error:
                before, committed = committed, len(journal.reports())
                deaths = deaths + 1 if committed == before else 1
                if deaths == SERVER_LIVES:
                    raise
                watcher.says(f"{error.cause}; starting it again from the last checkpoint")
        summary |= provenance.of_summary(folder)
        journal.conclude(summary)
    return summary, folder


def _take_steps(config: Config, task: Task, journal: Journal, fleet: FleetKind, address: str | None,
                watcher: Watcher) -> dict[str, Any]:
    setup = resolve(config)
    setup.method.prepare(task, config, setup.check(task.facts))
    with _experiment(setup, task, journal.folder, fleet, address, watcher) as experiment:
        while not experiment.done:
            report = experiment.advance()
            journal.append(report)
            watcher.steps(report)
        return summarise(journal.reports(), config.method["name"], task.split.sha256, experiment.conclude())


def _experiment(setup: Setup, task: Task, folder: Path, fleet: FleetKind, address: str | None,
                watcher: Watcher) -> AbstractContextManager[Steps]:
    if fleet == "local":
        return _in_this_process(setup, task, folder)
    from actors.launch import open_experiment  # the only way from here to Ray
    return open_experiment(setup, task, folder, address, watcher.says)


@contextmanager
def _in_this_process(setup: Setup, task: Task, folder: Path) -> Iterator[Steps]:
    import torch

    from raylt.core import checkpoint
    from raylt.core.experiment import Experiment
    from raylt.core.host import Host
    from raylt.core.in_process import LocalFleet

    torch.set_num_threads(1)        # weights must not depend on the machine's cores
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    fleet = LocalFleet(setup.config, task, Host(setup, task.facts, task.test, device))
    experiment = Experiment(setup, task, fleet, device, folder)
    saved, _ = checkpoint.latest(folder / "checkpoints")
    if saved is not None:
        experiment.load(saved)
    yield experiment


def _differences(before: Config, after: Config) -> Iterator[tuple[str, Any, Any]]:
    old, new = before.model_dump(), after.model_dump()
    for section in old:
        if section in ("resources", "output") or old[section] == new[section]:
            continue
        if not isinstance(old[section], dict):
            yield section, old[section], new[section]
            continue
        for key in old[section] | new[section]:
            if old[section].get(key) != new[section].get(key):
                yield f"{section}.{key}", old[section].get(key), new[section].get(key)
