"""Every field of every method changes a run; a field without an effect would be a false promise."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_runs import QUICK
from teachers import feature_arrays

from raylt.contract.case import Case, make_task
from raylt.contract.fields import others
from raylt.contract.trace import Trace, fingerprint, private_states
from raylt.core.method import Method
from raylt.errors import ConfigError, TooFewReplies
from raylt.hyper import Choice, range_of
from raylt.methods import METHODS, make_method

# other settings that a field needs to act on so few images
WITH: dict[tuple[str, str], dict[str, Any]] = {
    ("fedafa", "c"): {"accept": 0.0, "tune_epochs": 5, "steps": 10},
    ("fedafa", "tune_batch"): {"tune_epochs": 5},
    ("fedafa", "tune_momentum"): {"tune_epochs": 5},
    ("ratioloss", "clip"): {"rival": 1e-6},
    ("fedsm", "texts"): {"similarity": "l2"},
    ("mupfl", "dropout"): {"bavd": False},
    ("bpfed", "argmax"): {"restart": True, "retrain_epochs": 0},
}
# values outside of the searched range, for fields whose range hardly changes a run on so few images
VALUES: dict[tuple[str, str], Any] = {
    ("fedafa", "tune_batch"): 3,
    ("creff", "retrain_batch"): 4,
    ("fedsm", "retrain_batch"): 4,
    ("clip2fl", "retrain_batch"): 4,
    ("rucr", "retrain_batch"): 4,
    ("fedic", "distil_batch"): 2,
    ("fedrela", "after"): 0.0,
    ("ratioloss", "clip"): 1e-3,
    ("mupfl", "kappa_max"): 2,
    ("sfd", "m_min"): 100,
}
# names of the clients' own settings: a method's second training has a prefix, as in retrain_epochs
OF_LOCAL_TRAINING = {"rounds", "epochs", "batch", "lr", "momentum", "weight_decay", "schedule"}
# fields of FedSM that act only on a fine-tuned image tower
FINE_TUNING = "squares", "target", "margin", "teacher_lr", "teacher_trains"


@pytest.mark.parametrize("name", METHODS)
def test_no_field_has_the_name_of_a_setting_of_local_training(name):
    assert OF_LOCAL_TRAINING.isdisjoint(METHODS[name].model_fields)


NUMBERS = [
    (name, field, value)
    for name, method in METHODS.items()
    for field, info in method.model_fields.items()
    for kind, values in (("int", (2**53 + 1, -(2**63))), ("float", (1.1e30, -1e308)))
    if re.search(rf"\b{kind}\b", str(info.annotation))
    for value in values
]


@pytest.mark.parametrize(("name", "field", "value"), NUMBERS)
def test_no_number_is_so_large_that_a_run_ends_in_an_overflow(name, field, value):
    with pytest.raises(ConfigError) as caught:
        make_method({"name": name, field: value})
    assert caught.value.details["key"] == f"method.{field}"


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_every_field_changes_a_run(name, tmp_path, clip_folder):
    base = QUICK.get(name, {})
    if "teacher" in METHODS[name].model_fields:
        base = base | {"teacher": teacher_of_many_lengths(tmp_path / "teacher.npz"), "kd": 1.0}
        base |= {"contrast": 1.0} if name == "clip2fl" else {}
    fields = [field for field in METHODS[name].model_fields if field not in ("teacher", "preset")]
    tuned = {"teacher": f"local-dir:{clip_folder}", "finetune": True}
    inert = [
        field
        for field in fields
        if not acts(name, base | (tuned if name == "fedsm" and field in FINE_TUNING else {}), field, tmp_path)
    ]
    assert inert == []


# fields that change no judged model where the encoder learns nothing, as docs/pretrained.md says; statistics_area is
# refused there, and the only round of so short a run that is judged is a last one
INERT = {
    "sfd": {"tau", "beta1", "delta", "scl_self", "hidden", "projection", "statistics_area"},
    "rucr": {"weight", "tau", "retrain_rounds"},
    "clip2fl": {"kd", "temperature", "scale"},
    "fedala": {"scope"},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_fields_change_a_judged_model_with_a_frozen_encoder_except_those_in_the_guide(name, tmp_path):
    base = QUICK.get(name, {})
    if "teacher" in METHODS[name].model_fields:
        base = base | {"teacher": teacher_of_many_lengths(tmp_path / "teacher.npz"), "kd": 1.0}
        base |= {"contrast": 1.0} if name == "clip2fl" else {}
    fields = set(METHODS[name].model_fields) - {"teacher", "preset"}
    try:
        judged_with_a_frozen_encoder(METHODS[name](**base), tmp_path)
    except (ConfigError, TooFewReplies):  # methods that do not go with a frozen encoder, see test_encoding.py
        return
    inert = {field for field in fields if not acts(name, base, field, tmp_path, judged_with_a_frozen_encoder)}
    assert inert == INERT.get(name, set()) | (set(FINE_TUNING) if name == "fedsm" else set())


def judged_with_a_frozen_encoder(method: Method, folder: Path) -> tuple[Any, ...]:
    """Return what determines the evaluated models of a run: the global model, and the clients' private states."""
    trace = Case(method, method.problems[0], folder, "classifier").run()
    models = {part: bits for part, bits in trace.bits.items() if part != "server"}
    return models, [(report.accuracy, report.clients) for report in trace.reports]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, kind in METHODS.items() if kind.later])
def test_a_field_without_a_stage_acts_before_the_first_one(name, tmp_path, clip_folder):
    """A field that acts from a later stage on is in `later`: studies would else train for each of its values alone."""
    kind = METHODS[name]
    base = QUICK.get(name, {})
    if "teacher" in kind.model_fields:
        base = base | {"teacher": teacher_of_many_lengths(tmp_path / "teacher.npz"), "kd": 1.0}
    staged = {field for fields in kind.later.values() for field in fields}
    tuned = {"teacher": f"local-dir:{clip_folder}", "finetune": True}
    late = [
        field
        for field in kind.model_fields
        if field not in {"teacher", "preset", *staged}
        and not acts(
            name, base | (tuned if name == "fedsm" and field in FINE_TUNING else {}), field, tmp_path, before_the_stage
        )
    ]
    assert late == []


def teacher_of_many_lengths(file: Path) -> str:
    """Write a feature file with texts of both wordings, none of length 1; return the teacher's name."""
    arrays = feature_arrays(make_task())
    text = arrays["text"]
    arrays["text"] = np.arange(1, len(text) + 1, dtype=np.float32)[:, None] * (text + 0.5 * text[0])
    arrays["text_label"] = arrays["text"] + text[1]
    np.savez(file, **arrays)
    return f"npz:{file}"


@pytest.mark.parametrize("name", [name for name, kind in METHODS.items() if "preset" in kind.model_fields])
def test_a_preset_sets_other_fields(name):
    kind = METHODS[name]
    searched = range_of(kind.model_fields["preset"])
    assert isinstance(searched, Choice)
    without = [kind(preset=value).model_dump(exclude={"preset"}) for value in searched.values]
    assert all(one != other for place, one in enumerate(without) for other in without[:place])


def acts(
    name: str,
    base: dict[str, Any],
    field: str,
    folder: Path,
    bits_of: Callable[[Method, Path], tuple[Any, ...]] | None = None,
) -> bool:
    """Return whether another value of a field changes the run's models or figures.

    Args:
        bits_of: what is compared; by default models and figures of the whole run.
    """
    bits_of = bits_of or whole_run
    kind = METHODS[name]
    method = kind(**base | WITH.get((name, field), {}))
    values = [kind(**method.model_dump() | {field: VALUES[name, field]})] if (name, field) in VALUES else []
    own = bits_of(method, folder)
    for other in [*values, *others(method, field)]:
        try:
            if bits_of(other, folder) != own:
                return True
        except ConfigError:
            continue  # a value that is refused says nothing about the others
    return False


def before_the_stage(method: Method, folder: Path) -> tuple[Any, ...]:
    """Return the models, states and figures of a run before its first stage of `later`."""
    case = Case(method, method.problems[0], folder)
    config = case.config()
    rounds = config.federation.rounds
    step = min(method.stages(rounds).get(stage, rounds) for stage in method.later)
    experiment = case.experiment(config)
    reports = [experiment.step() for _ in range(step)]
    models = fingerprint(dict(experiment.server.model.state_dict()))
    states = fingerprint({str(id): state for id, state in private_states(experiment).items()})
    return models, states, [(report.clients, json.dumps(report.figures)) for report in reports]


def whole_run(method: Method, folder: Path) -> tuple[Any, ...]:
    trace: Trace = Case(method, method.problems[0], folder).run()
    return trace.bits, [(report.accuracy, report.clients, json.dumps(report.figures)) for report in trace.reports]
