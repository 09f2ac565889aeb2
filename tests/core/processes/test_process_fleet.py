"""The tests of forked_runs.py, in a process in which no other test has computed gradients on another device."""

import os
import signal
import subprocess
import sys
import time
from collections import deque
from pathlib import Path

import pytest
from refusals import refused
from tiny import configure, make_experiment

from raylt.core.fleet.wire import Fault
from raylt.core.processes import process_fleet
from raylt.core.processes.forked_workers import ForkedWorkers, Lost
from raylt.core.processes.process_fleet import ProcessFleet
from raylt.errors import ConfigError

RUNS = Path(__file__).with_name("forked_runs.py")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_runs_in_forked_processes():
    root = RUNS.parents[3]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", f"--rootdir={root}", str(RUNS)],
        env=os.environ | {"PYTHONPATH": str(root)},
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]


def test_forks_that_cannot_compute_gradients_are_refused(tiny_task, tmp_path, monkeypatch):
    monkeypatch.setattr(process_fleet, "_probe", lambda: Fault("client.failed", "no gradients after a fork"))
    with refused("config.conflict", ConfigError, key="fleet", value="processes"):
        make_experiment(configure(), tiny_task, tmp_path, fleet=ProcessFleet)


class IdleWorkers:
    """Stands for one forked worker that passes the probe and answers no other task."""

    def __init__(self, work, number):
        self.tasks = []

    def __len__(self):
        return 1

    def run(self, call, tasks, until=None):
        self.tasks = list(tasks)
        yield from [(task, None) for task in tasks if call == b""]

    def close(self):
        pass


def test_with_a_deadline_a_task_is_one_client(tiny_task, tmp_path, monkeypatch):
    monkeypatch.setattr(process_fleet, "ForkedWorkers", IdleWorkers)
    monkeypatch.setattr(process_fleet, "TASKS_PER_PROCESS", 1)
    config = configure(federation={"deadline_s": 60})
    experiment = make_experiment(config, tiny_task, tmp_path, fleet=ProcessFleet)
    fleet = experiment.fleet
    assert fleet._task_size(experiment.method.train, len(fleet.ids)) > 1
    late = list(fleet._in_order(experiment.method.train, b"call", fleet.ids))
    assert [len(task.clients) for task in fleet._workers.tasks] == [1] * len(fleet.ids)
    assert {answer.error.code for answer in late} == {"client.late"}


def work(shared, task):
    if task == "leave":
        os._exit(3)
    return shared, task, os.getpid()


def test_a_lost_worker_is_replaced_and_the_others_go_on():
    workers = ForkedWorkers(work, 2)
    try:
        results = list(workers.run(b"one", deque(["a", "leave", "b", "c"])))
        assert sorted(task for task, _ in results) == ["a", "b", "c", "leave"]
        assert [task for task, result in results if result == Lost()] == ["leave"]
        again = list(workers.run(b"two", deque(range(20))))
        assert {result[0] for _, result in again} == {b"two"}
        assert len(workers) == 2
        assert os.getpid() not in {result[2] for _, result in again}
    finally:
        workers.close()


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_workers_that_were_killed_while_they_were_idle_are_replaced():
    workers = ForkedWorkers(work, 2)
    try:
        pids = {result[2] for _, result in workers.run(b"one", deque(range(20)))}
        for worker in workers._workers:
            os.kill(worker.pid, signal.SIGKILL)
        time.sleep(0.5)
        results = list(workers.run(b"two", deque(range(3))))
        assert sorted(task for task, _ in results) == [0, 1, 2]
        assert {result[0] for _, result in results} == {b"two"}
        assert pids.isdisjoint({result[2] for _, result in results})
        assert len(workers) == 2
    finally:
        workers.close()
