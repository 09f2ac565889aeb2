"""Declarations of every method, and a second list of these declarations.

The framework believes a declaration: it decides which clients' models are evaluated, which settings are refused, and
which steps the runs of a study share. A wrong one changes no equation, so few other tests would fail. Change
declarations.yaml together with the algorithm that it describes.
"""

from pathlib import Path
from typing import Any

import pytest
import yaml
from rounds import run
from small_runs import QUICK
from tiny import fingerprint, private_states

from raylt.contract.fields import others
from raylt.methods import METHODS

DECLARED = yaml.safe_load(Path(__file__).with_name("declarations.yaml").read_text())
ROUNDS = 100
WORDS = ("personal", "finishes", "acts_on_encoder", "augments", "sees_images", "uploads_more", "stackable")


def declarations(name: str) -> dict[str, Any]:
    """Return the declarations of a method with its defaults, without those that it leaves to the base class."""
    method = METHODS[name]()
    found = {
        "says": [word for word in (*WORDS, "sums_samples", "learns_prompts") if getattr(method, word)],
        "problems": list(method.problems) if method.problems != ("classification",) else [],
        "group": method.group,
        "image_teacher": method.image_teacher,
        "trains_as": method.trains_as,
        "sees_each": list(method.sees_each),
        "terms": list(method.terms),
        "encoder_fields": list(method.encoder_fields),
        "later": {stage: list(fields) for stage, fields in method.later.items()},
        "stages": {stage: step for stage, step in method.stages(ROUNDS).items() if stage not in ("finish", "judging")},
    }
    return {key: value for key, value in found.items() if value}


@pytest.mark.parametrize("name", METHODS)
def test_declarations_are_those_of_the_list(name):
    assert declarations(name) == (DECLARED[name] or {})


@pytest.mark.parametrize(
    ("name", "fields", "word", "value"),
    [
        ("sfd", {"statistics_area": 0.9}, "augments", True),
        ("sfd", {"safs": False}, "finishes", False),
        ("sfd", {"classifier": "oracle"}, "sees_each", ("features",)),
        ("la", {"prior": "global"}, "uploads_more", True),
        ("feddecorr", {"beta": 0.0}, "acts_on_encoder", False),
        ("moon", {"mu": 0.0}, "acts_on_encoder", False),
        ("fedsm", {"teacher": "none"}, "sees_images", False),
        ("fedsm", {"teacher": "npz:features.npz"}, "sees_images", False),
        ("fedsm", {"kd": 0.0, "finetune": True}, "terms", ("cross_entropy", "hint")),
        ("clip2fl", {"kd": 0.0, "contrast": 0.0}, "sees_images", False),
        ("mupfl", {"last_update": True}, "finishes", True),
        ("mupfl", {"acmu": False}, "sees_each", ("gradients",)),
        ("bpfed", {"crt": False, "lws": False}, "finishes", False),
        ("fedbabu", {"tune_epochs": 0}, "finishes", False),
        ("fedetf", {"turns": 0}, "finishes", False),
        ("fedrep", {"head_epochs": 0}, "finishes", False),
    ],
    ids=str,
)
def test_fields_change_what_is_declared(name, fields, word, value):
    assert getattr(METHODS[name](**fields), word) == value
    assert getattr(METHODS[name](), word) != value


def test_the_list_has_every_method_and_no_other():
    assert DECLARED.keys() == METHODS.keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in METHODS if METHODS[name].encoder_fields])
def test_fields_of_the_encoder_change_nothing_if_it_is_frozen(tiny_task, tmp_path, name):
    method = METHODS[name](**QUICK.get(name, {}))
    plain = deployed(tiny_task, tmp_path, method)
    for field in method.encoder_fields:
        other = next(others(method, field))
        assert deployed(tiny_task, tmp_path, other) == plain, field


def deployed(task, folder, method):
    """Return the bits of the global model and of the classifiers that clients keep."""
    experiment = run(task, folder, method, rounds=2, trainable="classifier")
    own = {
        str(id): {name: value for name, value in state["model"].items() if name.startswith("personal.")}
        for id, state in private_states(experiment).items()
    }
    return fingerprint({"global": dict(method.global_model(experiment.server).state_dict()), "own": own})
