"""Handling of signals that stop commands, and of output that cannot be written, such as to a closed pipe."""

import io
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, TextIO

from raylt.errors import RayltError

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
STOPPED = 130  # Exit code of a command that a signal has stopped.
SAME_SIGNAL_S = 1.0  # Signals within this time count as one: a terminal and a scheduler may both send one.


def stop_on_signals() -> None:
    """Make Ctrl-C, SIGTERM and SIGHUP stop a command, and a second such signal end it immediately.

    By default SIGTERM and SIGHUP end a process silently, and a second Ctrl-C ends it with a traceback from the
    clean-up. Signals that the parent process ignores, as under `nohup`, stay ignored.
    """
    first = 0.0

    def stop(*_: object) -> None:
        nonlocal first
        if not first:
            first = time.monotonic()
            raise KeyboardInterrupt
        if time.monotonic() - first > SAME_SIGNAL_S:
            os._exit(STOPPED)  # Safe at any time: files are replaced atomically.

    _handle(stop)


def exit_with(code: int) -> NoReturn:
    """End a command with its exit code, also if a further signal arrives while Python ends."""
    _handle(signal.SIG_IGN if code == STOPPED else lambda *_: os._exit(code))
    sys.exit(code)


def _handle(handler: Callable[..., None] | signal.Handlers) -> None:
    for number in STOPS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)


@contextmanager
def handling_stops(handler: Callable[..., None]) -> Iterator[None]:
    """Handle Ctrl-C, SIGTERM and SIGHUP by another function for the duration of the block.

    Outside the main thread, where Python allows no handlers, the block runs with the handlers as they are.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in STOPS}
    _handle(handler)
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, signal.SIG_DFL if earlier is None else earlier)


@contextmanager
def starting_ray() -> Iterator[None]:
    """Wrap the start of Ray, which replaces the handler of SIGTERM and whose processes inherit ignored signals.

    Afterwards the earlier handler is restored. If there was none, SIGTERM interrupts like Ctrl-C, because Ray's handler
    would end the process silently. Ray's processes ignore SIGHUP: a closing terminal sends it to all processes at once,
    and this process then ends them in order.
    """

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    of_ray = getattr(before, "__module__", "").startswith("ray")  # set by an earlier session in this process
    hang_up = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, interrupt if of_ray or before in (signal.SIG_DFL, None) else before)
        signal.signal(signal.SIGHUP, hang_up)


def guard_output() -> None:
    """Discard output to a pipe that its reader has closed, and report other output that cannot be written.

    Characters that the output's encoding lacks, such as those of a folder's name, are written as escape sequences.

    With a closed pipe, the command continues and ends with its own exit code. The same holds for closed standard
    streams (`>&-`), whose file descriptors would otherwise be reused for the first files that the command opens.
    """
    handle = os.open(os.devnull, os.O_RDWR)
    while handle <= 2:
        os.set_inheritable(handle, True)
        handle = os.open(os.devnull, os.O_RDWR)
    os.close(handle)
    sys.stdout = _guarded(sys.stdout or os.fdopen(1, "w", closefd=False))
    sys.stderr = _guarded(sys.stderr or os.fdopen(2, "w", closefd=False))


def _guarded(stream: TextIO) -> TextIO:
    if not isinstance(stream, io.TextIOWrapper):  # the output of a notebook
        return stream
    stream.reconfigure(errors="backslashreplace")
    if stream.isatty():
        return stream
    try:
        handle = stream.fileno()
    except io.UnsupportedOperation:  # an output in memory has no file descriptor
        return stream
    stream.flush()
    output = _Output(handle, "w", closefd=False)
    buffered = isinstance(stream.buffer, io.BufferedWriter)  # not with PYTHONUNBUFFERED
    return io.TextIOWrapper(
        io.BufferedWriter(output) if buffered else output,
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


class _Output(io.FileIO):
    """An output that redirects its file descriptor to /dev/null after the first failed write.

    This also discards later output of child processes.
    """

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data) or 0
        except OSError as error:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())
            os.close(null)
            if not isinstance(error, BrokenPipeError):
                raise RayltError(
                    f"output: cannot be written ({error.strerror}). Redirect it to a file system with free space.",
                    code="file.unwritable",
                ) from None
            return super().write(data) or 0
