"""Runs what a study is missing: a whole run per process, longest first, over the machine's cores.

A study's state is that of its run folders and of nothing else, so it can be killed at any time and taken up again. On
a machine's cores, whole runs side by side beat one run's clients side by side: no round waits for its slowest client.
"""

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from raylt import store
from raylt.registry import plugin_files
from raylt.studies.definition import Planned
from raylt.studies.estimate import Pace
from raylt.studies.places import Place, places_for
from raylt.studies.records import Record, failure_file
from raylt.studies.stems import stems

ATTEMPTS = 2            # times that a run is begun when the process dies under it


class Watcher(Protocol):
    """Told how a study goes, to show it."""

    def says(self, text: str) -> None: ...
    def progress(self, done: int, total: int, running: Sequence[str], share: float, left_s: float | None) -> None: ...


@dataclass
class Job:
    """A run that is to be done, and how far it is."""

    planned: Planned
    folder: Path
    steps: int
    seconds: float = 0.0            # of the steps that were taken since it was begun here
    attempts: int = 0
    stem: Path | None = None        # a run with which it shares its first steps, that comes before it
    shared: int = 0                 # those steps


@dataclass
class Worker:
    """A process and the run that it has."""

    process: "subprocess.Popen[str]"
    job: Job | None = None
    reader: threading.Thread = field(default_factory=threading.Thread)


def run_all(planned: Sequence[Planned], records: Sequence[Record], folder: Path, watcher: Watcher, parallel: int | None,
            fleet: Literal["local", "ray"], address: str | None, pace: Pace) -> list[str]:
    """Does every run that is neither done nor held by another process.

    Args:
        records: of the same runs in the same order.
        parallel: runs at once; by default one per core, or per GPU where there are any, and with Ray one.
        pace: how long runs took so far, those on record among them; it learns on.

    Returns:
        The folders of those that failed.
    """
    done = sum(record.state == "done" for record in records)
    shared = stems(planned)
    jobs = [Job(p, folder / p.folder, r.steps) for p, r in zip(planned, records, strict=True)
            if r.state in ("missing", "stopped", "failed")]
    for job in jobs:
        if stem := shared.get(job.planned.folder):
            job.stem, job.shared = folder / stem.folder, stem.steps
    if not jobs:
        return []
    places = places_for(parallel, fleet, [job.planned.config for job in jobs])
    return _Pool(jobs, places, pace, watcher, folder, fleet, address, done).run()


class _Pool:
    """Workers, the jobs that wait and the messages that come."""

    def __init__(self, jobs: list[Job], places: list[Place], pace: Pace, watcher: Watcher, folder: Path, fleet: str,
                 address: str | None, done: int):
        self._places, self._pace, self._watcher, self._folder = places, pace, watcher, folder
        self._waiting = sorted(jobs, key=lambda job: -self._left(job))
        self._fleet, self._address = fleet, address
        self._workers: dict[int, Worker] = {}
        self._messages: queue.SimpleQueue[tuple[int, Worker, dict[str, Any] | None]] = queue.SimpleQueue()
        self._done, self._total = done, done + len(jobs)
        self._failed: list[str] = []
        self._said: set[str] = set()
        self._plugins = plugin_files()

    def run(self) -> list[str]:
        with store.folder_for(self._folder) as folder, folder.log("workers.log") as log:
            try:
                for number in range(len(self._places)):
                    self._employ(number, log)
                while any(worker.job for worker in self._workers.values()):
                    self._show()
                    number, worker, message = self._messages.get()
                    if worker is not self._workers.get(number):
                        continue                    # the end of a process that was replaced
                    if message is None:
                        self._lost(number, worker, log)
                    else:
                        self._hear(number, worker, message, log)
            finally:
                self._dismiss()
        self._show()
        return self._failed

    def _employ(self, number: int, log: Any) -> None:
        """Gives the next job to a place, with a new process where it has none."""
        worker = self._workers.get(number)
        if (job := self._next()) is None or (worker is not None and worker.job):
            return
        if worker is None:
            worker = self._workers[number] = self._hire(number, log)
        self._waiting.remove(job)
        worker.job = job
        job.attempts += 1
        assert worker.process.stdin is not None
        content = {"folder": str(job.folder), "config": job.planned.config.model_dump(mode="json"),
                   "fleet": self._fleet, "address": self._address, "plugins": self._plugins,
                   "stem": None if job.stem is None else str(job.stem)}
        with suppress(BrokenPipeError):             # it died: its output ends, too, and that is heard
            worker.process.stdin.write(json.dumps(content) + "\n")
            worker.process.stdin.flush()

    def _next(self) -> Job | None:
        """The longest whose stem is not still to come."""
        pending = {job.folder for job in self._waiting} | {worker.job.folder for worker in self._workers.values()
                                                           if worker.job}
        return next((job for job in self._waiting if job.stem not in pending), None)

    def _employ_all(self, log: Any) -> None:
        """A run that ended frees its place, and those that waited for it."""
        for number in range(len(self._places)):
            self._employ(number, log)

    def _hire(self, number: int, log: Any) -> Worker:
        # a session of its own: Ctrl-C is for the study, which then lets its workers go
        process = subprocess.Popen([sys.executable, "-m", "raylt.studies.worker"], stdin=subprocess.PIPE,
                                   stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True,
                                   env=os.environ | self._places[number].environment)
        if self._places[number].cores and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(process.pid, self._places[number].cores)
        worker = Worker(process)
        worker.reader = threading.Thread(target=self._listen, args=(number, worker), daemon=True)
        worker.reader.start()
        return worker

    def _listen(self, number: int, worker: Worker) -> None:
        assert worker.process.stdout is not None
        for line in worker.process.stdout:
            self._messages.put((number, worker, json.loads(line)))
        self._messages.put((number, worker, None))

    def _hear(self, number: int, worker: Worker, message: dict[str, Any], log: Any) -> None:
        job = worker.job
        assert job is not None
        match message["event"]:
            case "says":
                if message["text"] not in self._said:           # what all runs have to say is said once
                    self._said.add(message["text"])
                    self._watcher.says(f"{job.planned.folder}: {message['text']}")
            case "starts":
                job.steps = message["steps"]
                job.seconds = 0.0
            case "step":
                job.steps = message["step"]
                job.seconds += message["seconds"]
                self._pace.learn(job.planned, job.steps, message["seconds"])
            case "done":
                self._done += 1
                self._watcher.says(f"{self._done}/{self._total}  {job.planned.folder}  {job.seconds:.0f} s")
                worker.job = None
                self._employ_all(log)
            case "elsewhere":                                   # it is that process's to finish, and to count
                self._total -= 1
                self._watcher.says(f"{job.planned.folder}: another process is at it")
                worker.job = None
                self._employ_all(log)
            case "failed":
                self._give_up(job, message["problem"])
                worker.job = None
                self._employ_all(log)

    def _lost(self, number: int, worker: Worker, log: Any) -> None:
        """A worker's process ended by itself: killed, or out of memory."""
        del self._workers[number]
        job, code = worker.job, worker.process.wait()
        if job is None:
            return
        why = f"its process died ({f'signal {-code}' if code < 0 else f'exit code {code}'})"
        if job.attempts < ATTEMPTS:
            self._watcher.says(f"{job.planned.folder}: {why}; taken up again")
            self._waiting.insert(0, job)
        else:
            with store.folder_for(job.folder.parent) as parent:
                parent.write(failure_file(job.folder).name, why + "\n")
            self._give_up(job, why)
        self._employ_all(log)

    def _give_up(self, job: Job, why: str) -> None:
        self._failed.append(job.planned.folder)
        self._watcher.says(f"{job.planned.folder} failed: {why}")

    def _left(self, job: Job) -> float:
        return self._pace.left(job.planned, max(job.steps, job.shared))

    def _show(self) -> None:
        running = [worker.job for worker in self._workers.values() if worker.job]
        left = [self._left(job) for job in [*running, *self._waiting]]
        whole = [self._pace.left(job.planned, job.shared) for job in [*running, *self._waiting]]
        ended = self._done + len(self._failed)
        share = ended + sum(1 - a / b for a, b in zip(left, whole, strict=True) if b > 0)
        # 1: the only run may be another process's
        self._watcher.progress(self._done, self._total, [job.planned.folder for job in running],
                               share / max(1, self._total),
                               makespan(left, len(self._places)) if self._pace.measured else None)

    def _dismiss(self) -> None:
        for worker in self._workers.values():
            assert worker.process.stdin is not None
            with suppress(BrokenPipeError):
                worker.process.stdin.close()
        for worker in self._workers.values():
            try:
                worker.process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                worker.process.kill()
                worker.process.wait()


def makespan(seconds: Iterable[float], slots: int) -> float:
    """Time until all are done when each free slot takes the longest that is left."""
    loads = [0.0] * slots
    for each in sorted(seconds, reverse=True):
        loads[loads.index(min(loads))] += each
    return max(loads)
