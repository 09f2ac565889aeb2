"""`ForkedWorkers`: processes that this process forks, and that work on tasks side by side.

A forked process shares the memory of this one until either writes to it. So it starts in milliseconds, with torch, data
and plug-ins loaded, and takes little memory of its own.
"""

import contextlib
import ctypes
import multiprocessing
import pickle
import signal
import time
import warnings
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

PR_SET_PDEATHSIG = 1  # of Linux' prctl: the signal that a process gets when its parent ends
FORK = "This process .* is multi-threaded, use of fork"

Work = Callable[[bytes, Any], Any]


@dataclass(frozen=True)
class Lost:
    """The result of a task whose process ended before it had one.

    Attributes:
        cause: one line.
    """

    cause: str


@dataclass
class _Worker:
    process: BaseProcess
    connection: Connection
    knows: bytes | None = None  # what all tasks under way share, once it was sent


class ForkedWorkers:
    """A fixed number of forked processes.

    A process that ends is replaced by a new fork. All processes end with this one, also if it is killed.

    Args:
        work: `work(shared, task)` computes a task's result in a forked process. An exception of it ends the process.
        number: of processes.
    """

    def __init__(self, work: Work, number: int):
        self._work = work
        self._workers: list[_Worker] = []
        self._busy: dict[Connection, tuple[_Worker, Any]] = {}
        for _ in range(number):
            self._fork()

    def __len__(self) -> int:
        return len(self._workers)

    def run(self, shared: bytes, tasks: deque[Any], until: float | None = None) -> Generator[tuple[Any, Any]]:
        """Yield each task with its result, or with `Lost`, in the order in which they end.

        Tasks that are under way when the iterator is closed, or at the deadline, are broken off.

        Args:
            shared: what all tasks share; it is sent to a process once.
            tasks: the tasks that are left, which are pickled. More may be added between two results.
            until: the deadline as `time.monotonic()` gives it; by default there is none.
        """
        try:
            while tasks or self._busy:
                self._give(shared, tasks)
                patience = None if until is None else max(0.0, until - time.monotonic())
                ended = wait(list(self._busy), patience)
                if not ended:
                    return
                for connection in ended:
                    yield self._take(connection)  # pyright: ignore[reportArgumentType]
        finally:
            for worker, _ in list(self._busy.values()):
                self._replace(worker)
            self._busy.clear()

    def close(self) -> None:
        """End all processes."""
        for worker in self._workers:
            _end(worker)
        self._workers.clear()
        self._busy.clear()

    def _give(self, shared: bytes, tasks: deque[Any]) -> None:
        """Hand tasks to processes that have none."""
        for worker in list(self._workers):
            if not tasks:
                return
            if worker.connection in self._busy:
                continue
            task = tasks.popleft()
            sent = None if worker.knows is shared else shared
            try:
                worker.connection.send_bytes(pickle.dumps((sent, task)))
            except OSError:  # it ended while it was idle
                self._replace(worker)
                tasks.appendleft(task)
                continue
            worker.knows = shared
            self._busy[worker.connection] = worker, task

    def _take(self, connection: Connection) -> tuple[Any, Any]:
        worker, task = self._busy.pop(connection)
        try:
            return task, pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            worker.process.join()
            code = worker.process.exitcode or 0
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"code {code}"
            self._replace(worker)
            return task, Lost(f"its process ended with {how}")

    def _replace(self, worker: _Worker) -> None:
        _end(worker)
        self._workers.remove(worker)
        self._fork()

    def _fork(self) -> None:
        own_end, child_end = multiprocessing.Pipe()
        inherited = [worker.connection for worker in self._workers]
        process = multiprocessing.get_context("fork").Process(
            target=_serve, args=(self._work, child_end, [own_end, *inherited]), daemon=True
        )
        with warnings.catch_warnings():
            # the threads of this process draw its progress and never hold what a client's call needs
            warnings.filterwarnings("ignore", FORK, DeprecationWarning)
            process.start()
        child_end.close()
        self._workers.append(_Worker(process, own_end))  # pyright: ignore[reportArgumentType]


def _end(worker: _Worker) -> None:
    worker.process.kill()
    worker.process.join()
    worker.connection.close()


def _serve(work: Work, connection: Connection, inherited: list[Connection]) -> None:
    """Answer tasks in a forked process until the process that forked it closes the connection or ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that forked this one decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for other in inherited:
        other.close()
    shared = b""
    with contextlib.suppress(EOFError, OSError):
        while True:
            sent, task = pickle.loads(connection.recv_bytes())
            shared = shared if sent is None else sent
            connection.send_bytes(pickle.dumps(work(shared, task)))
