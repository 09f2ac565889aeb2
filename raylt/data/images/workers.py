"""Function calls in worker processes, which decode small images faster than threads.

Threads would mostly wait for the global interpreter lock.

The processes are started without the multiprocessing module. A fork would copy the locks of torch and Ray, and the
other start methods of multiprocessing import the user's script again, which may have no `if __name__ == "__main__"`.
"""

import pickle
import signal
import subprocess
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from multiprocessing.connection import Pipe, wait
from typing import Any

from raylt.errors import RayltError
from raylt.own_code.child_process import start_python

CALLS_AHEAD = 2  # calls sent to a process: the running one, and the next one, so that the process never waits
THREADS = "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"


def call_in_processes(
    count: int, calls: Iterable[tuple[Any, tuple[Any, ...]]], handles: tuple[int, ...]
) -> Generator[tuple[Any, Any], None, None]:
    """Run function calls in worker processes and yield the results.

    The processes end when the iterator is closed or this process dies.

    Args:
        count: Number of processes.
        calls: For each call, a name for error messages and a function with its arguments, which are pickled.
        handles: Open files that the processes inherit, with the same numbers.

    Yields:
        The name and the result of each call, in the order in which calls finish.

    Raises:
        RayltError: A call raised an error, or a process died.
    """
    waiting = iter(calls)
    workers: list[_Worker] = []
    try:
        for _ in range(count):
            workers.append(_Worker(handles))
        for worker in workers * CALLS_AHEAD:
            worker.send_next(waiting)
        while True:
            busy = {worker.channel: worker for worker in workers if worker.names}
            if not busy:
                return
            for ready in wait(list(busy)):
                worker = next(worker for channel, worker in busy.items() if channel is ready)
                name, result = worker.receive()
                worker.send_next(waiting)
                yield name, result
    finally:
        for worker in workers:
            worker.end()


class _Worker:
    """A worker process, and the names of the calls sent to it."""

    def __init__(self, handles: tuple[int, ...]):
        self.names: deque[Any] = deque()
        self.channel, remote = Pipe()
        try:
            # a new session: Ctrl-C reaches only the parent process, which then ends this one
            self._process = start_python(
                "-m",
                "raylt.data.images.decode_worker",
                str(remote.fileno()),
                environment=dict.fromkeys(THREADS, "1"),  # one thread, because each core has a process
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=(remote.fileno(), *handles),
            )
        except OSError as error:
            self.channel.close()
            raise RayltError(
                f"decoding: no process can be started ({error.strerror}). Free memory, or raise the limit on the "
                "number of processes.",
                code="data.decoding-failed",
            ) from None
        finally:
            remote.close()

    def send_next(self, calls: Iterator[tuple[Any, tuple[Any, ...]]]) -> None:
        """Send the next call to the worker process, if any call is left."""
        following = next(calls, None)
        if following is None:
            return
        name, call = following
        self.names.append(name)
        try:
            self.channel.send_bytes(pickle.dumps(call))
        except OSError:
            raise self._death() from None

    def receive(self) -> tuple[Any, Any]:
        """Wait for the result of the oldest call of this worker.

        Raises:
            RayltError: The call raised an error, or the process died.
        """
        try:
            result, problem = self.channel.recv()
        except (EOFError, OSError):
            raise self._death() from None
        if problem is not None:
            raise RayltError(problem, code="data.decoding-failed")
        return self.names.popleft(), result

    def end(self) -> None:
        """Kill the worker process and wait until it has ended."""
        self.channel.close()
        self._process.kill()
        self._process.wait()

    def _death(self) -> RayltError:
        self.channel.close()
        code = self._process.wait()
        how = f"signal {-code} ({signal.strsignal(-code)})" if code < 0 else f"exit code {code}"
        return RayltError(
            f"{self.names[0]}: the process that decodes it ended ({how}). Free memory, or replace the file.",
            code="data.decoding-failed",
        )
