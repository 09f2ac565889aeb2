"""A fleet's notes about a stuck client and a full device, and the measurement of a client's needs."""

import os
import re
import signal
import threading
import time

import faulty
import pytest
import ray
from tiny import make_setup
from trouble import IDS, Unable, configure

from actors.capacity import Placement
from actors.fleet import MIN_PATIENCE_S, STACKS, RayFleet
from actors.probe import probe
from actors.shards import Shards
from raylt.core.fleet.reductions import each
from raylt.methods.fedavg import FedAvg
from raylt.runs.folder.notes import NOTES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def fleet(ray_session, tiny_task, tmp_path):
    shards, test = Shards.put(tiny_task.shards), ray.put(tiny_task.test)
    setup = make_setup(configure(), FedAvg())
    made = RayFleet(setup, tiny_task, shards, test, Placement(4, 0.25, 0.0), tmp_path.name, tmp_path)
    made.begin(3)
    yield made
    made.close()


def test_a_full_device_halves_the_actors_and_the_call_continues(fleet, tmp_path):
    replies = fleet.ask(faulty.fill, IDS, {"folder": str(tmp_path), "fit": 1}, id=each)["id"]
    assert list(replies.values()) == IDS
    assert (len(fleet.slots), fleet.round_stats.retried, fleet.round_stats.lost) == (1, [], [])
    notes = (tmp_path / NOTES).read_text().splitlines()
    assert len(notes) == 2
    assert re.fullmatch(
        r"client \d, round 3, fill: device out of memory; continuing with 2 of 4 client actors", notes[0]
    )
    assert notes[1].endswith("continuing with 1 of 2 client actors")


def test_a_stuck_client_is_named_with_its_stack(fleet, tmp_path, monkeypatch):
    monkeypatch.setattr("actors.fleet.MIN_PATIENCE_S", 1.0)
    fleet.ask(faulty.sleep, IDS, {"seconds": {}}, id=each)  # how long the other clients take
    fleet.ask(faulty.sleep, IDS, {"seconds": {"2": 3.0}}, id=each)
    (note,) = (tmp_path / NOTES).read_text().splitlines()
    match = re.fullmatch(
        r"client 2, round 3, sleep: running for [1-3] s, other clients took at most 0 s; set "
        r"federation.deadline_s to continue without it; (stacks/client\S+txt) has its stack traces",
        note,
    )
    assert match
    stack = (tmp_path / match[1]).read_text()
    assert "faulty.py" in stack
    assert " in sleep" in stack
    assert len(list((tmp_path / STACKS).iterdir())) == 1  # stacks of calls that were not stuck are removed


@pytest.mark.parametrize("known", [True, False], ids=["later", "first"])
def test_a_stopped_client_is_named_with_the_reason_why_it_has_no_stack(fleet, tmp_path, monkeypatch, known):
    monkeypatch.setattr("actors.fleet.MIN_PATIENCE_S", 1.0)
    monkeypatch.setattr("actors.fleet.STACKS_TIMEOUT_S", 0.5)
    if known:
        fleet.ask(faulty.sleep, IDS, {"seconds": {}}, id=each)
    slot = next(slot for slot in fleet.slots if 2 in slot.own)
    pid = slot.process[1]
    os.kill(pid, signal.SIGSTOP)
    threading.Timer(4.0, os.kill, (pid, signal.SIGCONT)).start()
    fleet.ask(faulty.sleep, [2], {"seconds": {}}, id=each)
    (note,) = (tmp_path / NOTES).read_text().splitlines()
    assert note.startswith("client 2, round 3, sleep: running for 1 s, ")
    assert ("no client has finished yet" in note) != known
    assert note.endswith(f"it wrote no stack traces: its process {pid} is stopped; kill -CONT {pid} continues it")


def test_a_call_of_many_clients_may_take_longer_once_one_is_known(fleet):
    assert fleet.patience("train", 64) == MIN_PATIENCE_S
    fleet.record_seconds("train", 1, 30.0)
    assert (fleet.patience("train", 1), fleet.patience("train", 2)) == (150.0, 300.0)


def test_what_a_client_needs_is_measured(ray_session, tiny_task):
    need = probe(make_setup(configure(), FedAvg()), tiny_task, 0)
    assert need is not None
    assert 100 * 2**20 < need.memory < 10 * 2**30
    assert need.gpu_memory == 0


def test_the_one_client_of_a_probe_takes_part_whatever_is_sampled(ray_session, tiny_task):
    config = configure(participation=0.01, sampling="poisson", secure=True)
    assert probe(make_setup(config, FedAvg()), tiny_task, 0) is not None


def test_a_probe_that_fails_leaves_the_driver_alive(ray_session, tiny_task, monkeypatch):
    cancelled = []
    monkeypatch.setattr(ray, "cancel", lambda *run, **how: cancelled.append(run))
    notes = []
    assert probe(make_setup(configure(), Unable()), tiny_task, 0, notes.append) is None
    assert "no kernel for this device" in notes[0]
    assert cancelled == []  # the task has ended: if it were cancelled, Ray would abort the process sooner or later


def test_a_probe_that_finds_no_room_takes_none_later(ray_session, tiny_task, monkeypatch):
    monkeypatch.setattr("actors.probe.TIMEOUT_S", 1.0)
    holds = ray.remote(num_cpus=4)(faulty.Holds).remote()
    ray.get(holds.__ray_ready__.remote())
    assert probe(make_setup(configure(), FedAvg()), tiny_task, 0) is None
    ray.kill(holds)
    end, seen = time.monotonic() + 4, set[float]()
    while time.monotonic() < end:
        seen.add(ray.available_resources().get("CPU", 0.0))
        time.sleep(0.05)
    assert seen <= {0.0, 4.0}  # a probe would hold a CPU
    assert 4.0 in seen
