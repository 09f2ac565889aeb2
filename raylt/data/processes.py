"""Calls in processes of their own: threads that decode small images wait for the interpreter's lock most of the time.

Processes are started anew and not by the multiprocessing module: a fork would copy the locks of torch and Ray, and its
other ways import the user's script once more, which may have no `if __name__ == "__main__"`.
"""

import os
import pickle
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from multiprocessing.connection import Pipe, wait
from typing import Any

from raylt.errors import RayltError

AHEAD = 2               # calls that a process holds: one that it does, and one so that it need not wait for the next
THREADS = "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"


def call_in_processes(count: int, calls: Iterable[tuple[Any, tuple[Any, ...]]], handles: tuple[int, ...]
                      ) -> Generator[tuple[Any, Any], None, None]:
    """Makes calls in so many processes, which end when the iterator is closed or this process dies.

    Args:
        calls: of each a name, which errors tell, and a function with its arguments, which pickle.
        handles: open files that the processes inherit, under the same numbers.

    Returns:
        Names of calls with what they gave back, as they are done.

    Raises:
        RayltError: a call raised an error, or a process died.
    """
    waiting, workers = iter(calls), list[_Worker]()
    try:
        for _ in range(count):
            workers.append(_Worker(handles))
        for worker in workers * AHEAD:
            worker.take(waiting)
        while busy := {worker.channel: worker for worker in workers if worker.names}:
            for ready in wait(list(busy)):
                worker = next(worker for channel, worker in busy.items() if channel is ready)
                name, result = worker.give()
                worker.take(waiting)
                yield name, result
    finally:
        for worker in workers:
            worker.end()


class _Worker:
    """A process, and the names of the calls that it holds."""

    def __init__(self, handles: tuple[int, ...]):
        self.names: deque[Any] = deque()
        self.channel, theirs = Pipe()
        # what this process can import, that one can too; and one thread each, as there is a process for each core
        environment = os.environ | dict.fromkeys(THREADS, "1") | {
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        try:
            # a session of its own: Ctrl-C is for the process that started it, which then ends it
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "raylt.data.decode_worker", str(theirs.fileno())], env=environment,
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True,
                pass_fds=(theirs.fileno(), *handles))
        except OSError as error:
            self.channel.close()
            raise RayltError(f"no process can be started ({error.strerror})") from None
        finally:
            theirs.close()

    def take(self, calls: Iterator[tuple[Any, tuple[Any, ...]]]) -> None:
        """Sends the next call, if there is one."""
        for name, call in calls:
            self.names.append(name)
            try:
                self.channel.send_bytes(pickle.dumps(call))
            except OSError:
                raise self._dead() from None
            return

    def give(self) -> tuple[Any, Any]:
        """The result of the oldest call."""
        try:
            result, problem = self.channel.recv()
        except (EOFError, OSError):
            raise self._dead() from None
        if problem is not None:
            raise RayltError(problem)
        return self.names.popleft(), result

    def end(self) -> None:
        self.channel.close()
        self._process.kill()
        self._process.wait()

    def _dead(self) -> RayltError:
        self.channel.close()
        code = self._process.wait()
        how = f"signal {-code} ({signal.strsignal(-code)})" if code < 0 else f"exit code {code}"
        return RayltError(f"process {self._process.pid} ended with {how} at {self.names[0]}")
