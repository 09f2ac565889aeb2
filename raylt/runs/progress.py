"""Where in a step a run is, for whoever watches: a small file in the run folder, written by the process that steps.

It is no part of the run: nothing is read from it but by a screen, and nothing waits until it is on the disk.
"""

import json
import time
from pathlib import Path

from raylt.core.server import Watch
from raylt.errors import RayltError
from raylt.store import Folder

FILE = ".progress"
EVERY_S = 0.5               # between two notes: nobody reads faster


def note_in(folder: Path) -> Watch:
    """What notes the progress of a run in its folder."""
    last = ("", 0.0)

    def note(stage: str, done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if stage == last[0] and now - last[1] < EVERY_S:
            return
        last = stage, now
        with Folder.open(folder) as here:
            here.remove(FILE)
            with here.log(FILE) as stream:
                stream.write(json.dumps([stage, done, total]).encode())

    return note


def noted(folder: Path) -> tuple[str, int, int] | None:
    """What was noted last; None where nothing was, or it is being written."""
    try:
        with Folder.open(folder) as here:
            stage, done, total = json.loads(here.read(FILE, 1000)) if here.has(FILE) else ("", 0, 0)
            return (str(stage), int(done), int(total)) if stage else None
    except (RayltError, ValueError, TypeError):
        return None


def forget(folder: Path) -> None:
    """Removes the file: nobody is at the run any more."""
    with Folder.open(folder) as here:
        here.remove(FILE)
