"""Models and methods that draw random numbers when they predict: the draws have seeds, so figures can be repeated."""

from typing import ClassVar

import pytest
import torch
from small_runs import make_tiny_run
from tiny import CPU

import raylt
from raylt.core.evaluation.counts import EvaluationSet
from raylt.core.fleet.cohort import Cohort
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


def test_random_predictions_are_repeated(begun, tmp_path):
    torch.manual_seed(1)  # a run does not depend on draws before it
    again = raylt.run(begun.config, out=tmp_path, name="again", fleet="local", quiet=True)
    assert figures_of(again) == figures_of(begun)


def test_the_noise_of_features_differs_from_batch_to_batch(tiny_task):
    model = noisy(tiny_task.classes, tiny_task.shape)
    torch.nn.init.zeros_(model.encoder[1].weight)  # only the noise differs from image to image
    features = []

    def predict(judged, x):
        features.append(judged.encoder(x))
        return judged(x)

    EvaluationSet(tiny_task.test, tiny_task.spec, CPU).counts(model, predict, 4)
    assert not torch.equal(features[0], features[1])


def test_a_client_predicts_the_same_whoever_was_evaluated_before(begun):
    """Another process evaluates other clients first, and the noise of their features does not depend on them."""
    experiment = begun.experiment()
    fleet, evaluator = experiment.fleet, experiment.evaluator
    alone = [evaluator._judge_clients(Cohort([id])).clients[id] for id in reversed(fleet.ids)]
    together = evaluator._judge_clients(fleet.everyone).clients
    assert all(torch.equal(together[id], counts) for id, counts in zip(reversed(fleet.ids), alone, strict=True))
