"""Networks of several clients computed as one: the same numbers as alone, and no number of another client."""

import pytest
import torch
from tiny import fingerprint, tiny_odd
from torch import nn
from torch.nn import functional as F

from raylt.core.training.stacked_sgd import has_avx512
from raylt.models import MODELS, SplitModel
from raylt.models.stacked import StackedModel, computes_as_alone, unstackable_layer
from raylt.models.trainable import limit


def with_own_settings(classes, shape):
    """Return a network whose layers have no default settings."""
    layers = [
        nn.Conv2d(shape[2], 16, 3, stride=2, padding=2, dilation=2),
        nn.BatchNorm2d(16, eps=0.1, momentum=0.5),
        nn.ReLU(),
        nn.GroupNorm(4, 16, eps=0.1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    ]
    return SplitModel(nn.Sequential(*layers), 16, classes)


NETWORKS = {
    "own settings": (with_own_settings, (8, 8, 3)),
    "odd": (tiny_odd, (7, 7, 3)),
    "small": (MODELS["small"], (8, 8, 1)),
    "cnn": (MODELS["cnn"], (28, 28, 1)),
    "resnet8": (MODELS["resnet8"], (8, 8, 3)),
}


@pytest.fixture(params=NETWORKS)
def network(request):
    """Return a network, and the shape of its batches of five images."""
    make, (height, width, channels) = NETWORKS[request.param]
    torch.manual_seed(0)
    model = make(3, (height, width, channels)).to(memory_format=torch.channels_last).train()
    return model, (5, channels, height, width)


def own(model, shape, clients):
    """Return entries and a batch for each client, all different."""
    draw = torch.Generator().manual_seed(1)
    entries, batches = [], []
    for _ in range(clients):
        entries.append(
            {
                name: value + 0.05 * torch.randn(value.shape, generator=draw).abs()
                if value.is_floating_point()
                else 1 * value
                for name, value in model.state_dict().items()
            }
        )
        batches.append(torch.randn(shape, generator=draw).contiguous(memory_format=torch.channels_last))
    return entries, batches


def stacked_step(model, entries, batches, start=0, slots=None):
    """Compute a step of several clients; return each client's logits, gradients and entries after the step."""
    clients = len(entries)
    stack = StackedModel(model, slots or clients)
    for number, values in enumerate(entries):
        stack.load(slice(start + number, start + number + 1), values)
    x = torch.stack([batch.permute(0, 2, 3, 1) for batch in batches], dim=3).flatten(3).permute(0, 3, 1, 2)
    params = stack.parameters(start, start + clients)
    _, logits = stack(start, start + clients, x)
    y = torch.arange(5) % 3
    loss = torch.stack([F.cross_entropy(of_client, y) for of_client in logits]).sum()
    gradients = torch.autograd.grad(loss, params)
    return [
        {
            "logits": logits[number].detach(),
            **{
                f"grad {name}": g.unflatten(0, (clients, -1))[number]
                for name, g in zip(stack.trained, gradients, strict=True)
            },
            **{name: value.clone() for name, value in stack.slot(start + number).items()},
        }
        for number in range(clients)
    ]


def alone_step(model, entries, batch):
    model.load_state_dict(entries)
    params = dict(model.named_parameters())
    logits = model(batch)
    gradients = torch.autograd.grad(F.cross_entropy(logits, torch.arange(5) % 3), list(params.values()))
    return {
        "logits": logits.detach(),
        **{f"grad {name}": gradient for name, gradient in zip(params, gradients, strict=True)},
        **{name: value.clone() for name, value in model.state_dict().items()},
    }


def test_clients_in_a_stack_compute_what_they_compute_alone(network):
    model, shape = network
    entries, batches = own(model, shape, 3)
    together = stacked_step(model, entries, batches)
    for values, batch, found in zip(entries, batches, together, strict=True):
        expected = alone_step(model, values, batch)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name].view(value.shape), value, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.skipif(not has_avx512(), reason="bits depend on the number of clients on this processor")
def test_the_bits_of_a_client_depend_neither_on_the_others_nor_on_their_number_nor_on_its_slot(network):
    model, shape = network
    entries, batches = own(model, shape, 7)
    together = stacked_step(model, entries, batches)
    for chosen in ([0, 1], [5, 2, 6], [6, 3, 1, 0, 2]):
        some = stacked_step(model, [entries[k] for k in chosen], [batches[k] for k in chosen], start=1, slots=8)
        for k, found in zip(chosen, some, strict=True):
            assert all(torch.equal(value, together[k][name]) for name, value in found.items())


def test_layers_at_unusual_places_are_noticed(network):
    model, shape = network
    assert computes_as_alone(model, (*shape[2:], shape[1]))
    before = fingerprint(dict(model.state_dict()))
    features = [nn.Flatten(), nn.Linear(256, 32)]
    for layers in ([*features, nn.GroupNorm(4, 32)], [nn.Linear(16, 16), *features]):
        unusual = SplitModel(nn.Sequential(*layers), 32, 3)
        assert unusual(torch.zeros(2, 1, 16, 16)).shape == (2, 3)
        assert unstackable_layer(unusual) is None
        assert not computes_as_alone(unusual, (16, 16, 1))
    assert computes_as_alone(SplitModel(nn.Sequential(*features), 32, 3), (16, 16, 1))
    assert fingerprint(dict(model.state_dict())) == before


def test_a_client_that_diverged_harms_no_other(network):
    model, shape = network
    entries, batches = own(model, shape, 5)
    together = stacked_step(model, entries, batches)
    for value in (torch.nan, torch.inf):
        broken = [*entries]
        broken[2] = {
            name: torch.full_like(each, value) if each.is_floating_point() else each for name, each in broken[2].items()
        }
        found = stacked_step(model, broken, batches)
        assert not all(torch.isfinite(each).all() for each in found[2].values())
        for k in (0, 1, 3, 4):
            assert all(torch.equal(each, together[k][name]) for name, each in found[k].items())


@pytest.mark.skipif(not has_avx512(), reason="a single client has the bits of a pair on this processor")
def test_a_single_client_has_other_bits_so_it_is_computed_in_a_pair():
    """Says why `ClientStack` has a pair; if this fails, a single client may be computed as it is."""
    model = MODELS["small"](3, (8, 8, 1)).to(memory_format=torch.channels_last).train()
    entries, batches = own(model, (5, 1, 8, 8), 2)
    (single,), pair = stacked_step(model, entries[:1], batches[:1]), stacked_step(model, entries, batches)
    assert not all(torch.equal(value, pair[0][name]) for name, value in single.items())


class Doubled(nn.Linear):
    def forward(self, input):
        return 2 * super().forward(input)


def with_layer(layer):
    return SplitModel(nn.Sequential(nn.Conv2d(1, 4, 3), layer, nn.AdaptiveAvgPool2d(2), nn.Flatten()), 16, 3)


def tied():
    model = with_layer(nn.Conv2d(4, 4, 1))
    model.encoder[1].weight = nn.Parameter(torch.zeros(4, 4, 1, 1))
    model.add_module("again", model.encoder[1])
    return model


def hooked():
    model = with_layer(nn.ReLU())
    model.encoder[1].register_forward_hook(lambda *_: None)
    return model


@pytest.mark.parametrize(
    ("model", "layer"),
    [
        (with_layer(nn.ReLU()), None),
        (with_layer(nn.GroupNorm(2, 4)), None),
        (with_layer(nn.BatchNorm2d(4)), "BatchNorm2d of 4 inputs, which is not a multiple of 16"),
        (SplitModel(nn.Flatten(), 9, 3), "Linear of 9 inputs, which is not a multiple of 16"),
        (with_layer(nn.Dropout(0.5)), "Dropout"),
        (with_layer(nn.Sigmoid()), "Sigmoid"),
        (with_layer(nn.Softmax2d()), "Softmax2d"),
        (with_layer(nn.BatchNorm2d(4, affine=False)), "BatchNorm2d"),
        (with_layer(nn.BatchNorm2d(4, momentum=None)), "BatchNorm2d"),
        (with_layer(nn.BatchNorm2d(4, track_running_stats=False)), "BatchNorm2d"),
        (with_layer(nn.GroupNorm(2, 4, affine=False)), "GroupNorm"),
        (with_layer(nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect")), "Conv2d"),
        (with_layer(nn.Sequential(nn.Flatten(2), nn.Unflatten(2, (6, 6)))), "Flatten"),
        (with_layer(Doubled(6, 6)), "Doubled"),
        (tied(), "SplitModel"),
        (hooked(), "ReLU"),
        (limit(MODELS["small"](3, (8, 8, 1)), "norm"), "Sequential"),
        (with_layer(nn.ReLU()).requires_grad_(False), "SplitModel"),
        (nn.Linear(3, 3), "Linear"),
    ],
    ids=str,
)
def test_layers_that_cannot_be_stacked_are_named(model, layer):
    assert unstackable_layer(model) == layer


def test_a_frozen_encoder_may_have_any_layers():
    model = with_layer(Doubled(6, 6))
    assert unstackable_layer(limit(model, "classifier")) is None
