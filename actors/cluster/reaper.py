"""Ends the processes of a local Ray cluster whose driver was killed, and removes the cluster's session folder.

This is a separate program: `python -I reaper.py FOLDER` must outlive the driver and start without raylt and Ray, so it
imports only the standard library. Its standard input is a pipe from the driver. A driver that ends normally writes a
byte first; then the reaper ends no process. Most of Ray's processes end within two seconds after their driver, but its
agents may take a minute.
"""

import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

MARK = "RAYLT_SESSION"  # Environment variable with the session folder; processes that the driver starts inherit it.
GRACE_S = 2.0  # Time for processes to end without a signal.
KILL_TIMEOUT_S = 8.0  # Time after which the reaper gives up.


def members(folder: str) -> Iterator[int]:
    """Yield the pids of the processes that belong to a Ray session.

    Their environment contains the mark. Ray's agents overwrite their environment with a process title, so they are
    recognised by the title and by their open files. A user's process that reads a log has neither.
    """
    mark = f"{MARK}={folder}".encode()
    processes = Path("/proc")
    # macOS has no /proc; there Ray's processes end with their driver
    for entry in processes.iterdir() if processes.is_dir() else ():
        if not entry.name.isdecimal() or int(entry.name) == os.getpid():
            continue
        try:
            if mark in (entry / "environ").read_bytes().split(b"\0") or (
                (entry / "cmdline").read_bytes().startswith(b"ray::") and _writes_in(entry, folder)
            ):
                yield int(entry.name)
        except OSError:  # the process has ended, or belongs to another user
            continue


def _writes_in(entry: Path, folder: str) -> bool:
    return any(os.readlink(link).startswith(folder + "/") for link in (entry / "fd").iterdir())


def reap(folder: str) -> None:
    """End the processes of a Ray session within `KILL_TIMEOUT_S`, by SIGTERM and then by SIGKILL."""
    start = time.monotonic()
    number = signal.SIGTERM
    time.sleep(GRACE_S)
    while time.monotonic() - start < KILL_TIMEOUT_S:
        pids = list(members(folder))
        if not pids:
            break
        for pid in pids:
            try:
                os.kill(pid, number)
            except OSError:
                continue
        number = signal.SIGKILL
        time.sleep(0.5)


def main() -> None:
    """Wait until the driver ends, then clean up if it did not end normally."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # the signals are for the driver; end of file on standard input shows that it ended
        signal.signal(number, signal.SIG_IGN)
    folder = sys.argv[1]
    if not sys.stdin.buffer.read():
        reap(folder)
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
