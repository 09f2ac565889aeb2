"""`rand_augment` on batches: the draws, strengths and pixels of torchvision's RandAugment on single images."""

import pytest
import torch
from torchvision.transforms import v2

from raylt.data.rand_augment import OPERATIONS, SIGNED, TAKEN, apply_operations, draw_operations, rand_augment

CODES = [2 * number + sign for number, name in enumerate(OPERATIONS) for sign in ((0, 1) if name in SIGNED else (0,))]
every_code = pytest.mark.parametrize("code", CODES, ids=lambda code: f"{'+-'[code % 2]}{OPERATIONS[code // 2]}")
every_shape = pytest.mark.parametrize(
    "shape", [(32, 32, 3), (28, 28, 1), (7, 9, 3), (12, 5, 1), (1, 3, 3), (65, 300, 3)], ids=str
)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def images(batch, height, width, channels):
    """Return images of random pixels, one of a single colour, and one of a narrow range of values."""
    x = torch.randint(0, 256, (batch, height, width, channels), dtype=torch.uint8, generator=seeded(9))
    x[0] = x[0, 0, 0]
    x[1] = x[1] // 4 + 90
    return x


def torchvisions(image, code):
    """Apply one operation to one image [H, W, channels], as `v2.RandAugment` does."""
    policy = v2.RandAugment()
    name = OPERATIONS[code // 2]
    magnitudes, _ = policy._AUGMENTATION_SPACE[name]
    values = magnitudes(policy.num_magnitude_bins, *image.shape[:2])
    strength = 0.0 if values is None else float(values[policy.magnitude]) * (-1 if code % 2 else 1)
    planar = image.permute(2, 0, 1).contiguous()
    return policy._apply_image_or_video_transform(planar, name, strength, policy.interpolation, {}).permute(1, 2, 0)


def test_the_operations_are_torchvisions():
    space = v2.RandAugment._AUGMENTATION_SPACE
    assert list(space) == list(OPERATIONS)
    assert [name for name, (_, is_signed) in space.items() if is_signed] == list(SIGNED)
    assert v2.RandAugment().num_ops == TAKEN


@every_shape
@every_code
def test_an_operation_is_torchvisions_on_each_image(shape, code):
    x = images(6, *shape)
    found = apply_operations(x, torch.full((6, 1), code))
    assert torch.equal(found, torch.stack([torchvisions(image, code) for image in x]))


@every_shape
def test_each_image_takes_its_operations_in_its_order(shape):
    x, codes = images(40, *shape), draw_operations(40, seeded(2))
    expected = []
    for image, of_image in zip(x, codes.tolist(), strict=True):
        for code in of_image:
            image = torchvisions(image, code)
        expected.append(image)
    assert torch.equal(apply_operations(x, codes), torch.stack(expected))
    if shape[0] > 1:
        assert not torch.equal(apply_operations(x, codes.flip(1)), torch.stack(expected))


@pytest.mark.parametrize("shape", [(32, 32, 3), (28, 28, 1), (224, 224, 3)], ids=str)
def test_draws_and_pixels_are_those_of_torchvisions_transform_on_one_image_after_the_other(shape):
    x = images(40, *shape)
    found, _ = rand_augment(x, torch.arange(40), seeded(2))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(torch.randint(2**62, (), generator=seeded(2))))
        transform = v2.RandAugment()
        expected = [transform(image).permute(1, 2, 0) for image in x.permute(0, 3, 1, 2)]
    assert torch.equal(found, torch.stack(expected))


def test_draws_are_uniform_and_half_of_the_strengths_are_negative():
    n = 8_000
    codes = draw_operations(n, seeded(3))
    numbers, negative = codes // 2, codes % 2 == 1
    pairs = torch.bincount(numbers[:, 0] * 14 + numbers[:, 1], minlength=196)
    assert ((pairs - n / 196) ** 2 / (n / 196)).sum() < 268  # chi-square, 195 degrees: p = 0.0004
    is_signed = torch.tensor([name in SIGNED for name in OPERATIONS])[numbers]
    assert not negative[~is_signed].any()
    share = negative[is_signed].float().mean()
    assert abs(share - 0.5) < 4 * 0.5 / is_signed.sum().sqrt()


def test_an_image_does_not_depend_on_the_others_of_its_batch():
    x, codes = images(40, 32, 32, 3), draw_operations(40, seeded(4))
    whole = apply_operations(x, codes)
    for rows in ([7], [3, 2], list(range(39, 20, -1))):
        assert torch.equal(apply_operations(x[rows], codes[rows]), whole[rows])


def test_results_are_bytes_in_memory_of_their_own():
    x, y = images(6, 8, 12, 3), torch.arange(6)
    before = x.clone()
    found, labels = rand_augment(x, y, seeded(5))
    assert found.dtype == torch.uint8
    assert found.is_contiguous()
    assert torch.equal(x, before)
    assert labels is y
    assert torch.equal(rand_augment(x.float() + 0.2, y, seeded(5))[0], found)
    assert torch.equal(rand_augment(x.float() - 0.2, y, seeded(5))[0], found)
    assert not torch.equal(rand_augment(x, y, seeded(6))[0], found)


def test_an_empty_batch_stays_empty():
    found, _ = rand_augment(images(4, 8, 12, 3)[:0], torch.arange(0), seeded())
    assert (found.shape, found.dtype) == ((0, 8, 12, 3), torch.uint8)
