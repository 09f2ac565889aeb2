"""Progress inside a step: a small file in the run folder, written by the stepping process and read by a terminal.

The file is not part of the run: nothing else reads it, and it need not reach the disk.
"""

import json
import time
from pathlib import Path

from raylt.core.server import ProgressHook
from raylt.errors import RayltError
from raylt.store import Folder

FILE = ".progress"
EVERY_S = 0.5  # between two writes of the same stage: people read no faster


def progress_writer(folder: Path) -> ProgressHook:
    """Return a function that writes the progress of a run into its folder."""
    last_stage = ""
    last_time = 0.0

    def write(stage: str, done: int, total: int) -> None:
        nonlocal last_stage, last_time
        now = time.monotonic()
        if stage == last_stage and now - last_time < EVERY_S:
            return
        last_stage = stage
        last_time = now
        with Folder.open(folder) as run_folder:
            run_folder.remove(FILE)
            with run_folder.log(FILE) as stream:
                stream.write(json.dumps([stage, done, total]).encode())

    return write


def read_progress(folder: Path) -> tuple[str, int, int] | None:
    """Return the last progress of a run, or None if there is none or the file is being written."""
    try:
        with Folder.open(folder) as run_folder:
            if not run_folder.has(FILE):
                return None
            stage, done, total = json.loads(run_folder.read(FILE, 1000))
    except (RayltError, ValueError, TypeError):
        return None
    return str(stage), int(done), int(total)


def remove_progress(folder: Path) -> None:
    """Remove the file once no process works on the run."""
    with Folder.open(folder) as run_folder:
        run_folder.remove(FILE)
