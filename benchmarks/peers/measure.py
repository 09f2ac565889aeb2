"""Measures a command with all of its processes: CPU and wall seconds, memory, and the ends of rounds."""

import ctypes
import os
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

import psutil

PR_SET_CHILD_SUBREAPER = 36
INTERVAL = 0.5  # seconds between two looks at the memory


@dataclass(frozen=True)
class Measured:
    """The time and memory that a command took.

    Args:
        cpu, wall: seconds from its start to its end; CPU is user and system time of all its processes.
        round_cpu, round_wall: the same of one round, the median of all but the first. What comes once, as raylt's
            judging after the last round, is in the whole alone.
        first: seconds from the start to the end of round 1.
        memory: the largest sum seen of its processes' proportional set sizes, MB: what several share counts once.
    """

    cpu: float
    wall: float
    round_cpu: float
    round_wall: float
    first: float
    memory: float


def measure(command: Sequence[str | Path], env: dict[str, str], log: Path, limit: float) -> Measured:
    """Run a command and measure it. The command prints `ROUND n` at the end of round n = 1, 2, ...

    Raises:
        RuntimeError: it failed, needed more than `limit` CPU seconds, or reported less than two rounds.
    """
    # processes whose parent ends become children of this one, so that the kernel counts their time here
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    tree, over = _Tree(), threading.Event()
    start = time.perf_counter()
    with log.open("w") as errors:
        process = subprocess.Popen(
            list(map(str, command)), env=env, text=True, stdout=subprocess.PIPE, stderr=errors, start_new_session=True
        )
        watcher = threading.Thread(target=_watch, args=(tree, process, limit, over))
        watcher.start()
        rounds = []
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("ROUND "):
                rounds.append((time.perf_counter() - start, tree.cpu()))
        code = process.wait()
        _end_what_is_left()
        over.set()
        watcher.join()
    wall, cpu = time.perf_counter() - start, tree.cpu()
    if code or len(rounds) < 2:
        stopped = f"stopped after {cpu:.0f} CPU seconds, in round {len(rounds) + 1}"
        raise RuntimeError(stopped if cpu > limit else _last_line(log) or f"reported {len(rounds)} rounds")
    walls, cpus = ([after - before for before, after in pairwise(ends)] for ends in zip(*rounds, strict=True))
    return Measured(cpu, wall, median(cpus), median(walls), rounds[0][0], tree.memory)


class _Tree:
    """The CPU time and memory of all processes below this process."""

    def __init__(self):
        self.memory = 0.0
        self._last: dict[tuple[int, float], float] = {}  # what was last seen of each process
        self._before = self._ended()
        self._lock = threading.Lock()

    def cpu(self) -> float:
        """Return the CPU seconds of all processes since the start, including ended processes.

        They are those of living processes with the children that they waited for, and of children that this process
        waited for. A process that no process waits for counts with its last observed time.
        """
        with self._lock:
            total = self._ended() - self._before
            for process in psutil.Process().children(recursive=True):
                try:
                    key, times = (process.pid, process.create_time()), process.cpu_times()
                except psutil.NoSuchProcess:
                    continue
                self._last[key] = times.user + times.system
                total += times.user + times.system + times.children_user + times.children_system
            return max(total, sum(self._last.values()))

    def look(self) -> None:
        """Record the current CPU time and memory of all processes."""
        self.cpu()
        total = 0
        for process in psutil.Process().children(recursive=True):
            try:
                total += process.memory_full_info().pss
            except psutil.Error:
                continue
        self.memory = max(self.memory, total / 1e6)

    @staticmethod
    def _ended() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime


def _watch(tree: _Tree, process: subprocess.Popen[str], limit: float, over: threading.Event) -> None:
    while not over.wait(INTERVAL):
        tree.look()
        if tree.cpu() > limit:
            process.kill()


def _end_what_is_left() -> None:
    """Wait at most ten seconds for processes that the command left behind, then kill them."""
    _, alive = psutil.wait_procs(psutil.Process().children(), timeout=10)
    for process in alive:
        for one in [*process.children(recursive=True), process]:
            try:
                one.send_signal(signal.SIGKILL)
            except psutil.NoSuchProcess:
                continue
    while True:
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:200] if lines else ""
