"""Last phases report their name, their cost and their progress, and train as their fields say.

So do the second trainings inside a round.
"""

import inspect
import re
import sys

import pytest
from small_runs import QUICK, make_tiny_run
from tiny import configure, make_setup

import raylt
from raylt.contract.case import Case
from raylt.methods import METHODS, make_method

WORK = {
    "ccvr": ({"virtual": 50, "retrain_epochs": 3}, r"calibration .* on {50} features in 3 epochs"),
    "bpfed": ({"retrain_epochs": 7}, r"stage 2 at every client in 7 epochs"),
    "fedsm": (
        {"teacher": "none", "retrain_rounds": 2, "size": 10, "retrain_epochs": 3},
        r"last 2 rounds, on up to {10} .* 3 epochs",
    ),
    "mupfl": ({"m": 5, "matching_steps": 4}, r"in every round: 4 steps on {5} features"),
}


def last_phase(task, **fields) -> str:
    spec = task.spec
    return make_method(fields).last_phase(spec, make_setup(configure()).new_model(spec))


@pytest.mark.parametrize("name", WORK)
def test_the_work_is_described_with_its_time(tiny_task, name):
    fields, pattern = WORK[name]
    expected = re.sub(r"{(\d+)}", lambda each: str(int(each[1]) * tiny_task.classes), pattern)
    text = last_phase(tiny_task, name=name, **fields)
    assert re.search(expected, text)
    assert re.search(r"about \d+ s on one core of this machine", text)


def test_methods_without_a_long_phase_say_nothing(tiny_task):
    assert last_phase(tiny_task, name="fedavg") == ""
    assert last_phase(tiny_task, name="fedsm", teacher="none", retrain_rounds=0) == ""
    assert last_phase(tiny_task, name="mupfl", pkcf=False) == ""
    assert last_phase(tiny_task, name="bpfed", crt=False, lws=False) == ""


@pytest.mark.parametrize(
    ("name", "field"), [("fedbabu", "tune_epochs"), ("fedetf", "turns"), ("fedrep", "head_epochs")]
)
def test_only_a_field_of_zero_leaves_the_last_phase_out(name, field):
    assert [METHODS[name](**{field: value}).finishes for value in (0, 1, 2)] == [False, True, True]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "stage", "steps"), [("ccvr", "calibration", 2), ("mupfl", "matching", 3)])
def test_steps_inside_a_stage_of_the_server_are_shown(tmp_path, name, stage, steps):
    events = []

    class Recorded(raylt.Callback):
        def on_progress(self, stage, done, total):
            events.append((stage, done, total))

    config = make_tiny_run(tmp_path, name, "federation.rounds=1", name="first").config
    raylt.run(config, out=tmp_path, name="second", fleet="local", quiet=True, callbacks=[Recorded()])
    shown = [event for event in events if event[0] == stage]
    assert shown[: steps + 1] == [(stage, 0, 0), *((stage, done, steps) for done in range(1, steps + 1))]


# momentum, weight decay and schedule of a second training: numbers, fields, or settings of local training
SECOND = {
    "bpfed": ("retrain_momentum", "retrain_weight_decay", "constant"),
    "ccvr": ("retrain_momentum", "retrain_weight_decay", "epoch"),
    "clip2fl": (0, 0, "constant"),
    "creff": (0, 0, "constant"),
    "fedsm": (0, 0, "constant"),
    "mupfl": ("local.momentum", "local.weight_decay", "constant"),
    "noisymeans": ("retrain_momentum", "retrain_weight_decay", "epoch"),
    "oracle": ("retrain_momentum", "retrain_weight_decay", "epoch"),
    "rucr": (0, 0, "constant"),
    "sfd": ("retrain_momentum", "retrain_weight_decay", "epoch"),
}


def modules_that_fit() -> dict[str, set[str]]:
    """Return the modules of methods that call `fit_classifier`, by the names of the methods."""
    found: dict[str, set[str]] = {"mupfl": {"raylt.methods.mupfl.pkcf"}}
    for name, kind in METHODS.items():
        for each in kind.__mro__:
            if each.__module__.startswith("raylt.methods") and "fit_classifier(" in inspect.getsource(each):
                found.setdefault(name, set()).add(each.__module__)
    return found


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", SECOND)
def test_a_second_training_has_its_own_momentum_decay_schedule_and_order(tmp_path, monkeypatch, name):
    """The settings of local training act in it only where a paper says so."""
    seen = []
    for module in modules_that_fit()[name]:
        fit = sys.modules[module].fit_classifier
        monkeypatch.setattr(
            sys.modules[module], "fit_classifier", lambda *args, fit=fit, **how: seen.append(how) or fit(*args, **how)
        )
    method = METHODS[name](**QUICK.get(name, {}))
    case = Case(method, "classification", tmp_path)
    local = {"momentum": 0.5, "weight_decay": 0.03}
    case.run(case.config(local=local))
    asked = {f"local.{key}": value for key, value in local.items()} | method.model_dump()
    momentum, decay, schedule = (asked.get(each, each) for each in SECOND[name])
    assert seen
    assert all((how["momentum"], how["weight_decay"]) == (momentum, decay) for how in seen)
    assert all(how.get("schedule", "epoch") == schedule for how in seen)
    assert len({how["seed"] for how in seen}) == len(seen)  # each client in each round has an order of its own


def test_the_list_has_every_method_with_a_second_training():
    assert SECOND.keys() == modules_that_fit().keys()
