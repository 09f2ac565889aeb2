"""Models and methods that draw random numbers when they predict: the draws have seeds, so figures can be repeated."""

from typing import ClassVar

import pytest
import torch
from small_runs import make_tiny_run

import raylt
from raylt.methods.fedper import FedPer


class Noisy(torch.nn.Sequential):
    """An encoder that also draws noise in evaluation mode."""

    def forward(self, x):
        z = super().forward(x)
        return z + torch.randn_like(z)


def noisy(classes, shape):
    height, width, channels = shape
    encoder = Noisy(torch.nn.Flatten(), torch.nn.Linear(height * width * channels, 6))
    return raylt.SplitModel(encoder, 6, classes)


class NoisyPrediction(FedPer):
    name: ClassVar[str] = "noisy_prediction"

    def predict(self, model, x):
        return model(x + torch.randn_like(x))


@pytest.fixture
def begun(tmp_path):
    raylt.register(noisy, "noisy", kind="model")
    raylt.register(NoisyPrediction)
    return make_tiny_run(
        tmp_path, "noisy_prediction", "model=noisy", "evaluation.every=1", "evaluation.personal=1", name="first"
    )


def figures_of(run):
    return [(report["global_accuracy"], report["clients"], report["confusion"]) for report in run.reports]


def test_random_predictions_are_the_same_in_every_fleet(begun, tmp_path):
    for fleet in ("local", "processes"):
        torch.manual_seed(int(fleet == "local"))  # a run does not depend on draws before it
        again = raylt.run(begun.config, out=tmp_path, name=fleet, fleet=fleet, quiet=True)
        assert figures_of(again) == figures_of(begun)
