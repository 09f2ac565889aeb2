import pytest
import torch
from torchvision.transforms.v2 import functional as tv

from raylt.data.colour_jitter import OPERATIONS, STRENGTHS, apply_jitter, color_jitter, draw_jitter

TORCHVISION = (tv.adjust_brightness, tv.adjust_contrast, tv.adjust_saturation, tv.adjust_hue)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def images(batch, channels=3):
    """Return random pixels, flat areas and grey areas, which hue and saturation treat as special cases."""
    x = torch.randint(0, 256, (batch, 16, 12, channels), dtype=torch.uint8, generator=seeded(9))
    x[:, :4] = x[:, :1, :1]
    x[:, 4:6] = x[:, 4:6, :, :1]
    x[:, 6:7], x[:, 7:8] = 0, 255
    return x


def planar(x):
    return x.permute(0, 3, 1, 2).contiguous()


def differences(ours, expected):
    return (ours.int() - expected.int()).abs()


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("channels", [1, 3])
def test_an_operation_is_torchvisions_on_each_image(number, channels):
    x = planar(images(40, channels))
    _, factors = draw_jitter(40, seeded(1))
    ours = OPERATIONS[number](x.float(), factors[:, number, None, None, None]).to(torch.uint8)
    each = zip(x, factors[:, number].tolist(), strict=True)
    off = differences(ours, torch.stack([TORCHVISION[number](image, factor) for image, factor in each]))
    assert off.max() <= 1  # a factor in float32 instead of float64 may change a rounding
    assert (off > 0).float().mean() < 1e-3


def test_images_take_their_operations_in_their_own_order():
    x = images(24)
    order, factors = draw_jitter(24, seeded(2))
    expected = []
    for image, numbers, strengths in zip(planar(x), order.tolist(), factors.tolist(), strict=True):
        for number in numbers:
            image = TORCHVISION[number](image, strengths[number])
        expected.append(image)
    off = differences(planar(apply_jitter(x, order, factors)), torch.stack(expected))
    assert (off > 3).float().mean() < 1e-3
    assert (off == 0).float().mean() > 0.99
    others = apply_jitter(x, order.flip(1), factors)
    assert (differences(planar(others), torch.stack(expected)) > 3).float().mean() > 0.05


def test_draws_have_the_distribution_of_torchvisions():
    assert STRENGTHS == (0.4, 0.4, 0.4, 0.1)  # of Howard's recipe; torchvision has no default
    order, factors = draw_jitter(24_000, seeded(3))
    counts = torch.unique(order, dim=0, return_counts=True)[1]
    assert len(counts) == 24
    assert counts.min() > 850  # 1000 expected, five standard deviations
    assert counts.max() < 1150
    for values, strength, middle in zip(factors.T, STRENGTHS, (1, 1, 1, 0), strict=True):
        assert (values - middle).abs().max() <= strength
        tenths = torch.histc(values, 10, middle - strength, middle + strength)
        assert (tenths - 2400).abs().max() < 250
    correlations = torch.corrcoef(torch.cat([order.T.float(), factors.T]))[4:]
    assert (correlations - torch.eye(8)[4:]).abs().max() < 0.04


def test_results_are_bytes_and_follow_from_the_generator():
    x, y = images(6), torch.arange(6)
    first, labels = color_jitter(x, y, seeded(4))
    again, _ = color_jitter(x.float() + 0.2, y, seeded(4))
    assert first.dtype == torch.uint8
    assert torch.equal(first, again)
    assert torch.equal(labels, y)
    assert not torch.equal(first, color_jitter(x, y, seeded(5))[0])
