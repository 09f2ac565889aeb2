"""`raylt plan`: what it says of training; and the exit code of `raylt doctor`.

tests/actors/test_capacity.py has the placements of plans, and tests/actors/test_doctor.py what the doctor finds.
"""

import json

import pytest

from raylt.config import DataConfig
from raylt.core.training import stacked_sgd
from raylt.data.task import build_task

SETTINGS = "method=fedavg", "data.source=digits", "data.clients=5", "data.alpha=0.1", "local.stacked=auto"


@pytest.fixture
def reasons(raylt, monkeypatch):
    """Return a function that plans a run and returns the reasons, as on a processor with AVX-512 or without."""

    def planned(*settings: str, avx512: bool = True) -> dict[str, str]:
        monkeypatch.setattr(stacked_sgd, "has_avx512", lambda: avx512)
        return json.loads(raylt("plan", *settings, "--format", "json").out)["reasons"]

    return planned


def test_a_plan_counts_the_clients_that_train_in_stacks(reasons):
    sizes = build_task(DataConfig(source="digits", clients=5, alpha=0.1)).sizes
    small = sum(size <= stacked_sgd.MAX_STACKED_SAMPLES for size in sizes)
    assert 0 < small < 5
    assert reasons(*SETTINGS)["stacks"] == f"{small} of 5 clients, those with at most 128 samples"
    assert "stacks" not in reasons(*SETTINGS[:-1])


def test_a_plan_says_why_no_client_trains_in_a_stack(reasons):
    assert reasons(*SETTINGS, "method=scaffold")["stacks"] == "no client, because method = scaffold is not stackable"
    assert reasons(*SETTINGS, avx512=False)["stacks"].startswith("no client, because the processor has no AVX-512")


def test_a_plan_for_other_machines_does_not_ask_this_processor(reasons):
    elsewhere = reasons(*SETTINGS, "--nodes", "1x8cpu", avx512=False)["stacks"]
    assert elsewhere.endswith("those with at most 128 samples, where processors have AVX-512")
    assert reasons(*SETTINGS, "--nodes", "1x2gpu8cpu")["stacks"] == "no client, because the clients' device is cuda"


@pytest.mark.parametrize("command", ["plan", "data"])
def test_settings_without_effect_are_named_before_a_run(raylt, command):
    ended = raylt(command, "method=fedavg", "data.partition=iid", "data.alpha=0.1", "data.download=true")
    assert ended.code == 0
    assert "data.alpha = 0.1 has no effect, because data.partition = iid does not use it" in ended.err
    assert "data.download = true has no effect, because data.source = digits does not use it" in ended.err


@pytest.mark.parametrize(("problems", "code"), [([], 0), (["ray is too old"], 1)])
def test_the_doctor_ends_with_1_if_there_are_problems(raylt, monkeypatch, problems, code):
    monkeypatch.setattr("actors.cluster.doctor.examine", lambda address: {"torch": "2", "problems": problems})
    for format in ("table", "json"):
        assert raylt("doctor", "--format", format).code == code
