"""Last phases report their name, their cost and their progress."""

import re

import pytest
from small_runs import make_tiny_run
from tiny import configure, make_setup

import raylt
from raylt.methods import make_method

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
