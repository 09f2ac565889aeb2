"""Images are augmented in local training alone, except where a method says otherwise.

Features for a classifier's second training, for statistics or for prototypes are of images as they are. Augmented ones
would change results without failing any other check.
"""

import inspect
import sys
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from small_runs import QUICK

from raylt.contract.case import Case
from raylt.contract.trace import finish
from raylt.data.augment import crop_flip
from raylt.data.samples import Samples
from raylt.methods import METHODS

TRAINING = {"sgd"}  # functions that train on augmented images
OTHERS = {  # client functions that train in loops of their own
    "fedafa": {"personalise"},
    "fedetf": {"personalise"},
    "apfl": {"train"},
    "pfedme": {"train"},
    "fedala": {"train"},
}
# methods that compute features, and those above; the other methods run with the slow tests
QUICKLY = [
    name
    for name, kind in METHODS.items()
    if name in OTHERS
    or any(
        "features(" in inspect.getsource(each) for each in kind.__mro__ if each.__module__.startswith("raylt.methods")
    )
]


class Augmented(Case):
    """A case whose training images are cropped and flipped."""

    def setup(self, config, method=None):
        return replace(super().setup(config, method), augment=crop_flip)


def names_of(frame: FrameType | None) -> set[str]:
    """Return the names of the functions that are being called."""
    names = set()
    while frame is not None:
        names.add(frame.f_code.co_name)
        frame = frame.f_back
    return names


def functions_that_augment(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, **fields: Any) -> set[str]:
    """Return the client functions in which images are augmented outside of local training."""
    method = METHODS[name](**QUICK.get(name, {}) | fields)
    case = Augmented(method, method.problems[0], folder)
    found: set[str] = set()
    batch = Samples.batch

    def watched(self, rows, augment=None, generator=None):
        if augment is not None:
            names = names_of(sys._getframe())
            if not names & TRAINING:
                found.update(names)
        return batch(self, rows, augment, generator)

    monkeypatch.setattr(Samples, "batch", watched)
    trace = finish(case.experiment(case.config()))
    return found & {function for report in trace.reports for function in report.traffic}


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICKLY else pytest.mark.slow) for name in METHODS]
)
def test_images_are_augmented_in_local_training_alone(name, tmp_path, monkeypatch):
    assert functions_that_augment(name, tmp_path, monkeypatch) == OTHERS.get(name, set())


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("sfd", {"classifier": "oracle"}),
        ("fedsm", {"encoders": "trained"}),
        ("fedsm", {"retrain": "after"}),
        ("mupfl", {"gradients": "global"}),
    ],
    ids=str,
)
def test_functions_that_fields_add_take_images_as_they_are(tmp_path, monkeypatch, name, fields):
    assert functions_that_augment(name, tmp_path, monkeypatch, **fields) == set()
