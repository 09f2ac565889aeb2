"""Models made from other models share no more than they should; and the sign of features, told from last layers."""

import copy

import pytest
import torch
from refusals import refused
from torch import nn

from raylt.config import Config
from raylt.core.setup import Setup
from raylt.data.task import TaskSpec
from raylt.errors import ConfigError
from raylt.methods import METHODS
from raylt.models import build_model
from raylt.models.split import (
    SplitModel,
    clipped,
    has_no_negative_features,
    linear,
    load_entries,
    pass_zeros,
    running_statistics,
    with_classifier,
    with_encoder,
    with_entries,
)

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


@pytest.fixture
def model():
    return build_model("resnet8", 3, SHAPE).train()


def test_a_model_keeps_its_encoder_where_another_is_made_from_it(model):
    encoder = model.encoder
    other = with_encoder(model, nn.Identity())
    assert model.encoder is encoder
    assert type(other.encoder) is nn.Identity
    assert other.classifier is model.classifier


def test_entries_of_a_part_that_the_model_does_not_have_are_refused(model):
    assert model.entries("encoder.").keys() < model.entries().keys()
    with refused("model.lacks-layer", ConfigError, key="entries", value="encode"):
        model.entries("encode.")


def test_a_copy_with_entries_leaves_the_model_as_it_is(model):
    before = model.classifier.bias.clone()
    other = with_entries(model, {"classifier.bias": torch.full((3,), 7.0)})
    assert other.classifier.bias.tolist() == [7.0] * 3
    assert torch.equal(model.classifier.bias, before)


def test_entries_of_another_shape_are_not_stretched(model):
    with pytest.raises(ValueError, match=r"classifier.bias: shape \[1\], the model has \[3\]"):
        load_entries(model, {"classifier.bias": torch.ones(1)})


@pytest.mark.parametrize("training", [True, False])
def test_an_image_of_zeros_leaves_statistics_and_mode_as_they_were(model, training):
    model.train(training)
    before = copy.deepcopy(model.state_dict())
    pass_zeros(model, SHAPE)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert {module.training for module in model.modules()} == {training}


def test_statistics_of_a_client_stay_with_it_under_another_classifier(model):
    model.local_buffers = running_statistics(model)
    other = with_classifier(model, torch.zeros(3, model.dim), None)
    assert model.local_buffers
    assert other.local_buffers == model.local_buffers
    assert other.entries().keys() == {name for name in other.state_dict() if name not in model.local_buffers}


FIELDS = {"moon": {"projection": 5}, "mupfl": {"bavd": False, "dropout": 0}}  # MuPFL drops activations of stages


class Doubled(SplitModel):
    """A model of a user, with its own constructor, attribute, layer and forward pass."""

    def __init__(self, classes, factor):
        super().__init__(nn.Sequential(nn.Flatten(), nn.Linear(64, 12)), 12, classes)
        self.factor = factor
        self.heads = nn.Linear(classes, classes)

    def forward(self, x):
        return self.factor * self.heads(super().forward(x))


@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_method_keeps_the_forward_pass_of_a_users_model(name):
    method = METHODS[name](**FIELDS.get(name, {}))
    if method.learns_prompts:
        pytest.skip("it needs a text tower")
    task = TaskSpec(("a", "b", "c"), (8, 8, 1), (0.5,), (0.5,), ("many",) * 3)
    setup = Setup(Config(method=name), method, lambda classes, shape: Doubled(classes, -2.0), None)
    model = setup.new_model(task).eval()
    x = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(model(x), -2 * model.heads(model.classifier(model.encoder(x))))
    weight = torch.randn(3, model.dim, generator=torch.Generator().manual_seed(1))
    other = with_classifier(model, weight, None)
    assert torch.allclose(other(x), -2 * model.heads(model.encoder(x) @ weight.T), atol=1e-5)
    assert {part for part, _ in other.named_children()} == {"encoder", "classifier", "heads"}
    assert model.classifier is not other.classifier


def test_another_classifier_draws_no_random_number(model):
    before = torch.get_rng_state()
    with_classifier(model, torch.ones(3, model.dim), None)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_linear_layer_is_made_of_the_tensors_themselves():
    weight, bias = torch.randn(3, 4), torch.randn(3)
    layer = linear(weight, bias)
    assert (layer.weight.data_ptr(), layer.bias.data_ptr()) == (weight.data_ptr(), bias.data_ptr())
    assert linear(weight, None).bias is None


def test_longer_features_are_clipped_and_shorter_ones_stay():
    z = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]])
    assert torch.allclose(clipped(z, 1.0), torch.tensor([[0.6, 0.8], [0.3, 0.4], [0.0, 0.0]]))
    assert torch.allclose(clipped(z, torch.tensor(0.25)), torch.tensor([[0.15, 0.2], [0.15, 0.2], [0.0, 0.0]]))


def test_running_statistics_are_those_of_batch_norm_of_any_dimension():
    layers = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm2d(2), nn.BatchNorm3d(2), nn.GroupNorm(1, 2))
    buffers = ("running_mean", "running_var", "num_batches_tracked")
    assert running_statistics(layers) == {f"{number}.{name}" for number in range(3) for name in buffers}
