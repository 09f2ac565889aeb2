"""Requests to stop a run at its next checkpoint.

A request is a file in the run folder, so it reaches a run on another machine that shares the folder.
"""

from pathlib import Path

from raylt.errors import ConfigError, quoted
from raylt.runs.folder.reader import is_locked
from raylt.store import Folder

FILE = "stop"


class StopAsked(KeyboardInterrupt):
    """Raised when a run has stopped at a checkpoint on request. The run can be resumed."""


def ask_to_stop(folder: Path) -> None:
    """Ask the run in a folder to stop at its next checkpoint.

    Raises:
        CheckpointError: The folder cannot be written to.
        ConfigError: No process is running the run.
    """
    if not is_locked(folder):
        raise ConfigError(
            f"{folder}: no process is running this. Check its state with raylt ls {quoted(folder.parent)}.",
            code="run.not-running",
            path=str(folder),
        )
    with Folder.open(folder) as run_folder:
        run_folder.write(FILE, "")


def is_asked(folder: Path) -> bool:
    """Return whether a stop of the run in a folder has been requested."""
    with Folder.open(folder) as run_folder:
        return run_folder.has(FILE)


def withdraw(folder: Path) -> None:
    """Remove the request to stop a run.

    It may be older than the run's current process.
    """
    with Folder.open(folder) as run_folder:
        run_folder.remove(FILE)
