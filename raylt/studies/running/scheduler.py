"""The scheduler of a study, which distributes runs over worker processes, longest run first.

The run folders contain the whole state of a study, so it can be killed at any time and continued. On one machine,
running whole runs in parallel is faster than running the clients of one run in parallel, because no round waits for its
slowest client.
"""

import json
import os
import queue
import subprocess
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from raylt import store
from raylt.own_code.child_process import start_python
from raylt.own_code.commands import plugin_files
from raylt.runs.callbacks.base import Callback, StudyStatus
from raylt.studies.definition import Planned
from raylt.studies.records.record import RunRecord, failure_file
from raylt.studies.running.shared_training import stems
from raylt.studies.running.time_left import Pace
from raylt.studies.running.worker_slots import WorkerSlot, worker_slots

PROGRESS_INTERVAL_S = 1.0  # minimum time between two progress reports of an unchanged state
MAX_ATTEMPTS = 2  # how often a run is started if its process dies


def run_all(
    planned: Sequence[Planned],
    records: Sequence[RunRecord],
    folder: Path,
    callback: Callback,
    parallel: int | None,
    fleet: Literal["local", "ray"],
    address: str | None,
    pace: Pace,
) -> list[str]:
    """Carry out every unfinished run of a study that no other process is running.

    Args:
        planned: Runs of the study.
        records: Records of the same runs, in the same order.
        folder: The study's folder.
        callback: Receives messages and progress.
        parallel: Number of simultaneous runs. By default one per GPU, or per core without GPUs; with Ray, one.
        fleet: "local" or "ray".
        address: Address of a running Ray cluster.
        pace: Durations of earlier runs, to which new durations are added.

    Returns:
        Folders of the failed runs.
    """
    done = sum(record.state == "done" for record in records)
    jobs = [
        Job(plan, folder / plan.folder, record.steps)
        for plan, record in zip(planned, records, strict=True)
        if record.state in ("missing", "stopped", "failed")
    ]
    if not jobs:
        return []
    stem_by_folder = stems(planned)
    for job in jobs:
        if stem := stem_by_folder.get(job.planned.folder):
            job.stem = folder / stem.folder
            job.shared = stem.steps
    slots = worker_slots(parallel, fleet, [job.planned.config for job in jobs])
    return _Pool(jobs, slots, pace, callback, folder, fleet, address, done).run()


def makespan(seconds: Iterable[float], slots: int) -> float:
    """Return the time until all runs are done if each free slot takes the longest remaining run."""
    loads = [0.0] * slots
    for each in sorted(seconds, reverse=True):
        loads[loads.index(min(loads))] += each
    return max(loads)


@dataclass
class Job:
    """A run for a worker, and its progress.

    Attributes:
        planned: The run.
        folder: The run's folder.
        steps: Number of completed steps.
        seconds: Total duration of the steps since this process started the run.
        attempts: Number of times that the run was started.
        stem: Folder of the run whose first steps this run shares. The stem runs first.
        shared: Number of shared steps.
        work: Progress of the server's own work in the current step, as text; empty if there is none.
        work_left: Seconds until that work is done; None if unknown.
    """

    planned: Planned
    folder: Path
    steps: int
    seconds: float = 0.0
    attempts: int = 0
    stem: Path | None = None
    shared: int = 0
    work: str = ""
    work_left: float | None = None


@dataclass
class Worker:
    """A worker process and its current job."""

    process: "subprocess.Popen[str]"
    job: Job | None = None
    reader: threading.Thread = field(default_factory=threading.Thread)


class _Pool:
    """The pool of worker processes, with the waiting jobs and the workers' messages."""

    def __init__(
        self,
        jobs: list[Job],
        slots: list[WorkerSlot],
        pace: Pace,
        callback: Callback,
        folder: Path,
        fleet: str,
        address: str | None,
        done: int,
    ):
        self._slots = slots
        self._pace = pace
        self._callback = callback
        self._folder = folder
        self._fleet = fleet
        self._address = address
        self._waiting = sorted(jobs, key=lambda job: -self._left(job))
        self._workers: dict[int, Worker] = {}
        self._messages: queue.SimpleQueue[tuple[int, Worker, dict[str, Any] | None]] = queue.SimpleQueue()
        self._done = done
        self._total = done + len(jobs)
        self._failed: list[str] = []
        self._shown: set[str] = set()
        self._last_shown: tuple[list[str], int, int] | None = None  # last state that `_show` reported
        self._last_shown_at = 0.0
        self._plugins = plugin_files()

    def run(self) -> list[str]:
        """Carry out all jobs.

        Returns:
            Folders of the failed runs.
        """
        with store.folder_for(self._folder) as folder, folder.log("workers.log") as log:
            try:
                self._assign_all(log)
                while any(worker.job for worker in self._workers.values()):
                    self._show()
                    number, worker, message = self._messages.get()
                    if worker is not self._workers.get(number):
                        continue  # last message of a replaced process
                    if message is None:
                        self._worker_died(number, worker, log)
                    else:
                        self._handle(worker, message, log)
            finally:
                self._stop_workers()
        self._show()
        return self._failed

    def _assign_all(self, log: Any) -> None:
        """Assign a job to each free worker, since one finished run may release several waiting jobs."""
        for number in range(len(self._slots)):
            self._assign(number, log)

    def _assign(self, number: int, log: Any) -> None:
        """Give the next job to the worker of a slot; start a process if the slot has none."""
        worker = self._workers.get(number)
        job = self._next()
        if job is None or (worker is not None and worker.job):
            return
        if worker is None:
            worker = self._start(number, log)
            self._workers[number] = worker
        self._waiting.remove(job)
        worker.job = job
        job.attempts += 1
        job.work = ""
        job.work_left = None
        content = {
            "folder": str(job.folder),
            "config": job.planned.config.model_dump(mode="json"),
            "fleet": self._fleet,
            "address": self._address,
            "plugins": self._plugins,
            "stem": None if job.stem is None else str(job.stem),
        }
        assert worker.process.stdin is not None
        with suppress(BrokenPipeError):  # the process died; `_read_messages` reports it
            worker.process.stdin.write(json.dumps(content) + "\n")
            worker.process.stdin.flush()

    def _next(self) -> Job | None:
        """Return the longest waiting job that can start now.

        A job must wait while the run from which it continues is waiting or running.
        """
        pending = {job.folder for job in self._waiting}
        pending |= {worker.job.folder for worker in self._workers.values() if worker.job}
        return next((job for job in self._waiting if job.stem not in pending), None)

    def _start(self, number: int, log: Any) -> Worker:
        # a separate session, so that Ctrl-C reaches only the study, which then stops its workers
        slot = self._slots[number]
        process = start_python(
            "-m",
            "raylt.studies.running.worker",
            environment=slot.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
        )
        if slot.cores and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(process.pid, slot.cores)
        worker = Worker(process)
        worker.reader = threading.Thread(target=self._read_messages, args=(number, worker), daemon=True)
        worker.reader.start()
        return worker

    def _read_messages(self, number: int, worker: Worker) -> None:
        """Queue the messages of a worker process, and None at the end of its output."""
        assert worker.process.stdout is not None
        try:
            for line in worker.process.stdout:
                if line.endswith("\n"):  # a killed process may leave an incomplete line
                    self._messages.put((number, worker, json.loads(line)))
        finally:
            self._messages.put((number, worker, None))

    def _handle(self, worker: Worker, message: dict[str, Any], log: Any) -> None:
        job = worker.job
        assert job is not None
        match message["event"]:
            case "says":
                text = message["text"]
                if text not in self._shown:  # show a text only once, since all runs may send it
                    self._shown.add(text)
                    self._callback.on_message(f"{job.planned.folder}: {text}")
                return
            case "starts":
                job.steps = message["steps"]
                job.seconds = 0.0
                return
            case "last phase":
                self._pace.expect(job.planned, message["seconds"])
                return
            case "items":
                job.work = message["text"]
                job.work_left = message["left"]
                return
            case "step":
                job.work = ""
                job.work_left = None
                job.steps = message["step"]
                job.seconds += message["seconds"]
                self._pace.learn(job.planned, job.steps, message["seconds"])
                return
            case "done":
                self._done += 1
                self._callback.on_message(f"{self._done}/{self._total}  {job.planned.folder}  {job.seconds:.0f} s")
            case "elsewhere":  # not counted here, since another process finishes this run
                self._total -= 1
                self._callback.on_message(f"{job.planned.folder}: another process is doing this run")
            case "failed":
                self._give_up(job, message["problem"])
        worker.job = None
        self._assign_all(log)

    def _worker_died(self, number: int, worker: Worker, log: Any) -> None:
        """Restart the job of a worker process that has died, or mark the job as failed after several attempts."""
        del self._workers[number]
        job = worker.job
        code = worker.process.wait()
        if job is None:
            return
        reason = f"its process died ({f'signal {-code}' if code < 0 else f'exit code {code}'})"
        if job.attempts < MAX_ATTEMPTS:
            self._callback.on_message(f"{job.planned.folder}: {reason}; starting it again")
            self._waiting.insert(0, job)
        else:
            with store.folder_for(job.folder.parent) as parent:
                parent.write(failure_file(job.folder).name, reason + "\n")
            self._give_up(job, reason)
        self._assign_all(log)

    def _give_up(self, job: Job, reason: str) -> None:
        self._failed.append(job.planned.folder)
        if reason not in self._shown:  # show a reason only once; the study's table lists all failed runs
            self._shown.add(reason)
            self._callback.on_message(f"{job.planned.folder} failed: {reason}")

    def _left(self, job: Job) -> float:
        if job.work_left is not None and job.steps >= job.planned.config.federation.rounds:  # in its last phase
            return job.work_left
        return self._pace.left(job.planned, max(job.steps, job.shared))

    def _show(self) -> None:
        """Report the study's progress: at once if the running jobs change, otherwise at intervals."""
        running = [worker.job for worker in self._workers.values() if worker.job]
        names = [f"{job.planned.folder} ({job.work})" if job.work else job.planned.folder for job in running]
        state = names, self._done, len(self._failed)
        now = time.monotonic()
        # predicting the remaining time of a thousand runs takes longer than a step of a small model
        if state == self._last_shown and now - self._last_shown_at < PROGRESS_INTERVAL_S:
            return
        self._last_shown = state
        self._last_shown_at = now
        jobs = [*running, *self._waiting]
        left = [self._left(job) for job in jobs]
        whole = [self._pace.left(job.planned, job.shared) for job in jobs]
        ended = self._done + len(self._failed)
        share = ended + sum(1 - a / b for a, b in zip(left, whole, strict=True) if b > 0)
        status = StudyStatus(
            done=self._done,
            total=self._total,
            running=names,
            share=share / max(1, self._total),  # the total is 0 if another process does the only run
            left_s=makespan(left, len(self._slots)) if self._pace.measured else None,
            untimed_finish=any(self._pace.lacks_finish(job.planned, max(job.steps, job.shared)) for job in jobs),
        )
        self._callback.on_study_progress(status)

    def _stop_workers(self) -> None:
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
