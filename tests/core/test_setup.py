"""The values that make up an experiment."""

from dataclasses import replace

import pytest
import torch
from refusals import refused
from tiny import configure, make_setup

from raylt.core.setup import private_entries
from raylt.errors import ConfigError
from raylt.methods.fedavg import FedAvg
from raylt.models import MODELS


def test_models_are_made_on_one_thread_wherever_they_are_made(tiny_task):
    threads = []

    def factory(*arguments):
        threads.append(torch.get_num_threads())
        return MODELS["small"](*arguments)

    setup = replace(make_setup(configure()), model=factory)
    torch.set_num_threads(2)
    try:
        setup.new_model(tiny_task.spec)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
    assert threads == [1]


def test_texts_of_a_zero_shot_model_are_computed_on_one_thread(tiny_task, monkeypatch):
    threads = []
    monkeypatch.setattr("raylt.core.setup.start_from_texts", lambda *_: threads.append(torch.get_num_threads()))
    torch.set_num_threads(2)
    try:
        assert make_setup(configure(classifier="text")).zero_shot_model(tiny_task.spec) is not None
    finally:
        torch.set_num_threads(1)
    assert threads == [1]


@pytest.mark.parametrize(
    ("function", "returned"),
    [
        ("build", None),
        ("build", 1),
        ("shared", None),
        ("shared", ["encoder.weight"]),
        ("shared", {"nothing": torch.zeros(1)}),
    ],
)
def test_a_method_that_returns_no_model_or_no_entries_of_it_is_refused(function, returned, tiny_task):
    kind = type("Wrong", (FedAvg,), {function: lambda *_: returned})
    setup = replace(make_setup(configure()), method=kind())
    with refused("model.wrong-type", ConfigError, key="method", value="fedavg") as caught:
        private_entries(setup.method, setup.new_model(tiny_task.spec))
    assert f"{function} of fedavg returned" in str(caught.value)
