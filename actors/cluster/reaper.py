"""Ends the processes of a local Ray cluster whose driver was killed, and removes the cluster's session folder.

This is a program of its own and not a part of session.py: `python -I reaper.py FOLDER` must outlive the driver and
start without raylt or Ray, so it imports only the standard library. The driver is at the other end of its standard
input. A driver that ends normally writes a byte first, and then no process is ended. Ray's own processes follow a dead
driver within a second or two, except for agents that look for it for a minute.
"""

import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

MARK = "RAYLT_SESSION"  # environment variable, with the session folder, of all processes that the driver starts
GRACE_S = 2.0  # for processes that end by themselves
LIMIT_S = 8.0  # a process that has not ended by then is left alone


def members(folder: str) -> Iterator[int]:
    """Yield the pids of the processes that belong to a Ray session.

    They carry the mark in their environment. Ray's agents do not, because their title has overwritten it; they are
    recognised by their title and the files that they have open. A user's process that reads a log has neither.
    """
    mark = f"{MARK}={folder}".encode()
    processes = Path("/proc")
    # macOS has no such folder; there Ray's processes follow their driver by themselves
    for entry in processes.iterdir() if processes.is_dir() else ():
        if not entry.name.isdecimal() or int(entry.name) == os.getpid():
            continue
        try:
            if mark in (entry / "environ").read_bytes().split(b"\0") or (
                (entry / "cmdline").read_bytes().startswith(b"ray::") and _writes_in(entry, folder)
            ):
                yield int(entry.name)
        except OSError:  # gone, or another user's
            continue


def _writes_in(entry: Path, folder: str) -> bool:
    return any(os.readlink(link).startswith(folder + "/") for link in (entry / "fd").iterdir())


def reap(folder: str) -> None:
    """End the processes of a Ray session within `LIMIT_S`, by SIGTERM and then by SIGKILL."""
    begun = time.monotonic()
    number = signal.SIGTERM
    time.sleep(GRACE_S)
    while time.monotonic() - begun < LIMIT_S:
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
        signal.signal(number, signal.SIG_IGN)  # meant for the driver; its end is seen on standard input
    folder = sys.argv[1]
    if not sys.stdin.buffer.read():
        reap(folder)
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
