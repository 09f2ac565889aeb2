import pytest
import torch
from refusals import refused
from torch import nn
from torchvision.models import mobilenet_v3_small
from torchvision.models.segmentation.lraspp import _lraspp_mobilenetv3

from raylt.errors import ConfigError
from raylt.models import build_model
from raylt.models.segment import LRASPPEncoder
from raylt.models.split import PixelLinear, PixelModel, with_classifier

SHAPE = (40, 56, 3)


@pytest.fixture(scope="module")
def model() -> PixelModel:
    torch.manual_seed(0)
    made = build_model("lraspp", 12, SHAPE)
    with torch.no_grad():
        for _ in range(20):  # with the statistics of a new model, deep features vanish
            made.train()(torch.randn(4, 3, *SHAPE[:2]))
    return made.eval()


def test_it_has_the_parameters_of_torchvisions_but_for_one_of_two_biases(model):
    theirs = _lraspp_mobilenetv3(mobilenet_v3_small(weights=None, dilated=True), 12)
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in theirs.parameters()) - 12 == 1_076_556
    assert sum(p.numel() for p in model.classifier.parameters()) == 152 * 12 + 12


def test_its_logits_are_those_of_torchvisions_model_with_the_same_weights(model):
    theirs = _lraspp_mobilenetv3(mobilenet_v3_small(weights=None, dilated=True), 12).eval()
    blocks = nn.Sequential(*model.encoder.stage1, *model.encoder.stage2)
    theirs.backbone.load_state_dict(blocks.state_dict())
    theirs.classifier.cbr.load_state_dict(model.encoder.cbr.state_dict())
    theirs.classifier.scale.load_state_dict(model.encoder.scale.state_dict())
    with torch.no_grad():
        for conv, part in (
            (theirs.classifier.low_classifier, slice(24)),
            (theirs.classifier.high_classifier, slice(24, None)),
        ):
            conv.weight.copy_(model.classifier.weight[:, part, None, None])
            conv.bias.copy_(model.classifier.bias / 2)
        x = torch.randn(2, 3, *SHAPE[:2])
        expected = theirs(x)["out"]
        features = model.encoder(x)
    assert expected.std() > 0.01
    assert features[:, :24].std() > 0.01
    assert features[:, 24:].std() > 0.01
    assert torch.allclose(model(x), expected, atol=1e-5)


def test_its_classifier_acts_on_pixels_and_on_maps_alike(model):
    z = torch.randn(2, model.dim, 5, 7)
    maps = model.classifier(z)
    assert maps.shape == (2, 12, 5, 7)
    assert torch.allclose(model.classifier(z[:, :, 3, 4]), maps[:, :, 3, 4], atol=1e-6)
    conv = nn.functional.conv2d(z, model.classifier.weight[:, :, None, None], model.classifier.bias)
    assert torch.allclose(maps, conv, atol=1e-5)


def test_another_classifier_keeps_it_a_model_of_maps(model):
    other = with_classifier(model, torch.zeros(12, model.dim), torch.arange(12.0))
    assert isinstance(other.classifier, PixelLinear)
    assert torch.allclose(other(torch.randn(1, 3, 33, 47))[0, :, 5, 6], torch.arange(12.0))


def test_features_have_an_eighth_of_the_images_size_and_take_any_channels(model):
    assert model.encoder(torch.randn(1, 3, 40, 56)).shape == (1, 152, 5, 7)
    grey = build_model("lraspp", 3, (16, 16, 1)).eval()
    assert grey(torch.randn(2, 1, 16, 16)).shape == (2, 3, 16, 16)


def test_images_too_small_for_its_strides_are_refused_and_no_classifier_is_offered():
    with refused("model.images-too-small", ConfigError, value="lraspp", smallest=16, fitting=[]):
        build_model("lraspp", 3, (15, 20, 3))


def test_weights_of_torchvisions_file_become_the_encoders(tmp_path):
    theirs = mobilenet_v3_small(weights=None, dilated=True)
    torch.save(theirs.state_dict(), tmp_path / "it.pth")
    encoder = build_model("lraspp", 4, SHAPE, str(tmp_path / "it.pth")).encoder
    assert isinstance(encoder, LRASPPEncoder)
    assert torch.equal(encoder.stage1[0][0].weight, theirs.features[0][0].weight)
    assert torch.equal(encoder.stage2[-1][0].weight, theirs.features[12][0].weight)


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (None, "model.weights-unavailable"),
        (b"nonsense", "model.weights-mismatch"),
        ({"features.0.0.weight": torch.zeros(1)}, "model.weights-mismatch"),
    ],
)
def test_weights_that_cannot_be_used_are_refused(tmp_path, content, code):
    if isinstance(content, bytes):
        (tmp_path / "it.pth").write_bytes(content)
    elif content is not None:
        torch.save(content, tmp_path / "it.pth")
    with refused(code, ConfigError, key="weights", value=str(tmp_path / "it.pth")):
        build_model("lraspp", 4, SHAPE, str(tmp_path / "it.pth"))


def test_a_folder_of_weights_is_refused_with_one_remedy(tmp_path):
    with refused("model.weights-mismatch", ConfigError, key="weights", value=str(tmp_path)) as caught:
        build_model("lraspp", 4, SHAPE, str(tmp_path))
    assert str(caught.value).endswith("(drwx------)). Give a state dict of torchvision's mobilenet_v3_small.")
    assert "Remove" not in str(caught.value)


def test_imagenet_weights_that_cannot_be_fetched_name_the_way_out(monkeypatch):
    def unreachable(*_, **__):
        raise OSError("no route")

    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", unreachable)
    with refused("model.weights-unavailable", ConfigError, value="imagenet") as caught:
        build_model("lraspp", 4, SHAPE, "imagenet")
    assert "weights=PATH" in str(caught.value)


def test_weights_for_a_model_that_takes_none_are_refused():
    with refused("config.conflict", ConfigError, key="weights", model="small"):
        build_model("small", 4, (8, 8, 3), "imagenet")


def test_running_statistics_of_the_backbone_follow_in_tens_of_steps():
    """torchvision's backbone has a momentum of 0.01 for runs of many steps; a client has few."""
    encoder = build_model("lraspp", 3, (32, 32, 3)).encoder
    assert {layer.momentum for layer in encoder.modules() if isinstance(layer, nn.BatchNorm2d)} == {0.1}
