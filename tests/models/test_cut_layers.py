from collections import OrderedDict

import pytest
import torch
from refusals import refused
from tiny import configure
from torch import nn

from raylt.errors import ConfigError
from raylt.methods.fedafa import FedAFA
from raylt.methods.flea import FLea
from raylt.models import SplitModel, build_model
from raylt.models.layers import check_cut, halves, layer_remedy
from raylt.models.trainable import FrozenEncoder


class Stages(nn.Sequential):
    """Encoder with arguments of its own, whose activation occurs twice."""

    def __init__(self, width: int):
        relu = nn.ReLU()
        super().__init__(
            OrderedDict(stage1=nn.Linear(3, width), act1=relu, stage2=nn.Linear(width, 2), act2=relu, stage3=nn.Tanh())
        )


class WithSkip(Stages):
    """The same layers around a connection that skips one of them."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) + input[:, :2]


@pytest.mark.parametrize("layer", ["stage1", "act1", "stage2", "act2"])
def test_halves_compute_what_the_encoder_computes(layer):
    model = SplitModel(Stages(4), 2, 5)
    check_cut("method.cut", layer, configure(), model)
    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    lower, upper = halves(model, layer)
    assert torch.equal(upper(lower(x)), model.encoder(x))
    assert [*lower, *upper] == list(model.encoder)


def test_encoder_that_computes_more_than_its_layers_is_not_cut(tiny_task):
    model = SplitModel(WithSkip(4), 2, 5)
    for method, key in ((FedAFA(cut="stage1"), "method.cut"), (FLea(layer="stage1"), "method.layer")):
        with refused("model.lacks-layer", ConfigError, key=key, value="stage1") as caught:
            method.prepare(tiny_task, configure(), model)
        assert "one after the other" in str(caught.value)
        assert "Use a built-in model" in str(caught.value)


def test_encoder_is_not_cut_after_its_last_layer():
    with refused("model.lacks-layer", ConfigError, value="pool", layers=["stage1", "stage2", "pool"]) as caught:
        check_cut("method.cut", "pool", configure(), build_model("small", 4, (8, 8, 1)))
    assert "stage1, stage2" in str(caught.value)


def test_a_frozen_encoder_of_a_library_has_no_layers_to_choose_from():
    body = nn.Sequential(OrderedDict(conv_stem=nn.Conv2d(3, 4, 1), blocks=nn.Flatten()))
    assert layer_remedy(FrozenEncoder(body), ["conv_stem"]) == "Use a built-in model, such as small or resnet8."
    assert layer_remedy(body, ["conv_stem"]) == "Give one of: conv_stem."
