"""Methods that compute with the weight and bias of the classifier refuse a model with another classifier."""

import pytest
import torch
from refusals import refused
from rounds import run
from small_runs import QUICK
from tiny import configure, make_setup
from torch import nn

import raylt
from raylt.errors import ConfigError
from raylt.methods import METHODS
from raylt.models import SplitModel

LINEAR = ("bpfed", "ccvr", "fedloge", "fednpc", "fedrod", "noisymeans", "oracle", "posthoc", "rucr")
MODULES = {"mupfl": {"bavd": False}, "fedsm": {"teacher": "none", "retrain": "after"}}


class Scaled(nn.Linear):
    """Classifier of cosines, whose weight and bias alone do not give its logits."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(nn.functional.normalize(input, dim=1))


def no_bias(classes, shape):
    return with_own(classes, shape, nn.Linear(5, classes, bias=False))


def two_layers(classes, shape):
    return with_own(classes, shape, nn.Sequential(nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, classes)))


def scaled(classes, shape):
    return with_own(classes, shape, Scaled(5, classes))


def with_own(classes, shape, classifier):
    height, width, channels = shape
    model = SplitModel(nn.Sequential(nn.Flatten(), nn.Linear(height * width * channels, 5)), 5, classes)
    model.classifier = classifier
    return model


@pytest.fixture(autouse=True)
def models(no_guests):
    for model in (no_bias, two_layers, scaled):
        raylt.register(model, kind="model")


def prepare(task, method, model):
    config = configure(model=model)
    method.prepare(task, config, make_setup(config, method).new_model(task.spec))


@pytest.mark.parametrize("name", [*LINEAR, *MODULES])
@pytest.mark.parametrize("model", ["no_bias", "two_layers", "scaled"])
def test_another_classifier_is_refused_before_training(tiny_task, name, model):
    with refused("model.wrong-classifier", ConfigError, key="model", value=model, method=name) as caught:
        prepare(tiny_task, METHODS[name](**MODULES.get(name, {})), model)
    assert "linear classifier with a bias" in str(caught.value)


def test_ratioloss_refuses_it_too(tiny_task):
    with refused("model.wrong-classifier", ConfigError, key="model", value="two_layers"):
        prepare(tiny_task, METHODS["ratioloss"](), "two_layers")


def test_sfd_needs_no_bias(tiny_task):
    prepare(tiny_task, METHODS["sfd"](), "no_bias")
    for model in ("two_layers", "scaled"):
        with refused("model.wrong-classifier", ConfigError, key="model", value=model) as caught:
            prepare(tiny_task, METHODS["sfd"](), model)
        assert "with a bias" not in str(caught.value)


def test_modules_that_leave_the_classifier_alone_accept_it(tiny_task):
    prepare(tiny_task, METHODS["mupfl"](bavd=False, pkcf=False), "two_layers")
    prepare(tiny_task, METHODS["fedsm"](teacher="none"), "two_layers")
    prepare(tiny_task, METHODS["fedsm"](teacher="none", retrain="after", retrain_rounds=0), "two_layers")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["creff", "fedncm", "fed3r", "fednh", "fedetf", "fedproto"])
def test_methods_that_make_a_classifier_of_their_own_accept_any(tiny_task, tmp_path, name):
    run(tiny_task, tmp_path, METHODS[name](**QUICK.get(name, {})), rounds=1, model="two_layers")
