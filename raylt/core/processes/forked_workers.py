"""`ForkedWorkers`: processes that are forked from this one and work on tasks in parallel.

A forked process shares the memory of its parent until either writes to it. So it starts in milliseconds, with torch,
data and plugins loaded, and needs little memory of its own.

torch cannot compute gradients in a fork of a process that has computed gradients. So this process forks only one child,
the nursery, before the run computes anything. The nursery computes nothing and forks all workers, including those that
replace a lost one.
"""

import contextlib
import ctypes
import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from multiprocessing import reduction
from multiprocessing.connection import Connection, wait
from typing import Any

from raylt.errors import RayltError

PR_SET_PDEATHSIG = 1  # option of Linux' prctl: the signal that a process gets when its parent ends
FORK = "This process .* is multi-threaded, use of fork"

Work = Callable[[bytes, Any], Any]


@dataclass(frozen=True)
class Lost:
    """The result of a task whose process ended before it finished."""


@dataclass
class _Worker:
    pid: int
    connection: Connection
    knows: bytes | None = None  # the shared data that the worker has received


class ForkedWorkers:
    """A fixed number of forked processes.

    A process that ends is replaced by a new fork. All processes end with this one, even if it is killed.

    Args:
        work: `work(shared, task)` computes a task's result in a forked process. If it raises an exception, the process
            prints the traceback and ends.
        number: Number of processes.
    """

    def __init__(self, work: Work, number: int):
        self._workers: list[_Worker] = []
        self._busy: dict[Connection, tuple[_Worker, Any]] = {}
        own_end, nursery_end = multiprocessing.Pipe()
        nursery = multiprocessing.get_context("fork").Process(
            target=_nurse, args=(work, nursery_end, own_end, os.getpid()), daemon=True
        )
        with warnings.catch_warnings():
            # the other threads only draw the progress and never hold a lock that a client's call needs
            warnings.filterwarnings("ignore", FORK, DeprecationWarning)
            nursery.start()
        nursery_end.close()
        self._nursery = nursery
        self._control = own_end
        for _ in range(number):
            self._fork()

    def __len__(self) -> int:
        return len(self._workers)

    def run(self, shared: bytes, tasks: deque[Any], until: float | None = None) -> Generator[tuple[Any, Any]]:
        """Yield each task with its result, or with `Lost`, in the order in which they end.

        Tasks that are running at the deadline, or when the iterator is closed, are aborted.

        Args:
            shared: Data that all tasks share; it is sent to each process once.
            tasks: The remaining tasks, which are pickled. More may be added between two results.
            until: Deadline on the clock of `time.monotonic()`; by default there is none.
        """
        try:
            while tasks or self._busy:
                self._give(shared, tasks)
                timeout_s = None if until is None else max(0.0, until - time.monotonic())
                ended = wait(list(self._busy), timeout_s)
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
            _kill(worker)
            worker.connection.close()
        self._workers.clear()
        self._busy.clear()
        self._nursery.kill()
        self._nursery.join()
        self._control.close()

    def _give(self, shared: bytes, tasks: deque[Any]) -> None:
        """Send tasks to idle processes."""
        idle = deque(worker for worker in self._workers if worker.connection not in self._busy)
        while tasks and idle:
            worker = idle.popleft()
            sent = None if worker.knows is shared else shared
            try:
                worker.connection.send_bytes(pickle.dumps((sent, tasks[0])))
            except OSError:  # the process ended while it was idle
                idle.append(self._replace_ended(worker))
                continue
            worker.knows = shared
            self._busy[worker.connection] = worker, tasks.popleft()

    def _take(self, connection: Connection) -> tuple[Any, Any]:
        worker, task = self._busy.pop(connection)
        try:
            return task, pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            self._replace_ended(worker)
            return task, Lost()

    def _replace(self, worker: _Worker) -> _Worker:
        _kill(worker)
        return self._replace_ended(worker)

    def _replace_ended(self, worker: _Worker) -> _Worker:
        """Fork a new worker in place of one that has ended, without a kill: another process may have its pid now."""
        worker.connection.close()
        self._workers.remove(worker)
        return self._fork()

    def _fork(self) -> _Worker:
        try:
            self._control.send_bytes(b"")
            connection = Connection(reduction.recv_handle(self._control))
            pid = self._control.recv()
        except (EOFError, OSError):
            raise RayltError(
                "fleet: the process that forks the clients' processes has ended. Resume the run.",
                code="client.not-started",
            ) from None
        worker = _Worker(pid, connection)
        self._workers.append(worker)
        return worker


def _kill(worker: _Worker) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(worker.pid, signal.SIGKILL)


def _nurse(work: Work, control: Connection, other_end: Connection, origin: int) -> None:
    """Fork a worker for each message, and send its pid and the other end of its connection."""
    other_end.close()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process handles it
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ended workers do not remain as zombies
    with contextlib.suppress(EOFError, OSError):
        while True:
            control.recv_bytes()
            origin_end, worker_end = multiprocessing.Pipe()
            pid = os.fork()
            if pid == 0:
                control.close()
                origin_end.close()
                _serve(work, worker_end)  # pyright: ignore[reportArgumentType]
            worker_end.close()
            reduction.send_handle(control, origin_end.fileno(), origin)
            control.send(pid)
            origin_end.close()


def _serve(work: Work, connection: Connection) -> None:
    """Answer tasks in a worker until the connection is closed, then end the process."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    shared = b""
    try:
        while True:
            sent, task = pickle.loads(connection.recv_bytes())
            shared = shared if sent is None else sent
            connection.send_bytes(pickle.dumps(work(shared, task)))
            sys.stdout.flush()
    except (EOFError, OSError):
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
