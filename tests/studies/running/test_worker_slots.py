"""Slots for the runs of a study: one per GPU if GPUs may be used, otherwise one per core."""

import os

import pytest
import torch

from raylt.config import Config
from raylt.studies.running import worker_slots as slots_module
from raylt.studies.running.worker_slots import slot_count, worker_slots

CORES = len(os.sched_getaffinity(0))


def runs(*resources):
    return [Config.model_validate({"method": "fedavg", "resources": fields}) for fields in resources]


@pytest.fixture(autouse=True)
def three_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)


def test_a_run_per_gpu_that_sees_no_other():
    places = worker_slots(None, "local", runs(*[{}] * 5))
    assert [place.environment["CUDA_VISIBLE_DEVICES"] for place in places] == ["0", "1", "2"]


@pytest.mark.parametrize("given", ["2,3,5", "GPU-aa, GPU-bb ,GPU-cc"], ids=["numbers", "names"])
def test_a_run_gets_one_of_the_gpus_that_this_process_was_given(monkeypatch, given):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    places = worker_slots(4, "local", runs(*[{}] * 4))
    names = [name.strip() for name in given.split(",")]
    assert [place.environment["CUDA_VISIBLE_DEVICES"] for place in places] == [*names, names[0]]


@pytest.mark.parametrize("resources", [{"device": "cpu"}, {"gpus_per_client": 0.0}])
def test_a_run_per_core_where_none_may_use_a_gpu(resources):
    of_study = runs(*[resources] * (CORES + 2))
    assert slot_count(None, "local", of_study) == CORES
    places = worker_slots(None, "local", of_study)
    assert len(places) == CORES
    assert not any("CUDA_VISIBLE_DEVICES" in place.environment for place in places)


def test_one_run_that_may_use_a_gpu_is_enough_for_places_by_gpu():
    assert slot_count(None, "local", runs({"device": "cpu"}, {}, {"device": "cpu"}, {})) == 3


def test_what_is_asked_for_is_taken_and_no_place_is_left_empty():
    assert len(worker_slots(2, "local", runs({}, {}, {}))) == 2
    assert len(worker_slots(4, "local", runs({}))) == 1
    assert slot_count(None, "ray", runs({}, {})) == 1


@pytest.mark.parametrize(
    ("parallel", "expected"),
    [(3, [{0, 3, 6}, {1, 4, 7}, {2, 5}]), (8, [{core} for core in range(8)]), (9, [{core % 8} for core in range(9)])],
)
def test_runs_at_the_same_time_share_the_cores_among_them(monkeypatch, parallel, expected):
    monkeypatch.setattr(slots_module, "cores", lambda: list(range(8)))
    places = worker_slots(parallel, "local", runs(*[{"device": "cpu"}] * 9))
    assert [place.cores for place in places] == expected
    assert [place.environment["OMP_NUM_THREADS"] for place in places] == [str(len(cores)) for cores in expected]
