"""A run from its first step to its summary: step, record, tell; in this process or on Ray."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, Protocol

from raylt.core import checkpoint
from raylt.core.checkpoint import Seal
from raylt.core.report import Report
from raylt.core.setup import Setup
from raylt.data.task import Task
from raylt.errors import ConfigError, RayltError, ServerLost, one_line
from raylt.runs import provenance
from raylt.runs.callbacks import Callback
from raylt.runs.grid import draw_predictions
from raylt.runs.here import one_thread, open_here
from raylt.runs.journal import Journal
from raylt.runs.summary import summarise

FleetKind = Literal["ray", "local"]
SERVER_LIVES = 3        # times that the server's process may die in the same step


class Steps(Protocol):
    """An experiment, here or in a server actor."""

    @property
    def done(self) -> bool: ...
    def describe(self) -> dict[str, str | None]: ...
    def advance(self, seal: Seal | None = None) -> Report: ...
    def conclude(self) -> dict[str, str]: ...


def carry_out(setup: Setup, task: Task, journal: Journal, fleet: FleetKind, address: str | None,
              callback: Callback) -> None:
    """Takes a run from its last committed step to its end, and lets go of its folder.

    Args:
        fleet: "ray" for client actors, "local" for all clients in this process.
        address: of a running Ray cluster.

    Raises:
        CheckpointError: steps were committed and no checkpoint is usable.
        ConfigError: an unknown fleet, no such cluster, it is too small, or its device is not to be used.
    """
    deaths, committed, summary = 0, -1, None
    try:
        with journal:
            if fleet not in ("ray", "local"):
                raise ConfigError(f"fleet = {fleet!r}: must be ray or local")
            while summary is None:
                saved, faults = journal.rewind()
                for fault in faults:
                    callback.on_message(f"{fault}; continuing after step {saved.facts['step'] if saved else 0}")
                if deaths == 0:
                    callback.on_start(journal.folder, setup.config, journal.reports())
                    for note in task.notes:
                        callback.on_message(note)
                try:
                    summary = _take_steps(setup, task, journal, fleet, address, callback)
                except ServerLost as error:
                    before, committed = committed, len(journal.reports())
                    deaths = deaths + 1 if committed == before else 1
                    if deaths == SERVER_LIVES:
                        raise
                    callback.on_message(f"{error.cause}; starting it again from the last checkpoint")
            summary |= provenance.of_summary(journal.folder)
            summary = journal.conclude(summary)
            _show_predictions(setup, task, journal, callback)
    except BaseException:
        try:
            callback.on_end(summary)
        except Exception as error:          # what ended the run is what its user must hear of
            with suppress(Exception):
                callback.on_message(f"at its end: {error if isinstance(error, RayltError) else one_line(error)}")
        raise
    callback.on_end(summary)


def _show_predictions(setup: Setup, task: Task, journal: Journal, callback: Callback) -> None:
    """The run is done: what is amiss with a picture of it is told and changes nothing."""
    try:
        picture = draw_predictions(setup, task, journal.folder)
        journal.show(picture)
        callback.on_picture(picture)
    except Exception as error:
        callback.on_message(f"no picture of predictions: {error if isinstance(error, RayltError) else one_line(error)}")


def _take_steps(setup: Setup, task: Task, journal: Journal, fleet: FleetKind, address: str | None,
                callback: Callback) -> dict[str, Any]:
    setup.method.prepare(task, setup.config, setup.check(task.facts))
    with _experiment(setup, task, journal.folder, fleet, address, callback) as experiment:
        facts = experiment.describe()
        provenance.check_device(journal.folder, setup.config, facts)
        provenance.note(journal.folder, fleet, len(journal.reports()), setup.config, facts)
        while not experiment.done:
            report = experiment.advance(journal.seal)
            journal.append(report)
            callback.on_step(report)
        return summarise(journal.reports(), setup.method.name, task.split.sha256, experiment.conclude())


def _experiment(setup: Setup, task: Task, folder: Path, fleet: FleetKind, address: str | None,
                callback: Callback) -> AbstractContextManager[Steps]:
    if fleet == "local":
        return _in_this_process(setup, task, folder, callback)
    from actors.launch import open_experiment  # the only way from here to Ray
    return open_experiment(setup, task, folder, address, callback.on_message, callback.on_progress)


@contextmanager
def _in_this_process(setup: Setup, task: Task, folder: Path, callback: Callback) -> Iterator[Steps]:
    saved, _ = checkpoint.latest(folder / "checkpoints")
    with one_thread():
        experiment = open_here(setup, task, folder, saved)
        experiment.fleet.watch = callback.on_progress
        yield experiment
