"""Signal handling of commands: SIGTERM, and pipes whose reader closes them, as `head` does."""

import io
import os
import signal
import stat
import sys
import threading
from typing import Any, TextIO


def interrupt_on_sigterm() -> None:
    """Make SIGTERM end a command as Ctrl-C does.

    Otherwise the process, or Ray's handler, would end silently.
    """

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, interrupt)


def outlive_pipes() -> None:
    """Discard output to a pipe that its reader has closed.

    The command continues and ends with its own exit code.
    """
    sys.stdout = _outliving(sys.stdout)
    sys.stderr = _outliving(sys.stderr)


def _outliving(stream: TextIO) -> TextIO:
    if not isinstance(stream, io.TextIOWrapper):  # of a notebook
        return stream
    try:
        mode = os.fstat(stream.fileno()).st_mode
    except io.UnsupportedOperation:  # output that is kept in memory has no pipe
        return stream
    if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
        return stream
    stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(_Pipe(stream.fileno(), "w", closefd=False)),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


class _Pipe(io.FileIO):
    """A pipe that redirects further output to /dev/null after its reader has closed it.

    This includes the output of child processes.
    """

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data) or 0
        except BrokenPipeError:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())
            os.close(null)
            return super().write(data) or 0
