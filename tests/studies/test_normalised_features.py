"""The study of SFD with normalised features, which brings its own models."""

from pathlib import Path

import pytest
import torch

import raylt
from raylt.models import MODELS
from raylt.registry import load_plugin
from raylt.studies.definition import read_definition

FOLDER = Path(raylt.__path__[0]).parent / "studies" / "normalised"


@pytest.fixture(autouse=True)
def own_models(no_guests):
    load_plugin(FOLDER / "small_normalised.py")


@pytest.mark.parametrize(("name", "length"), [("small_unit", 1), ("small_sphere", 8)])
def test_features_have_one_length(name, length):
    model = MODELS[name](10, (8, 8, 1))
    z = model.encoder(torch.rand(5, 1, 8, 8, generator=torch.Generator().manual_seed(0)))
    assert z.shape == (5, 64)
    assert torch.allclose(z.norm(dim=1), torch.full((5,), float(length)))


def test_each_arm_trains_the_network_of_its_name():
    runs = read_definition(FOLDER / "sfd_normalised.yaml").runs()
    assert len(runs) == 48
    assert all(run.config.model == f"small_{run.arm.split()[0]}" for run in runs)
