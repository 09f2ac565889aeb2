"""Ends what a local Ray cluster leaves when its driver is killed, and removes its session folder.

Run as a program of its own, without anything but the standard library: `python -I reaper.py FOLDER`, with the driver
at the other end of its standard input. A driver that ends as it should writes a byte first, and nothing is ended.
Ray's own processes follow a dead driver within a second or two, except for agents that look for it for a minute.
"""

import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

MARK = "RAYLT_SESSION"      # names the folder in the environment of all that the driver starts
GRACE_S = 2.0               # for what ends by itself
LIMIT_S = 8.0               # after which what could not be ended is left alone


def members(folder: str) -> Iterator[int]:
    """The processes of a session: those with its mark, and Ray's agents, whose title has overwritten theirs.

    A process of the user that only reads a log there has neither.
    """
    mark = f"{MARK}={folder}".encode()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal() or int(entry.name) == os.getpid():
            continue
        try:
            if mark in (entry / "environ").read_bytes().split(b"\0") or (
                    (entry / "cmdline").read_bytes().startswith(b"ray::") and _writes_in(entry, folder)):
                yield int(entry.name)
        except OSError:         # gone, or another user's
            continue


def _writes_in(entry: Path, folder: str) -> bool:
    return any(os.readlink(link).startswith(folder + "/") for link in (entry / "fd").iterdir())


def reap(folder: str) -> None:
    """Ends the session's processes within `LIMIT_S`, by SIGTERM and then by SIGKILL."""
    begun, number = time.monotonic(), signal.SIGTERM
    time.sleep(GRACE_S)
    while time.monotonic() - begun < LIMIT_S:
        left = list(members(folder))
        if not left:
            break
        for pid in left:
            try:
                os.kill(pid, number)
            except OSError:
                continue
        number = signal.SIGKILL
        time.sleep(0.5)


def main() -> None:
    """Waits for the driver's end."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)       # meant for the driver, whose end is what counts here
    folder = sys.argv[1]
    if not sys.stdin.buffer.read():
        reap(folder)
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
