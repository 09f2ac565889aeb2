"""The worker process of a study, which carries out runs: `python -m raylt.studies.running.worker`.

Jobs arrive as lines of JSON on its standard input, and events leave as lines of JSON on its standard output. The
process exits as soon as its input ends, which also happens when the study's process is killed. So no orphan process
keeps a run folder locked; the run later continues from its last committed round.
"""

import json
import os
import queue
import sys
import threading
import time
from pathlib import Path
from typing import Any, TextIO

from raylt import store
from raylt.config import Config, check
from raylt.core.fleet.item_progress import ItemsProgress
from raylt.core.report import RoundReport
from raylt.errors import FolderHeld, RayltError, describe_error
from raylt.registry import load_plugin
from raylt.runs.callbacks.base import Callback
from raylt.runs.callbacks.terminal import StagePace, items_text
from raylt.runs.continuation import branch_to, can_branch
from raylt.runs.folder.reader import is_locked
from raylt.runs.run import Run
from raylt.runs.start import resume, run
from raylt.studies.records.record import failure_file

ITEMS_INTERVAL_S = 2.0  # minimum time between two events on the server's own work


class EventSender(Callback):
    """Sends the events of a run to the scheduler."""

    def __init__(self, channel: TextIO):
        self._channel = channel
        self._pace = StagePace("")
        self._sent = 0.0

    def send(self, event: str, **fields: Any) -> None:
        """Write one event as a line of JSON."""
        self._channel.write(json.dumps({"event": event, **fields}) + "\n")
        self._channel.flush()

    def on_message(self, text: str, minor: bool = False) -> None:
        if not minor:
            self.send("says", text=text)

    def on_start(self, folder: Path, config: Config, reports: list[dict[str, Any]]) -> None:
        self.send("starts", steps=len(reports))

    def on_last_phase(self, seconds: float) -> None:
        self.send("last phase", seconds=seconds)

    def on_items(self, progress: ItemsProgress) -> None:
        if progress.stage != self._pace.name or progress.share < self._pace.share:
            self._pace = StagePace(progress.stage)
        self._pace.share = progress.share
        now = time.monotonic()
        if now - self._sent >= ITEMS_INTERVAL_S:
            self._sent = now
            self.send("items", text=items_text(progress), left=self._pace.seconds_left())

    def on_step(self, report: RoundReport) -> None:
        self.send("step", step=report.step, seconds=report.seconds + report.evaluation_seconds)


def main() -> None:
    """Carry out the jobs that arrive on standard input, until standard input ends."""
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # print statements of libraries go to standard error, apart from the events
    sender = EventSender(channel)
    jobs: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_read_jobs, args=(jobs,), daemon=True).start()
    while True:
        job = jobs.get()
        folder = Path(job["folder"])
        try:
            for file in job["plugins"]:
                load_plugin(Path(file))
            stem = None if job["stem"] is None else Run(job["stem"])
            do(folder, check(Config, job["config"]), job["fleet"], job["address"], sender, stem)
        except FolderHeld:
            sender.send("elsewhere")
        except Exception as error:
            text = describe_error(error)
            code = error.code if isinstance(error, RayltError) else ""
            store.write(failure_file(folder), f"{text}\n{code}\n" if code else f"{text}\n")
            sender.send("failed", problem=text)
        else:
            sender.send("done")


def do(
    folder: Path, config: Config, fleet: Any, address: str | None, callback: Callback, stem: Run | None = None
) -> None:
    """Start or continue a run, and carry it out to the end.

    Args:
        folder: The run's folder.
        config: Settings of the run.
        fleet: "local" or "ray".
        address: Address of a running Ray cluster.
        callback: Receives the events of the run.
        stem: Run with the same first steps. If the stem has completed these steps, they are copied.

    Raises:
        FolderHeld: Another process holds the run.
    """
    with store.folder_for(folder.parent) as parent:
        parent.remove(failure_file(folder).name)
        if Run(folder).state != "missing":
            resume(folder, fleet=fleet, address=address, quiet=True, callbacks=[callback])
            return
        if folder.is_dir() and is_locked(folder):
            raise FolderHeld(
                f"{folder}: another process is creating this run. Wait until it ends.",
                code="run.busy",
                path=str(folder),
            )
        parent.remove(folder.name)  # remove the remains of a process that died while it created the folder
    if stem is not None and can_branch(stem, config):
        branch_to(stem, config, folder, fleet=fleet, address=address, quiet=True, callbacks=[callback])
        return
    run(config, out=folder.parent, name=folder.name, fleet=fleet, address=address, quiet=True, callbacks=[callback])


def _read_jobs(jobs: "queue.SimpleQueue[dict[str, Any]]") -> None:
    for line in sys.stdin:
        jobs.put(json.loads(line))
    os._exit(0)


if __name__ == "__main__":
    main()
