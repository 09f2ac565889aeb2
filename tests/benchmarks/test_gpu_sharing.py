"""GPU sharing in benchmarks/gpu.py, on a CPU: processes at once, NVIDIA's daemon, and two trainings in turn.

The daemon is a stand-in that makes the files raylt looks for.
"""

import importlib
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import accelerator  # noqa: F401 - torch must know of the pretend device before autograd first runs in a process
import pytest

from raylt.core.device import mps_runs

SMALL = {"device": "cpu", "model": "small", "samples": 64, "epochs": 2}
DAEMON = """#!/bin/sh
case "$1" in
-d) {start} ;;
*)  read word && [ "$word" = quit ] && kill "$(cat "$CUDA_MPS_PIPE_DIRECTORY/nvidia-cuda-mps-control.pid")" ;;
esac
"""
STARTS = """sleep 300 & echo $! > "$CUDA_MPS_PIPE_DIRECTORY/nvidia-cuda-mps-control.pid"
    touch "$CUDA_MPS_PIPE_DIRECTORY/control" "$CUDA_MPS_LOG_DIRECTORY/control.log" """
REFUSES = "echo 'cannot be run here' >&2; exit 1"


@pytest.fixture
def sharing(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return importlib.import_module("gpu_sharing")


@pytest.fixture
def daemon(tmp_path, monkeypatch):
    """Return a function that puts a stand-in for NVIDIA's daemon on the PATH."""

    def put(start: str) -> None:
        script = tmp_path / "bin" / "nvidia-cuda-mps-control"
        script.parent.mkdir()
        script.write_text(DAEMON.format(start=start))
        script.chmod(0o755)
        monkeypatch.setenv("PATH", f"{script.parent}:{os.environ['PATH']}")

    return put


def test_the_daemon_is_there_for_the_block_alone_in_folders_of_its_own(sharing, daemon, tmp_path, monkeypatch):
    daemon(STARTS)
    with sharing.mps(tmp_path) as (environment, problem):
        assert problem is None
        assert Path(environment["CUDA_MPS_LOG_DIRECTORY"]).parent == tmp_path
        monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", environment["CUDA_MPS_PIPE_DIRECTORY"])
        assert mps_runs()
        pid = int((tmp_path / "pipes" / "nvidia-cuda-mps-control.pid").read_text())
    end = time.monotonic() + 10
    while lives(pid) and time.monotonic() < end:
        time.sleep(0.01)
    assert not lives(pid)


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_without_the_daemon_none_is_found_whatever_runs_here(sharing, daemon, tmp_path, monkeypatch):
    daemon(STARTS)
    with sharing.mps(tmp_path, served=False) as (environment, problem):
        assert problem is None
        monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", environment["CUDA_MPS_PIPE_DIRECTORY"])
        assert list((tmp_path / "pipes").iterdir()) == []
        assert not mps_runs()


def test_a_daemon_that_is_missing_or_refuses_is_said_in_a_line(sharing, daemon, tmp_path, monkeypatch):
    (missing := tmp_path / "missing").mkdir()
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(missing))
        with sharing.mps(missing) as (_, problem):
            assert problem == "nvidia-cuda-mps-control is not on the PATH of this machine"
    daemon(REFUSES)
    (refusing := tmp_path / "refusing").mkdir()
    with sharing.mps(refusing) as (_, problem):
        assert problem == "nvidia-cuda-mps-control: cannot be run here"


@pytest.mark.slow
def test_processes_train_at_the_same_time_without_the_daemon_and_with_it(sharing, daemon):
    daemon(STARTS)
    found = list(sharing.processes(300, counts=(1, 2), **SMALL))
    assert [(one["processes"], one["graphs"]) for one in found] == 2 * [
        (1, "auto"),
        (1, "off"),
        (2, "auto"),
        (2, "off"),
    ]
    # 64 samples in batches of 32, twice: four steps in each process
    assert all(one["steps_per_second"] * one["seconds"] == pytest.approx(4 * one["processes"]) for one in found)


def test_a_missing_daemon_is_a_finding_and_what_there_is_no_time_for_is_left_out(sharing, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    (found,) = sharing.processes(-1, **SMALL)
    assert found == {"mps": "not started", "problem": "nvidia-cuda-mps-control is not on the PATH of this machine"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "problem"),
    [
        ("import time; time.sleep(60)", "ended, or was ended for want of time"),
        ("raise SystemExit('no such device')", "no such device"),
    ],
)
def test_processes_that_hang_or_fail_are_ended_and_named(sharing, program, problem):
    start = time.monotonic()
    (found,) = sharing.together([sys.executable, "-c", program], 2, dict(os.environ), 1.0)
    assert found == {"processes": 2, "problem": problem}
    assert time.monotonic() - start < 30


@pytest.mark.slow
def test_a_waiting_process_ends_when_its_input_closes(sharing):
    done = subprocess.run(
        [sys.executable, sharing.__file__, "cpu", "small", "32", "1"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout == '{"mps": "none"}\n'


@pytest.mark.slow
def test_two_models_in_turn_step_by_step_come_to_the_same_losses(sharing):
    found = list(sharing.streams(100, **SMALL))
    assert [one["graphs"] for one in found] == ["auto", "off"]
    assert all(one["same_loss"] for one in found)
    assert all(one["in_turn_s"] > 0 < one["streams_s"] for one in found)


class Rows:
    """A training that notes its steps."""

    def __init__(self, name: str, steps: int, seen: list[str], fails: int | None = None):
        self.name, self.steps, self.seen, self.fails = name, steps, seen, fails
        self.client: Any = type("Client", (), {"device": type("Device", (), {"type": "cpu"})})

    def rows(self):
        return iter(range(self.steps))

    def run(self, rows):
        for row in rows:
            self.seen.append(f"{self.name}{row}")
            if row == self.fails:
                raise ValueError(self.name)
        return 0.0


def test_trainings_take_turns_and_one_that_is_done_is_left_out(sharing):
    seen: list[str] = []
    assert sharing.by_steps([Rows("a", 2, seen), Rows("b", 4, seen)]) == [0.0, 0.0]
    assert seen == ["a0", "b0", "a1", "b1", "b2", "b3"]


def test_a_training_that_fails_does_not_hold_up_the_other(sharing):
    seen: list[str] = []
    with pytest.raises(ValueError, match="b"):
        sharing.by_steps([Rows("a", 3, seen), Rows("b", 3, seen, fails=1)])
    assert seen == ["a0", "b0", "a1", "b1", "a2"]
