import pytest
import torch
from refusals import refused
from torch import tensor
from torch.nn import functional as F

from raylt.errors import ConfigError
from raylt.methods.mupfl.bavd import BAVD, add_bavd, layers_of, memory, recall
from raylt.models import build_model

SHAPE = (3, 4, 5)


def activations(seed=0, batch=6) -> torch.Tensor:
    return torch.randn(batch, *SHAPE, generator=torch.Generator().manual_seed(seed)).relu()


def trained(layer: BAVD, losses, batches=None) -> BAVD:
    """Take training steps with these losses; return the layer."""
    layer.train()
    for step, loss in enumerate(losses):
        layer(activations(step) if batches is None else batches[step])
        layer.learn(tensor(float(loss)))
    return layer


@pytest.mark.parametrize("kind", ["chw", "hw", "bchw"])
def test_evaluation_and_the_first_step_change_nothing(kind):  # T-MUP-1
    layer, h = BAVD(SHAPE, kind), activations()
    assert torch.equal(layer(h), h)
    trained(layer, [1.0, 2.0])
    assert not torch.equal(layer(h), h)
    layer.eval()
    assert torch.equal(layer(h), h)


@pytest.mark.parametrize("threshold", ["channel", "whole"])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("kind", ["chw", "hw", "bchw"])
def test_map_is_that_of_equation_6_written_out(kind, sign, threshold):
    over = {"chw": (0,), "hw": (0, 1), "bchw": ()}[kind]
    losses, layer = [2.0, 1.5, 1.8, 0.4], BAVD(SHAPE, kind, sign, threshold)
    trained(layer, losses)
    bars = [
        activations(step).double().mean(over, keepdim=True) if over else activations(step).double() for step in range(4)
    ]
    expected = bars[0]
    for step in (1, 2, 3):
        expected = expected + sign * (losses[step] - losses[step - 1]) * bars[step]
    assert torch.allclose(layer.map.double(), expected, atol=1e-6)
    h = activations(9)
    low = torch.stack([torch.stack([slice.mean() for slice in sample]) for sample in expected])[..., None, None]
    # section 3.6: the threshold of each slice
    by_hand = h.double() * (expected >= (expected.mean() if threshold == "whole" else low))
    assert torch.allclose(layer(h).double(), by_hand)
    assert layer.normalised().shape == (layer.size,) == ((20,) if kind == "hw" else (60,))


@pytest.mark.parametrize("kind", ["chw", "hw", "bchw"])
def test_mask_does_not_change_under_an_increasing_affine_map(kind):  # T-MUP-2
    layer, h = trained(BAVD(SHAPE, kind), [1.0, 0.7]), activations(5)
    kept = layer(h)
    for scale, shift in [(3.0, 0.0), (0.1, -4.0), (1.0, 10.0)]:
        other = BAVD(SHAPE, kind)
        other.reset(layer.map * scale + shift, layer.loss)
        assert torch.equal(other(h), kept)


@pytest.mark.parametrize("sign", [1, -1])
def test_constant_loss_leaves_the_map_at_the_first_activations(sign):  # T-MUP-3
    layer = trained(BAVD(SHAPE, "chw", sign), [0.8] * 5)
    assert torch.equal(layer.map, activations(0).mean(0, keepdim=True))


@pytest.mark.parametrize(("sign", "factor"), [(1, 1 - 1.8), (-1, 1 + 1.8)])
def test_with_constant_activations_the_sum_telescopes(sign, factor):  # T-MUP-3, T-MUP-4
    # losses from 2.3 to 0.5: M = h (1 + sign (0.5 - 2.3)); the literal sign inverts it
    h = activations()
    layer = trained(BAVD(SHAPE, "chw", sign, "whole"), [2.3, 1.1, 1.4, 0.5], [h] * 4)
    mean = h.mean(0, keepdim=True)
    assert torch.allclose(layer.map, factor * mean, atol=1e-5)
    kept = layer(torch.ones_like(h))[0] > 0
    highest = mean[0] >= mean.mean()
    assert torch.equal(kept, highest if sign == -1 else ~highest)


@pytest.mark.parametrize("kind", ["chw", "hw", "bchw"])
def test_part_of_the_activations_is_kept_and_the_rest_gets_no_gradient(kind):  # T-MUP-5
    layer, h = trained(BAVD(SHAPE, kind), [1.0, 0.6, 0.9]), (activations(7) + 0.1).requires_grad_()
    out = layer(h)
    kept = out != 0
    assert 0 < kept.float().mean() < 1
    (gradient,) = torch.autograd.grad(out.square().sum(), h)
    assert torch.equal(gradient != 0, kept)


def test_batch_of_another_size_passes_where_the_map_is_over_samples():
    layer = trained(BAVD(SHAPE, "bchw"), [1.0, 0.5])
    before, fewer = layer.map.clone(), activations(3, batch=2)
    assert torch.equal(layer(fewer), fewer)
    layer.learn(tensor(9.0))
    assert torch.equal(layer.map, before)
    assert layer.loss == 0.5
    chw = trained(BAVD(SHAPE, "chw"), [1.0, 0.5])
    assert not torch.equal(chw(fewer), fewer)


def test_normalised_map_is_in_0_to_1_and_zero_where_all_are_equal():
    layer = BAVD(SHAPE, "chw")
    assert torch.equal(layer.normalised(), torch.zeros(60))
    trained(layer, [1.0, 0.2])
    m = layer.map.flatten()
    assert torch.allclose(layer.normalised(), (m - m.min()) / (m.max() - m.min()))
    layer.reset(torch.full((1, *SHAPE), 3.0), tensor(1.0))
    assert torch.equal(layer.normalised(), torch.zeros(60))
    of_samples = trained(BAVD(SHAPE, "bchw"), [1.0, 0.2])
    m = of_samples.map.mean(0).flatten()
    assert torch.allclose(of_samples.normalised(), (m - m.min()) / (m.max() - m.min()))


def test_layers_go_on_from_what_they_knew():
    straight = trained(BAVD(SHAPE), [2.0, 1.5, 1.0, 0.8])
    first = trained(BAVD(SHAPE), [2.0, 1.5])
    layers = [BAVD(SHAPE)]
    recall(layers, memory([first]))
    for step, loss in [(2, 1.0), (3, 0.8)]:
        layers[0](activations(step))
        layers[0].learn(tensor(loss))
    assert torch.equal(layers[0].map, straight.map)
    recall(layers, {})
    assert layers[0].map is None
    assert layers[0].loss is None


@pytest.mark.parametrize("kind", ["chw", "hw", "bchw"])
def test_what_is_dropped_stays_dropped_in_evaluation_where_that_is_asked_for(kind):
    layer, h = BAVD(SHAPE, kind, keeps=True), activations(9)
    assert torch.equal(layer.eval()(h), h)
    trained(layer, [1.0, 0.6, 0.9])
    kept = layer.map.mean(0, keepdim=True)  # bchw: the mean over the images of the batch
    expected = h * (kept >= kept.mean((2, 3), keepdim=True))
    assert not torch.equal(expected, h)
    assert torch.equal(layer.eval()(h), h)  # the layer keeps the map only after `keep`
    layer.keep()
    layer.reset()
    assert torch.equal(layer(h), expected)
    layer.keep()  # without a map nothing is dropped
    assert torch.equal(layer(h), h)
    assert layer.state_dict()["mask"].dtype == torch.bool


def test_map_is_kept_in_float32_under_autocast():
    layer, linear = BAVD((4, 1, 1)), torch.nn.Linear(4, 4)
    with torch.autocast("cpu", torch.bfloat16):
        h = linear(torch.ones(3, 4)).relu()[..., None, None]
        layer(h)
        layer.learn(h.mean())
        assert layer(h).dtype == torch.bfloat16
    assert layer.map.dtype == layer.loss.dtype == torch.float32


# BAVD as a part of models


@pytest.mark.parametrize(
    ("name", "shape", "last"),
    [
        ("resnet8", (32, 32, 3), (256, 8, 8)),
        ("resnet18", (32, 32, 3), (512, 4, 4)),
        ("cnn", (28, 28, 1), (64, 8, 8)),
        ("small", (8, 8, 1), (64, 4, 4)),
        ("resnet8_proj", (32, 32, 3), (256, 8, 8)),
    ],
)
def test_layer_is_put_behind_the_last_stage(name, shape, last):
    torch.manual_seed(0)
    plain = build_model(name, 10, shape)
    torch.manual_seed(0)
    model = build_model(name, 10, shape)
    add_bavd(model, shape, "last", "chw", -1, "channel", False)
    (layer,) = layers_of(model)
    assert layer.size == last[0] * last[1] * last[2]
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), plain.state_dict().values(), strict=True))
    x = torch.randn(4, shape[2], *shape[:2])
    model.train()
    value = F.cross_entropy(model(x), tensor([0, 1, 2, 3]))
    layer.learn(value)
    assert layer.map.shape == (1, *last)
    assert (layer.map >= 0).all()  # the layer follows an activation
    with torch.no_grad():
        assert torch.equal(model.eval()(x), _with_statistics_of(model, plain).eval()(x))


def _with_statistics_of(model, plain):
    plain.load_state_dict(model.state_dict())
    return plain


def test_layers_can_be_named_and_counted():
    for stages, shapes in [
        ("all", [(64, 32, 32), (128, 16, 16), (256, 8, 8)]),
        (("stage1",), [(64, 32, 32)]),
        (("stage1", "stage3"), [(64, 32, 32), (256, 8, 8)]),
    ]:
        model = build_model("resnet8", 10, (32, 32, 3))
        add_bavd(model, (32, 32, 3), stages, "hw", 1, "channel", False)
        assert [layer.size for layer in layers_of(model)] == [shape[1] * shape[2] for shape in shapes]
        assert model.training


@pytest.mark.parametrize("stages", [("stage9",), ("pool",), (), ("stage1", "stem")], ids=str)
def test_stage_that_is_not_there_is_refused_with_those_that_are(stages):
    layers = ["stage1", "stage2", "stage3"]
    with refused("model.lacks-layer", ConfigError, key="method.bavd_layers", value=stages, layers=layers):
        add_bavd(build_model("resnet8", 10, (32, 32, 3)), (32, 32, 3), stages, "chw", -1, "channel", False)


def test_activations_of_an_even_map_stay():
    """No value is below the mean where all are equal."""
    layer, h = BAVD((2, 3, 3)), torch.ones(4, 2, 3, 3)
    layer.reset(torch.ones(1, 2, 3, 3), torch.tensor(1.0))
    assert torch.equal(layer.train()(h), h)
