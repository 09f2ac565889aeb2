import logging
import math
import re
from pathlib import Path

import pytest
import torch
import torchvision.models
from refusals import refused
from torch import nn
from torch.nn import functional as F
from torchvision.models import GoogLeNet, get_model, get_model_weights, list_models

from raylt.errors import ConfigError
from raylt.models import MODELS, SEGMENTERS, SplitModel, build_model, pretrained
from raylt.models.pretrained import for_channels
from raylt.models.resnet import BasicBlock
from raylt.models.torchvision_timm import (
    HALVES,
    IMAGENET_MEAN,
    IMAGENET_STD,
    Features,
    PreparedFeatures,
    _prepared,
    library_model,
)

CIFAR, FASHION = (32, 32, 3), (28, 28, 1)


@pytest.fixture(scope="module")
def grey_resnet50() -> SplitModel:
    return build_model("resnet50", 10, (32, 32, 1))


def parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize(
    ("name", "classes", "shape", "encoder", "total"),
    [
        ("resnet8", 10, CIFAR, 1_225_024, 1_227_594),
        ("resnet8", 100, CIFAR, 1_225_024, 1_250_724),
        ("resnet8_proj", 10, CIFAR, 1_356_608, 1_361_738),
        ("resnet8_proj", 100, CIFAR, 1_356_608, 1_407_908),
        ("resnet18", 10, CIFAR, 11_168_832, 11_173_962),
        ("resnet18", 100, CIFAR, 11_168_832, 11_220_132),
        # 3x3: 3 -> 16, ten 16 -> 16, 16 -> 32, nine 32 -> 32, 32 -> 64, nine 64 -> 64; 1x1: 16 -> 32, 32 -> 64; and two
        # numbers for each channel of a norm
        (
            "resnet32",
            10,
            CIFAR,
            9 * (48 + 10 * 256 + 512 + 9 * 1024 + 2048 + 9 * 4096)
            + 512
            + 2048
            + 2 * (16 + 10 * 16 + 10 * 32 + 10 * 64 + 32 + 64),
            466_906,
        ),
        ("resnet34", 10, CIFAR, 21_282_122 - 5130, 21_282_122),
        ("cnn", 10, FASHION, 52_096, 62_346),
        ("small", 10, (8, 8, 1), 288 + 64 + 18_432 + 128, 288 + 64 + 18_432 + 128 + 650),
    ],
)
def test_models_have_the_published_number_of_parameters(name, classes, shape, encoder, total):
    model = build_model(name, classes, shape)
    assert parameters(model.encoder) == encoder
    assert parameters(model) == total


def test_resnet50_has_the_parameters_of_torchvisions(grey_resnet50):
    # torchvision: 25,557,032 with Linear(2048, 1000); a grey stem has 2 * 64 * 49 fewer weights
    assert parameters(grey_resnet50.encoder) == 25_557_032 - 2_049_000 - 2 * 64 * 49


def test_resnet50_takes_a_grey_image(grey_resnet50):
    z = grey_resnet50.eval().encoder(torch.randn(1, 1, 32, 32))
    assert z.shape == (1, 2048)
    assert grey_resnet50.dim == 2048


def test_resnet50_proj_brings_2048_features_to_512():
    model = build_model("resnet50_proj", 1000, (32, 32, 3)).eval()
    assert parameters(model.encoder) == 25_557_032 - 2_049_000 + 2048 * 512 + 512
    assert parameters(model.classifier) == 513_000
    z = model.encoder(torch.randn(1, 3, 32, 32))
    assert z.shape == (1, 512)
    assert z.min() < 0


def test_cnn_proj_is_the_cnn_with_a_linear_layer_to_512():
    model, plain = build_model("cnn_proj", 10, (28, 28, 1)), build_model("cnn", 10, (28, 28, 1))
    assert parameters(model.encoder) == parameters(plain.encoder) + 1024 * 512 + 512
    z = model.encoder(torch.randn(1, 1, 28, 28))
    assert z.shape == (1, 512)
    assert z.min() < 0


@pytest.mark.parametrize(
    "name", [name for name in MODELS if not name.startswith("resnet50") and name not in SEGMENTERS]
)
@pytest.mark.parametrize("shape", [(16, 16, 1), (20, 24, 3)])
def test_forward_is_the_classifier_on_features_of_the_stated_size(name, shape):
    model = build_model(name, 7, shape).eval()
    x = torch.randn(2, shape[2], *shape[:2])
    z = model.encoder(x)
    assert z.shape == (2, model.dim)
    assert model.classes == 7
    assert torch.equal(model(x), model.classifier(z))
    assert model(x).shape == (2, 7)


def test_cnn_has_1024_features_at_28_pixels():
    assert build_model("cnn", 10, FASHION).dim == 1024


def test_resnet8_has_1344_batchnorm_channels_in_9_layers():
    # stem 64; blocks 2 * 64, 2 * 128, 2 * 256; shortcuts 128, 256
    norms = [m for m in build_model("resnet8", 10, CIFAR).modules() if isinstance(m, nn.BatchNorm2d)]
    assert len(norms) == 9
    assert sum(m.num_features for m in norms) == 1344


@pytest.mark.parametrize(
    ("name", "maps"),
    [
        ("resnet8", {"stem": (64, 32, 32), "stage1": (64, 32, 32), "stage2": (128, 16, 16), "stage3": (256, 8, 8)}),
        ("resnet18", {"stage1": (64, 32, 32), "stage2": (128, 16, 16), "stage3": (256, 8, 8), "stage4": (512, 4, 4)}),
    ],
)
def test_residual_stages_have_the_published_feature_maps(name, maps):
    encoder = build_model(name, 10, CIFAR).eval().encoder
    x, seen = torch.randn(1, 3, 32, 32), {}
    for stage, module in encoder.named_children():
        x = module(x)
        seen[stage] = tuple(x.shape[1:])
    assert maps.items() <= seen.items()


def test_features_are_not_negative_before_the_projection_and_signed_after_it():
    x = torch.randn(4, 3, 32, 32)
    assert build_model("resnet8", 10, CIFAR).eval().encoder(x).min() >= 0
    assert build_model("resnet8_proj", 10, CIFAR).eval().encoder(x).min() < 0


def test_convolutions_start_with_the_spread_of_creffs_code():
    for module in build_model("resnet18", 10, CIFAR).modules():
        if isinstance(module, nn.Conv2d):
            std = math.sqrt(2 / (module.kernel_size[0] ** 2 * module.out_channels))
            n = module.weight.numel()
            assert abs(module.weight.std().item() - std) < 5 * std / math.sqrt(2 * n)
            assert abs(module.weight.mean().item()) < 5 * std / math.sqrt(n)
        if isinstance(module, nn.BatchNorm2d):
            assert torch.equal(module.weight, torch.ones_like(module.weight))
            assert not module.bias.any()


def test_the_grey_stem_of_resnet50_starts_with_that_spread_too(grey_resnet50):
    weight = grey_resnet50.encoder.stem[0].weight
    std = math.sqrt(2 / (49 * 64))
    assert weight.shape == (64, 1, 7, 7)
    assert abs(weight.std().item() - std) < 5 * std / math.sqrt(2 * weight.numel())


def test_block_with_zero_branch_is_the_rectified_shortcut():
    block = BasicBlock(8, 8, stride=1).eval()
    nn.init.zeros_(block.bn2.weight)
    x = torch.randn(2, 8, 4, 4)
    assert torch.equal(block(x), x.relu())


def test_same_seed_gives_the_same_weights():
    torch.manual_seed(3)
    first = build_model("small", 10, CIFAR).state_dict()
    torch.manual_seed(3)
    second = build_model("small", 10, CIFAR).state_dict()
    assert all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize(("name", "side"), [("resnet8", 4), ("resnet18", 8), ("cnn", 16), ("small", 2)])
def test_smallest_image_works_and_one_pixel_less_is_refused(name, side):
    model = build_model(name, 3, (side, side, 3))
    assert model(torch.randn(2, 3, side, side)).isfinite().all()
    with refused("model.images-too-small", ConfigError, value=name, smallest=side):
        build_model(name, 3, (side - 1, side, 3))


def test_refusal_names_the_models_that_fit():
    fitting = ["resnet8", "resnet8_proj", "resnet18", "resnet32", "resnet34", "small"]
    with refused("model.images-too-small", ConfigError, value="cnn", fitting=fitting):
        build_model("cnn", 10, (8, 8, 1))


def old_file(architecture: str, path: Path) -> dict[str, torch.Tensor]:
    """Save random weights as torchvision's oldest files have them: without counts of batches, DenseNets' names."""
    theirs = get_model(architecture, weights=None)
    state = {name: value for name, value in theirs.state_dict().items() if not name.endswith("num_batches_tracked")}
    old = {re.sub(r"(denselayer\d+\.(?:norm|conv))([12]\.)", r"\1.\2", name): value for name, value in state.items()}
    torch.save(old, path)
    return state


@pytest.mark.parametrize("architecture", ["resnet18", pytest.param("densenet121", marks=pytest.mark.slow)])
def test_torchvisions_old_files_of_weights_are_taken(architecture, tmp_path):
    state = old_file(architecture, tmp_path / "old.pth")
    model = build_model(f"torchvision:{architecture}", 4, (64, 64, 3), weights=str(tmp_path / "old.pth"))
    loaded = model.encoder.state_dict()
    for name, value in state.items():
        if not name.startswith(("fc.", "classifier.")):
            assert torch.equal(loaded[f"body.{name}"], value), name


def test_a_model_of_timm_has_the_features_that_its_classifier_takes():
    """MobileNetV3 has a layer between its last feature map, 576 wide, and its classifier."""
    pytest.importorskip("timm")
    model = build_model("timm:mobilenetv3_small_100", 4, (64, 64, 3)).eval()
    assert model.dim == 1024
    assert model(torch.rand(2, 3, 64, 64)).shape == (2, 4)


@pytest.mark.parametrize(
    "arguments",
    ["patch_size=0", "img_size=-4", "embed_dim=5", "depth=x", "foo=1", "act_layer=foo", "mlp_ratio=-1"],
)
def test_arguments_that_a_model_of_timm_does_not_take_are_refused(arguments):
    """The libraries raise exceptions of many types for them."""
    pytest.importorskip("timm")
    name = f"timm:vit_tiny_patch16_224,{arguments}"
    with refused("config.conflict", ConfigError, key="model", value=name) as caught:
        build_model(name, 4, (224, 224, 3))
    assert arguments.partition("=")[0] in str(caught.value)


def test_arguments_that_fail_on_the_first_image_are_refused():
    pytest.importorskip("timm")
    name = "timm:resnet18,drop_rate=abc"
    with refused("model.wrong-input", ConfigError, key="model", value=name) as caught:
        build_model(name, 4, (32, 32, 3))
    assert "other arguments" in str(caught.value)


@pytest.mark.parametrize("argument", ["features_only=true", "checkpoint_path=/x", "scriptable=true", "num_classes=5"])
def test_arguments_of_timm_that_settings_decide_are_refused(argument):
    pytest.importorskip("timm")
    with refused("config.malformed", ConfigError, key="model", argument=argument):
        build_model(f"timm:resnet18,{argument}", 4, (32, 32, 3))


def test_an_unknown_model_of_timm_is_answered_with_the_name_that_is_most_like_it():
    pytest.importorskip("timm")
    with refused("config.unknown-name", ConfigError, key="model", value="timm:resnte18") as caught:
        build_model("timm:resnte18", 4, (32, 32, 3))
    assert "Did you mean timm:resnet18?" in str(caught.value)


def test_torchvisions_models_get_images_as_in_their_training():
    for name in list_models(module=torchvision.models):
        transforms = get_model_weights(name).DEFAULT.transforms()
        expected = (0.5, 0.5, 0.5) if name in ("googlenet", "inception_v3") else tuple(transforms.mean)
        assert (name in HALVES) == (expected == (0.5, 0.5, 0.5)), name
        assert name in HALVES or expected == IMAGENET_MEAN, name


@pytest.mark.parametrize(("name", "mean"), [("googlenet", 0.5), ("resnet18", IMAGENET_MEAN[0])])
def test_images_are_normalised_with_the_models_own_statistics(name, mean):
    prepared = library_model(f"torchvision:{name}", 3, (32, 32, 3), None, side=64).encoder
    assert isinstance(prepared, PreparedFeatures)
    assert prepared.mean[0].item() == pytest.approx(mean)


def test_googlenet_rescales_images_to_halves_itself():
    x = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    mean, std = (torch.tensor(values)[:, None, None] for values in (IMAGENET_MEAN, IMAGENET_STD))
    rescaled = GoogLeNet(transform_input=True, init_weights=False)._transform_input((x - mean) / std)
    assert torch.allclose(rescaled, (x - 0.5) / 0.5, atol=1e-6)


def test_weights_of_timm_that_cannot_be_fetched_are_one_error_and_no_warnings(monkeypatch, caplog):
    timm = pytest.importorskip("timm")

    def unreachable(*_, **__):
        logging.getLogger("huggingface_hub.utils._http").warning("Retrying in 8s")
        raise OSError("no route")

    monkeypatch.setattr(timm, "create_model", unreachable)
    with refused("model.weights-unavailable", ConfigError, key="weights", value="imagenet"):
        build_model("timm:resnet18", 4, (64, 64, 3), "imagenet")
    assert not caplog.records
    logging.getLogger("huggingface_hub.utils._http").warning("of somebody else")
    assert [record.message for record in caplog.records] == ["of somebody else"]


def test_weights_of_three_channels_fit_any_number_of_channels():
    weight = torch.randn(4, 3, 3, 3, generator=torch.Generator().manual_seed(0))
    x = torch.randn(2, 1, 9, 9, generator=torch.Generator().manual_seed(1))
    colour = F.conv2d(x.expand(-1, 3, -1, -1), weight)
    for channels in (1, 6):  # equal channels have the response of three equal colours
        response = F.conv2d(x.expand(-1, channels, -1, -1), for_channels(weight, channels))
        assert torch.allclose(response, colour, atol=1e-5)
    assert torch.equal(for_channels(weight, 4)[:, 3], 0.75 * weight[:, 0])  # the colours in turn


@pytest.mark.parametrize("channels", [1, 3, 5])
def test_images_of_other_channels_have_the_mean_statistics_of_the_colours(channels):
    prepared = _prepared(Features(nn.Identity()), 8, channels, None)
    assert (len(prepared.mean), len(prepared.std)) == (channels, channels)
    assert prepared.mean.mean().item() == pytest.approx(sum(IMAGENET_MEAN) / 3)
    assert prepared.std.mean().item() == pytest.approx(sum(IMAGENET_STD) / 3)
    assert channels == 3 or len(prepared.std.unique()) == 1


def test_counts_of_batches_come_from_the_file_where_it_has_them():
    body = nn.Sequential(nn.BatchNorm2d(2))
    given = {**nn.Sequential(nn.BatchNorm2d(2)).state_dict(), "0.num_batches_tracked": torch.tensor(7)}
    pretrained.load_body(body, given, [], "weights.pt", "it")
    assert body[0].num_batches_tracked == 7
    del given["0.num_batches_tracked"]
    pretrained.load_body(body, given, [], "weights.pt", "it")
    assert body[0].num_batches_tracked == 7


def test_images_for_a_model_of_timm_have_its_own_statistics():
    body = nn.Identity()
    body.pretrained_cfg = {"mean": (0.1, 0.2, 0.3), "std": (0.4, 0.5, 0.6)}
    prepared = _prepared(Features(body), 8, 3, None)
    assert prepared.mean.flatten().tolist() == pytest.approx([0.1, 0.2, 0.3])
    assert prepared.std.flatten().tolist() == pytest.approx([0.4, 0.5, 0.6])


@pytest.mark.parametrize(("trained_on", "channels"), [(3, 4), (4, 4), (1, 1), (3, 1)])
def test_a_first_layer_is_converted_only_from_three_channels(tmp_path, trained_on, channels):
    theirs = get_model("shufflenet_v2_x0_5", weights=None)
    theirs.conv1[0] = nn.Conv2d(trained_on, 24, 3, 2, 1, bias=False)
    torch.save(theirs.state_dict(), tmp_path / "w.pt")
    own = build_model("torchvision:shufflenet_v2_x0_5", 4, (64, 64, channels), weights=str(tmp_path / "w.pt"))
    weight = theirs.conv1[0].weight
    expected = weight if trained_on == channels else for_channels(weight, channels)
    assert torch.equal(own.encoder.body.conv1[0].weight, expected)


@pytest.mark.parametrize(("name", "trained_on", "channels"), [("test_efficientnet", 4, 4), ("fastvit_t8", 3, 1)])
def test_first_layers_of_timm_are_converted_only_from_three_channels(tmp_path, name, trained_on, channels):
    timm = pytest.importorskip("timm")
    theirs = timm.create_model(name, in_chans=trained_on)
    torch.save(theirs.state_dict(), tmp_path / "w.pt")
    own = build_model(f"timm:{name}", 4, (64, 64, channels), weights=str(tmp_path / "w.pt")).encoder.body
    layers = theirs.pretrained_cfg["first_conv"]
    for layer in [layers] if isinstance(layers, str) else layers:
        weight = theirs.get_parameter(f"{layer}.weight")
        expected = weight if trained_on == channels else for_channels(weight, channels)
        assert torch.equal(own.get_parameter(f"{layer}.weight"), expected)
