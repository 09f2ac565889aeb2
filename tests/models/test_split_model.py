"""The sign of an encoder's features, told from the encoder's last layers."""

import pytest
import torch
from torch import nn

from raylt.models import build_model
from raylt.models.split import has_no_negative_features

SHAPE = (16, 16, 3)


@pytest.mark.parametrize(
    ("name", "known"),
    [("small", True), ("cnn", True), ("resnet8", True), ("resnet18", True), ("resnet8_proj", False)],
)
def test_an_encoder_that_ends_in_a_relu_has_no_negative_features(name, known):
    encoder = build_model(name, 3, SHAPE).encoder.eval()
    assert has_no_negative_features(encoder) == known
    features = encoder(torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0)))
    assert bool((features >= 0).all()) == known


class Shifted(nn.ReLU):
    """A subclass of ReLU whose output can be negative."""

    def forward(self, input):
        return super().forward(input) - 1


@pytest.mark.parametrize(
    ("layers", "known"),
    [
        ([nn.Linear(2, 2), nn.ReLU(), nn.Flatten()], True),
        ([nn.ReLU(), nn.Linear(2, 2)], False),
        ([nn.ReLU(), nn.Sequential(nn.Dropout(), nn.Identity())], True),
        ([nn.ReLU(), nn.BatchNorm1d(2)], False),
        ([nn.Identity()], False),
        ([Shifted()], False),
        ([], False),
    ],
)
def test_only_layers_that_keep_signs_may_follow(layers, known):
    assert has_no_negative_features(nn.Sequential(*layers)) == known
