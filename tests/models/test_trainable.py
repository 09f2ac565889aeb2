"""Training of a part of a model: frozen entries are hidden, adapters merge, frozen BatchNorm does not change."""

import copy
from collections import OrderedDict

import pytest
import torch
from pydantic import ValidationError
from refusals import refused
from tiny import configure, make_setup, tiny_pretrained
from torch import nn
from torchvision.ops import StochasticDepth

from raylt.errors import ConfigError
from raylt.methods import METHODS
from raylt.models import SplitModel, build_model
from raylt.models.low_rank import LowRankAttention, LowRankConv, LowRankLinear
from raylt.models.trainable import (
    FrozenEncoder,
    blocks_of,
    frozen_entries,
    limit,
    whole_model,
)


def model(trainable: str) -> SplitModel:
    torch.manual_seed(0)
    return limit(tiny_pretrained(3, (6, 6, 1)), trainable)


X = torch.randn(7, 1, 6, 6, generator=torch.Generator().manual_seed(1))
CLASSIFIER = {"classifier.weight", "classifier.bias"}
LAST = {"encoder.last.weight", "encoder.last.bias"}
BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


def train(model: SplitModel, steps: int = 3) -> None:
    model.train()
    for _ in range(steps):
        loss = nn.functional.cross_entropy(model(X), torch.arange(7) % 3)
        learning = [value for value in model.parameters() if value.requires_grad]
        gradients = torch.autograd.grad(loss, learning)
        with torch.no_grad():
            for value, gradient in zip(learning, gradients, strict=True):
                value -= 0.5 * gradient


@pytest.mark.parametrize(
    ("trainable", "entries"),
    [
        ("classifier", CLASSIFIER),
        ("last:1", CLASSIFIER | LAST),
        (
            "norm",
            CLASSIFIER
            | {f"encoder.{at}.1.{name}" for at in ("stem", "narrow") for name in ("weight", "bias", *BUFFERS)},
        ),
        (
            "lora:2",
            CLASSIFIER | {f"encoder.{at}.{name}" for at in ("narrow.0", "last") for name in ("down", "up")},
        ),
    ],
)
def test_only_what_learns_is_an_entry(trainable, entries):
    limited = model(trainable)
    assert limited.state_dict().keys() == limited.entries().keys() == entries
    assert {name for name, value in limited.named_parameters() if value.requires_grad} == {
        name for name in entries if not name.endswith(BUFFERS)
    }
    assert copy.deepcopy(limited).state_dict().keys() == entries
    nested = nn.Sequential(OrderedDict(base=limited.encoder))
    assert nested.state_dict().keys() == {
        f"base.{name.removeprefix('encoder.')}" for name in entries if name.startswith("encoder.")
    }


@pytest.mark.parametrize("trainable", ["classifier", "last:1", "last:2", "norm", "lora:2"])
def test_what_is_frozen_does_not_change(trainable):
    limited = model(trainable)
    before = {name: value.clone() for name, value in frozen_entries(limited).items()}
    train(limited)
    limited.encoder.train()  # a method may call this
    limited.encoder(X)
    after = frozen_entries(limited)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_frozen_batchnorm_stays_in_evaluation_mode_and_learning_batchnorm_does_not():
    for trainable, frozen in [("classifier", True), ("lora:2", True), ("last:1", True), ("norm", False)]:
        limited = model(trainable)
        norms = [module for module in limited.modules() if isinstance(module, nn.BatchNorm2d)]
        train(limited)
        assert all((norm.num_batches_tracked == 0) == frozen for norm in norms)


def test_stochastic_depth_of_torchvision_drops_nothing_in_a_frozen_block():
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Flatten(), nn.Linear(36, 8), StochasticDepth(0.9, "row"), nn.Linear(8, 5))
    limited = limit(SplitModel(encoder, 5, 3), "last:1")
    expected = limited.eval()(X)
    limited.train()
    assert torch.equal(limited(X), expected)
    assert torch.equal(limited(X), expected)


def test_a_frozen_encoder_passes_features_on():
    limited = model("classifier")
    assert isinstance(limited.encoder, FrozenEncoder)
    z = limited.encoder(X)
    assert not z.requires_grad
    assert torch.equal(limited(X), limited(z))


def test_a_client_does_not_walk_through_a_frozen_encoder_and_does_not_copy_it():
    limited = model("classifier")
    encoder, copied = limited.encoder, copy.deepcopy(limited).encoder
    assert isinstance(encoder, FrozenEncoder)
    assert isinstance(copied, FrozenEncoder)
    assert copied is not encoder
    assert copied.body is encoder.body
    assert len(list(limited.modules())) == 3  # the model, its encoder and its classifier
    assert list(encoder.parameters()) == []
    limited.train()
    assert all(not module.training for module in encoder.body.modules())
    whole = whole_model(limited)
    assert whole.encoder is not encoder.body
    assert len(list(whole.modules())) > 3


@pytest.mark.parametrize("trainable", ["classifier", "last:1", "norm", "lora:2"])
def test_the_whole_model_is_a_plain_one_with_the_same_logits(trainable):
    limited = model(trainable)
    train(limited)
    whole = whole_model(limited)
    plain = tiny_pretrained(3, (6, 6, 1))
    plain.load_state_dict(whole.state_dict())
    assert whole.state_dict().keys() == plain.state_dict().keys()
    expected = limited.eval()(X)
    assert torch.equal(whole.eval()(X), expected)
    assert torch.equal(plain.eval()(X), expected)


def test_a_model_that_learns_as_a_whole_is_left_alone():
    limited = model("all")
    assert whole_model(limited) is limited
    assert not frozen_entries(limited)
    assert limited.state_dict().keys() == tiny_pretrained(3, (6, 6, 1)).state_dict().keys()


def test_adapters_start_at_zero_and_their_product_is_added():
    limited = model("lora:2").eval()
    plain = model("all").eval()
    assert torch.equal(limited.encoder(X), plain.encoder(X))
    layer = limited.encoder.get_submodule("last")
    assert isinstance(layer, LowRankLinear)
    assert layer.bias is not None
    with torch.no_grad():
        layer.up.fill_(0.5)
    z = torch.randn(3, 6)
    expected = z @ (layer.base + 0.5 * layer.down.sum(0)).T + layer.bias  # every row of up @ down is half the sum
    assert torch.allclose(layer(z), expected, atol=1e-6)
    layer.train()
    assert torch.allclose(layer(z), expected, atol=1e-6)


def test_adapters_start_as_a_linear_layer_of_torch_does():
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, 32))
    down = limit(SplitModel(encoder, 32, 3), "lora:8").encoder.get_submodule("1").down
    assert down.shape == (8, 64)
    assert 0.9 / 64**0.5 < down.abs().max() <= 1 / 64**0.5


def test_grouped_convolutions_have_no_adapter():
    torch.manual_seed(0)
    encoder = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.Conv2d(8, 8, 1, groups=4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)
    )
    plain = SplitModel(encoder, 5, 3)
    expected = plain(X)
    limited = limit(plain, "lora:1")
    assert [type(layer).__name__ for layer in limited.encoder][1::3] == ["Conv2d", "LowRankLinear"]
    assert torch.equal(limited(X), expected)
    assert torch.equal(limited.eval()(X), expected)


class Attention(nn.Module):
    """Multiplies by the weight of a layer that it never calls, as the attention of Swin and BEiT does."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(36, 36)

    def forward(self, x):
        return nn.functional.linear(x.flatten(1), self.qkv.weight, self.qkv.bias)


def test_adapters_act_where_a_module_multiplies_by_the_weight_of_a_layer():
    torch.manual_seed(0)
    adapted = limit(SplitModel(Attention(), 36, 3), "lora:2")
    before = {name: value.clone() for name, value in adapted.state_dict().items()}
    train(adapted)
    after = adapted.state_dict()
    assert after.keys() == before.keys()
    assert all(not torch.equal(after[name], before[name]) for name in ("encoder.qkv.up", "encoder.qkv.down"))
    adapted.eval()
    assert torch.allclose(whole_model(adapted)(X), adapted(X), atol=1e-6)


class Heads(nn.Module):
    """An encoder with torch's attention, which multiplies by its weights and never calls its output layer."""

    def __init__(self, **options):
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, **{"batch_first": True, **options})

    def forward(self, x):
        x = x.flatten(1, 2)
        return self.attention(x, x, x, need_weights=False)[0].mean(1)


@pytest.mark.parametrize(
    "options", [{}, {"bias": False}, {"add_bias_kv": True}, {"add_zero_attn": True}, {"batch_first": False}]
)
def test_attention_of_torch_has_adapters_that_act_and_merge(options):
    torch.manual_seed(0)
    encoder = Heads(**options)
    plain = copy.deepcopy(encoder).eval()
    adapted = limit(SplitModel(encoder, 6, 3), "lora:2").eval()
    assert adapted.entries().keys() == CLASSIFIER | {
        f"encoder.attention.{layer}{matrix}" for layer in ("", "out_proj.") for matrix in ("down", "up")
    }
    assert torch.equal(adapted.encoder(X), plain(X))
    layer = adapted.encoder.get_submodule("attention")
    assert isinstance(layer, LowRankAttention)
    train(adapted)
    adapted.eval()
    with torch.no_grad():
        plain.attention.in_proj_weight += layer.up @ layer.down
        plain.attention.out_proj.weight += layer.out_proj.up @ layer.out_proj.down
    assert layer.up.abs().min() > 0
    assert layer.out_proj.up.abs().min() > 0
    expected = plain(X)
    for value in (adapted.encoder(X), adapted.train().encoder(X), copy.deepcopy(adapted).encoder(X)):
        assert torch.allclose(value, expected, atol=1e-6)
    whole = whole_model(adapted.eval())
    assert torch.allclose(whole.encoder(X), expected, atol=1e-6)
    assert whole.encoder.state_dict().keys() == plain.state_dict().keys()
    assert type(whole.encoder.get_submodule("attention")) is nn.MultiheadAttention


def test_attention_with_separate_weights_has_an_adapter_at_its_output_alone():
    torch.manual_seed(0)
    encoder = nn.TransformerEncoderLayer(6, 2, 8, batch_first=True)
    encoder.self_attn = nn.MultiheadAttention(6, 2, kdim=6, vdim=3, batch_first=True)
    adapted = limit(SplitModel(encoder, 6, 3), "lora:1")
    assert {name for name in adapted.entries() if "self_attn" in name} == {
        "encoder.self_attn.out_proj.down",
        "encoder.self_attn.out_proj.up",
    }


class EvoNorm2dB0(nn.Module):
    """A norm that no class of torch is a base of, as in timm."""

    def __init__(self, size: int):
        super().__init__()
        self.weight, self.v = nn.Parameter(torch.ones(size)), nn.Parameter(torch.ones(size))


@pytest.mark.parametrize("norm", [nn.RMSNorm(5), nn.InstanceNorm2d(5, affine=True), EvoNorm2dB0(5)])
def test_norms_of_torch_and_timm_are_norms(norm):
    body = nn.Module()
    body.first, body.second, body.norm = nn.Linear(5, 5), nn.Linear(5, 5), norm
    wrapped = nn.Module()
    wrapped.body = body
    assert [[type(module) for module in block] for block in blocks_of(wrapped)] == [
        [nn.Linear],
        [nn.Linear, type(norm)],
    ]  # and the linear layers are none
    limited = limit(SplitModel(wrapped, 5, 3), "norm")
    names = {f"encoder.body.norm.{name}" for name, _ in norm.named_parameters()}
    assert limited.state_dict().keys() == CLASSIFIER | names


def test_blocks_are_counted_from_the_end_and_take_their_norm_with_them():
    body = nn.Module()
    body.stem = nn.Conv2d(1, 2, 3)
    body.bn = nn.BatchNorm2d(2)
    body.stages = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Linear(2, 2))
    wrapped = nn.Module()
    wrapped.body = body
    kinds = [[type(module).__name__ for module in block] for block in blocks_of(wrapped)]
    assert kinds == [["Conv2d", "BatchNorm2d"], ["Linear"], ["Linear"], ["Linear"]]


class Stage(nn.Module):
    """A stage as in ConvNeXt: a downsampling convolution, then blocks in a container."""

    def __init__(self):
        super().__init__()
        self.downsample = nn.Sequential(nn.LayerNorm(2), nn.Conv2d(2, 2, 2))
        self.blocks = nn.Sequential(Block(), Block())


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Linear(2, 2), nn.Linear(2, 2)


class NumberedStage(nn.Module):
    """A stage as in RegNet: blocks with a name and a number."""

    def __init__(self):
        super().__init__()
        self.b1, self.b2 = Block(), Block()


class Convolution(nn.Module):
    """A convolution with its normalisation, which is one layer."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2)


class DarkBlock(nn.Module):
    """A block as in DarkNet, which is no stage though its parts have a name and a number."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = Convolution(), Convolution()


class Listed(nn.Module):
    """A stage with nothing but a list, whatever its name."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([Block(), Block()])


class NormHead(nn.Module):
    """A head without its classifier, as timm leaves it."""

    def __init__(self):
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(2), nn.Identity()


def test_a_stage_is_not_one_block():
    encoder = nn.Sequential(nn.Conv2d(1, 2, 3), Stage(), NumberedStage(), Listed(), DarkBlock(), NormHead())
    kinds = [[type(module).__name__ for module in block] for block in blocks_of(encoder)]
    assert kinds == [["Conv2d"], ["Sequential"], *[["Block"]] * 6, ["DarkBlock", "NormHead"]]


@pytest.mark.parametrize(
    ("name", "blocks"),
    [
        ("mobilenet_v2", 19),
        ("resnet18", 9),
        ("mnasnet0_5", 20),
        ("shufflenet_v2_x0_5", 18),
        pytest.param("vit_b_16", 13, marks=pytest.mark.slow),
        pytest.param("densenet121", 62, marks=pytest.mark.slow),
    ],
)
def test_networks_of_torchvision_have_their_own_blocks(name, blocks):
    side = 224 if name.startswith("vit") else 32
    assert len(blocks_of(build_model(f"torchvision:{name}", 3, (side, side, 3)).encoder)) == blocks


@pytest.mark.parametrize("trainable", ["last:99", "norm", "lora:2"])
def test_parts_that_an_encoder_does_not_have_are_refused(trainable):
    plain = SplitModel(nn.Sequential(nn.Conv2d(1, 4, 3)), 4, 3)
    with refused("model.lacks-layer", key="trainable", value=trainable):
        limit(plain, trainable)


def test_ranks_above_the_widest_layers_are_refused():
    body = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Flatten(), nn.Linear(16, 6))
    with refused("model.lacks-layer", key="trainable", value="lora:7") as caught:
        limit(SplitModel(body, 6, 3), "lora:7")
    assert "Give at most lora:6, or all" in str(caught.value)
    assert limit(SplitModel(body, 6, 3), "lora:6").encoder.get_submodule("2").up.shape == (6, 6)


@pytest.mark.parametrize("value", ["", "encoder", "last", "last:0", "lora:-1", "lora:x", "last:1:2", "ALL"])
def test_other_words_are_refused(value):
    with pytest.raises(ValidationError):
        configure(trainable=value)


@pytest.mark.parametrize("method", ["flea", "fedafa", "mupfl"])
def test_a_method_that_acts_inside_the_encoder_asks_for_one_that_is_not_frozen(tiny_task, method):
    setup = make_setup(configure(trainable="classifier"), METHODS[method]())
    with refused("model.lacks-layer", ConfigError) as caught:
        setup.method.prepare(tiny_task, setup.config, setup.new_model(tiny_task.spec))
    assert "set trainable to norm, last:N or lora:R" in str(caught.value)


def test_frozen_dropout_draws_nothing_while_the_rest_learns():
    encoder = nn.Sequential(nn.Flatten(), nn.Linear(36, 64), nn.Dropout(0.5), nn.Linear(64, 8))
    limited = limit(SplitModel(encoder, 8, 3), "last:1").train()
    assert torch.equal(limited(X), limited(X))


class Tokens(nn.Module):
    """An encoder of a user's own with a transformer, whose attention has dropout, and dropout in functional form."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(6, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.5, batch_first=True)
        self.last = nn.Linear(8, 5)

    def forward(self, x):
        tokens = self.layer(self.embed(x[:, 0]))
        return self.last(nn.functional.dropout(tokens, 0.5, self.training).mean(1))


@pytest.mark.parametrize("trainable", ["norm", "last:1", "lora:2"])
def test_frozen_attention_and_functional_dropout_draw_nothing(trainable):
    limited = limit(SplitModel(Tokens(), 5, 3), trainable).train()
    assert torch.equal(limited(X), limited(X))


def test_frozen_recurrent_layers_drop_nothing_and_stay_in_training_mode():
    """The kernels of a GPU give no gradient through them in evaluation mode."""
    recurrent = nn.LSTM(6, 4, num_layers=2, dropout=0.5, batch_first=True)

    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.recurrent, self.last = nn.LayerNorm(6), recurrent, nn.Linear(4, 5)

        def forward(self, x):
            return self.last(self.recurrent(self.first(x[:, 0]))[0][:, -1])

    limited = limit(SplitModel(Recurrent(), 5, 3), "norm").train()
    assert torch.equal(limited(X), limited(X))
    assert recurrent.training


@pytest.mark.parametrize("normalised", [nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm])
@pytest.mark.parametrize("trainable", ["last:1", "lora:2"])
def test_buffers_of_frozen_layers_do_not_change(normalised, trainable):
    encoder = nn.Sequential(
        normalised(nn.Conv2d(1, 4, 3)), nn.InstanceNorm2d(4, track_running_stats=True), nn.Flatten(), nn.Linear(64, 8)
    )
    limited = limit(SplitModel(encoder, 8, 3), trainable)
    before = copy.deepcopy(frozen_entries(limited))
    train(limited)
    after = frozen_entries(limited)
    assert any("running_mean" in name for name in before)
    assert all(torch.equal(after[name], value) for name, value in before.items())


@pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last])
def test_a_merged_convolution_has_the_strides_of_its_weight(format):
    layer = nn.Conv2d(4, 8, 1)
    strides = (4, 1, 4, 4) if format is torch.channels_last else (4, 1, 1, 1)
    layer.weight = nn.Parameter(layer.weight.detach().as_strided((8, 4, 1, 1), strides))
    adapted = LowRankConv(layer, 2)
    assert adapted.merged().stride() == adapted.plain().weight.stride() == strides


def test_a_whole_model_keeps_the_stride_of_an_adapted_convolution():
    encoder = nn.Sequential(nn.Conv2d(1, 8, 1, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    adapted = limit(SplitModel(encoder, 8, 3), "lora:1").eval()
    nn.init.ones_(adapted.encoder[0].up)
    assert torch.allclose(whole_model(adapted)(X), adapted(X), atol=1e-6)


@pytest.mark.parametrize("bias", [True, False])
def test_an_adapted_convolution_computes_the_same_in_training_in_evaluation_and_merged(bias):
    torch.manual_seed(0)
    adapted, x = LowRankConv(nn.Conv2d(4, 8, 1, stride=2, bias=bias), 2), torch.randn(3, 4, 6, 6)
    nn.init.normal_(adapted.up)
    expected = adapted.plain()(x)
    assert torch.allclose(adapted.train()(x), expected, atol=1e-5)
    assert torch.allclose(adapted.eval()(x), expected, atol=1e-5)


def test_a_whole_model_can_be_trained_as_a_whole():
    whole = whole_model(model("last:1")).train()
    whole(X)
    assert all(module.training for module in whole.modules())


@pytest.mark.parametrize("trainable", ["classifier", "norm", "last:1", "lora:2"])
def test_what_is_frozen_and_what_travels_make_up_the_model(trainable):
    limited = model(trainable)
    frozen, travels = frozen_entries(limited), limited.state_dict()
    assert frozen
    assert not frozen.keys() & travels.keys()
    added = {name for name in travels if name.endswith((".up", ".down"))}
    names = {name.replace("encoder.body.", "encoder.") for name in [*frozen, *travels]} - added
    assert names == set(whole_model(limited).state_dict())
