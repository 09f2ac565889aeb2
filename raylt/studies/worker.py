"""A process that does one run of a study after another: `python -m raylt.studies.worker`, started by the schedule.

Jobs come as lines of JSON on its standard input; what happens goes out as lines of JSON on its standard output. When
its input ends, as it does when the study's process dies in whatever way, it ends at once: a run is resumed from its
last committed round anyway, and nobody is left behind who holds a folder.
"""

import json
import os
import queue
import sys
import threading
from pathlib import Path
from typing import Any, TextIO

from raylt import store
from raylt.config import Config, check
from raylt.core.report import Report
from raylt.errors import FolderHeld, RayltError, one_line
from raylt.registry import load_plugin
from raylt.runs.branch import branch_to, can_branch
from raylt.runs.callbacks import Callback
from raylt.runs.journal import held
from raylt.runs.run import Run
from raylt.runs.start import resume, run
from raylt.studies.records import failure_file


class Teller(Callback):
    """Passes what happens in a run on to the schedule."""

    def __init__(self, channel: TextIO):
        self._channel = channel

    def tell(self, event: str, **facts: Any) -> None:
        self._channel.write(json.dumps({"event": event, **facts}) + "\n")
        self._channel.flush()

    def on_message(self, text: str, minor: bool = False) -> None:
        if not minor:
            self.tell("says", text=text)

    def on_start(self, folder: Path, config: Config, reports: list[dict[str, Any]]) -> None:
        self.tell("starts", steps=len(reports))

    def on_step(self, report: Report) -> None:
        self.tell("step", step=report.step, seconds=report.seconds + report.evaluation_seconds)


def main() -> None:
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)                           # what libraries print is no message
    teller = Teller(channel)
    jobs: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(jobs,), daemon=True).start()
    while True:
        job = jobs.get()
        folder = Path(job["folder"])
        try:
            for file in job["plugins"]:
                load_plugin(Path(file))
            stem = None if job["stem"] is None else Run(job["stem"])
            do(folder, check(Config, job["config"]), job["fleet"], job["address"], teller, stem)
        except FolderHeld:
            teller.tell("elsewhere")
        except Exception as error:
            text = str(error) if isinstance(error, RayltError) else one_line(error)
            store.write(failure_file(folder), text + "\n")
            teller.tell("failed", problem=text)
        else:
            teller.tell("done")


def do(folder: Path, config: Config, fleet: Any, address: str | None, callback: Callback,
       stem: Run | None = None) -> None:
    """Takes a run from wherever it is to its end.

    Args:
        stem: a run with which it shares its first steps: they are taken over where it has come so far.

    Raises:
        FolderHeld: another process is at it.
    """
    with store.folder_for(folder.parent) as parent:
        parent.remove(failure_file(folder).name)
        if Run(folder).state != "missing":
            resume(folder, fleet=fleet, address=address, quiet=True, callbacks=[callback])
            return
        if folder.is_dir() and held(folder):
            raise FolderHeld(f"{folder}: another process is making it")
        parent.remove(folder.name)          # left by a process that died while it made the folder
    if stem is not None and can_branch(stem, config):
        branch_to(stem, config, folder, fleet=fleet, address=address, quiet=True, callbacks=[callback])
        return
    run(config, out=folder.parent, name=folder.name, fleet=fleet, address=address, quiet=True, callbacks=[callback])


def _listen(jobs: "queue.SimpleQueue[dict[str, Any]]") -> None:
    for line in sys.stdin:
        jobs.put(json.loads(line))
    os._exit(0)


if __name__ == "__main__":
    main()
