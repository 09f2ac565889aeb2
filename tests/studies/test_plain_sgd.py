"""The study of FedSM with plain SGD, which brings its own model."""

from pathlib import Path

import pytest
import torch
from torch import nn

import raylt
from raylt.models import MODELS
from raylt.registry import load_plugin
from raylt.studies.definition import read_definition

FOLDER = Path(raylt.__path__[0]).parent / "studies" / "plain_sgd"


@pytest.fixture(autouse=True)
def own_model(no_guests):
    load_plugin(FOLDER / "bn_proj.py")


def test_the_network_has_batchnorm_and_the_length_of_clips_texts():
    model = MODELS["bn_proj"](10, (32, 32, 3))
    assert model.encoder(torch.rand(2, 3, 32, 32)).shape == (2, 512)
    assert sum(isinstance(layer, nn.BatchNorm2d) for layer in model.modules()) == 3


def test_arms_differ_in_the_parts_of_fedsm_alone():
    runs = read_definition(FOLDER / "fedsm_plain_sgd.yaml").runs()
    assert len(runs) == 30
    assert {run.config.model for run in runs} == {"bn_proj"}
    assert {(run.config.local.lr, run.config.local.momentum) for run in runs} == {(0.1, 0.0)}
    parts = {run.arm: (run.config.method["teacher"] != "none", run.config.method["retrain_rounds"]) for run in runs}
    assert parts == {
        "neither": (False, 0),
        "distillation": (True, 0),
        "mixup": (False, 30),
        "both": (True, 30),
        "judged only": (True, 30),
    }
    assert {run.config.method.get("retrain") for run in runs if run.arm == "judged only"} == {"after"}
