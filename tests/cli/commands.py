"""Helpers of the command line's tests.

Most commands run in the test's process; real processes are used where the exit code or the terminal matters.
"""

import re
import subprocess
from pathlib import Path
from typing import NamedTuple

SMALL = ["method=fedavg", "data.clients=3", "local.epochs=1", "data.imbalance=50", "federation.rounds=2"]


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


def damage(folder: Path) -> None:
    tensors = folder / "server.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:100])


def copied(folder: Path, place: Path) -> Path:
    subprocess.run(["cp", "-r", folder, place], check=True)
    return place


def refused(outcome: Outcome, *named: str) -> None:
    """Assert that a command ended with code 2, one line on stderr that names the problem, and nothing on stdout."""
    assert outcome.code == 2, outcome
    assert outcome.out == ""
    assert re.match(r"error( \[[a-z]+\.[a-z-]+\])?: ", outcome.err), outcome.err
    assert outcome.err.count("\n") == 1, outcome.err
    assert outcome.err.endswith("\n")
    assert all(part in outcome.err for part in named), outcome.err
