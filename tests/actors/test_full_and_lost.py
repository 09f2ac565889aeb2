"""Errors of full and lost devices, and how a fleet of processes reacts.

The tests raise the errors themselves; no GPU is needed.
"""

import os

import faulty
import pytest
import ray
import torch
from refusals import refused
from tiny import make_setup
from trouble import IDS, configure

from actors.capacity import Placement
from actors.client import LOST_DEVICE_EXIT, data_room, fault_of, is_lost
from actors.fleet import RayFleet
from actors.shards import Shards
from raylt.core.device import is_full
from raylt.core.fleet.reductions import each
from raylt.core.fleet.wire import Fault
from raylt.errors import ConfigError
from raylt.methods.fedavg import FedAvg
from raylt.runs.folder.notes import NOTES

CPU = torch.device("cpu")
SOME_FULL = [
    "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "cuDNN error: CUDNN_STATUS_NOT_INITIALIZED",
    "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`",
]
SOME_LOST = [
    "CUDA error: an illegal memory access was encountered",
    "CUDA error: device-side assert triggered",
    "CUDA error: unspecified launch failure",
    "CUDA error: misaligned address",
    "CUDA error: uncorrectable ECC error encountered",
    "CUDA error: the remote procedural call between the MPS server and the MPS client failed",
]
NEITHER = [
    "CUDA error: no kernel image is available for execution on the device",
    "CUDA error: invalid argument",
    "mat1 and mat2 shapes cannot be multiplied (3x4 and 5x6)",
]


@pytest.mark.parametrize("text", SOME_FULL)
def test_every_form_of_a_full_device_is_recognised_and_costs_no_process(text):
    error = RuntimeError(text)
    assert is_full(error)
    assert not is_lost(error, CPU)
    fault = fault_of(error, CPU)
    assert fault.code == "device.full"
    assert fault.text.startswith(f"RuntimeError: {text[:10]}")
    unusable = ConfigError("resources.device: torch cannot use the GPU (auto).", code="device.unusable")
    unusable.__cause__ = error
    assert is_full(unusable)


def test_what_torch_calls_out_of_memory_keeps_its_line():
    fault = fault_of(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB."), CPU)
    assert fault == Fault("device.full", "OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB.")


@pytest.mark.parametrize("text", SOME_LOST)
def test_a_sticky_error_ends_the_process(text, monkeypatch, capfd):
    ends = []
    monkeypatch.setattr(os, "_exit", ends.append)
    fault_of(RuntimeError(text), CPU)
    assert ends == [LOST_DEVICE_EXIT]
    assert text in capfd.readouterr().err


@pytest.mark.parametrize("text", NEITHER)
def test_other_errors_are_reported_as_they_are(text, monkeypatch):
    monkeypatch.setattr(os, "_exit", lambda code: pytest.fail("it ended"))
    assert fault_of(RuntimeError(text), CPU) == Fault("client.failed", f"RuntimeError: {text}")
    assert not is_full(RuntimeError(text))


def test_a_gpu_that_no_longer_answers_is_lost_whatever_the_text_of_the_error(monkeypatch):
    def dead(device):
        raise RuntimeError("CUDA error: something new")

    gpu = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "synchronize", dead)
    assert is_lost(ValueError("no luck"), gpu)
    assert not is_lost(torch.OutOfMemoryError("CUDA out of memory"), gpu)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    assert not is_lost(ValueError("no luck"), gpu)


def test_half_of_a_share_is_for_data_and_a_cpu_has_no_bound(monkeypatch):
    class Context:
        def get_assigned_resources(self):
            return {"CPU": 1.0, "GPU": 0.25}

    class Properties:
        total_memory = 80.0

    monkeypatch.setattr(ray, "get_runtime_context", Context)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    assert data_room(torch.device("cuda")) == 10  # 0.5 of 0.25 of 80
    assert data_room(CPU) == float("inf")


# fleets on Ray


@pytest.fixture
def fleet_of(ray_session, tiny_task, tmp_path):
    made = []

    def make(actors, method=None, **federation):
        shards, test = Shards.put(tiny_task.shards), ray.put(tiny_task.test)
        setup = make_setup(configure(**federation), method or FedAvg())
        made.append(RayFleet(setup, tiny_task, shards, test, Placement(actors, 0.25, 0.0), tmp_path.name, tmp_path))
        made[-1].begin(1)
        return made[-1]

    yield make
    for fleet in made:
        fleet.close()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_process_whose_device_is_lost_is_replaced_and_the_call_made_again(fleet_of, tmp_path):
    fleet = fleet_of(2)
    before = {slot.process for slot in fleet.slots}
    replies = fleet.ask(faulty.break_device, IDS, {"folder": str(tmp_path), "victim": 2}, id=each)["id"]
    assert list(replies.values()) == IDS
    assert (fleet.round_stats.retried, fleet.round_stats.lost) == ([2], [])
    assert len(fleet.slots) == 2
    assert len({slot.process for slot in fleet.slots} - before) == 1


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_item_of_map_that_finds_the_device_full_halves_the_actors(fleet_of, tmp_path):
    fleet = fleet_of(4)
    items = [{"folder": str(tmp_path), "fit": 2, "x": torch.tensor([float(i)])} for i in range(5)]
    results = fleet.map(faulty.fill_item, items)
    assert [result["x"].item() for result in results] == [0, 1, 2, 3, 4]
    assert len(fleet.slots) == 2
    assert (
        (tmp_path / NOTES).read_text().rstrip().endswith("device out of memory; continuing with 2 of 4 client actors")
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_steps_inside_items_are_shown_while_they_run(fleet_of, tmp_path):
    fleet = fleet_of(2)
    shown = []
    fleet.on_items = shown.append
    assert [item["x"].item() for item in fleet.map(faulty.step_slowly, [{"x": torch.ones(1)}] * 3)] == [1, 1, 1]
    assert {(progress.stage, progress.total, progress.steps) for progress in shown} == {("step_slowly", 3, 5)}
    assert any(0 < progress.step < 5 for progress in shown)
    assert all(0 < progress.share <= 1 for progress in shown)
    assert not list(tmp_path.glob(".progress*"))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_device_that_is_full_as_actors_start_halves_them(fleet_of, tmp_path):
    fleet = fleet_of(4, faulty.Crowded(folder=str(tmp_path), fit=2))
    assert 1 <= len(fleet.slots) <= 2  # one actor if the actors that were given up had not ended yet
    note = (tmp_path / NOTES).read_text().splitlines()[0]
    assert note.startswith("device out of memory as client actors start (RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC")
    assert note.endswith("continuing with 2 of 4")
    assert list(fleet.ask(faulty.sleep, IDS, {"seconds": {}}, id=each)["id"].values()) == IDS


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_room_for_a_single_actor_is_one_line(fleet_of, tmp_path):
    with refused("device.full", ConfigError) as caught:
        fleet_of(1, faulty.Crowded(folder=str(tmp_path), fit=0))
    assert "cublasCreate" in caught.value.details["cause"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_clients_that_wait_in_a_process_give_way_before_processes_do(fleet_of, tmp_path):
    fleet = fleet_of(1)
    for message in ({"alone": False}, {"alone": True}):
        replies = fleet.ask(faulty.need_room, IDS, message, id=each)["id"]
        assert list(replies.values()) == IDS
    assert not (tmp_path / NOTES).exists()
    assert fleet.round_stats.retried == []
