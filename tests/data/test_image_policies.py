"""Policies on batches: the draws, strengths and pixels of torchvision's policies on single images."""

import pytest
import torch
from torchvision.transforms import v2

from raylt.data.image_policies import (
    COARSE,
    NARROW,
    OPERATIONS,
    SIGNED,
    TABLES,
    TAKEN,
    WIDE,
    Operation,
    apply_operations,
    auto_augment,
    rand_augment,
    strengths_of,
    trivial_augment,
)

POLICIES = {
    rand_augment: v2.RandAugment(),
    trivial_augment: v2.TrivialAugmentWide(),
    auto_augment: v2.AutoAugment(v2.AutoAugmentPolicy.CIFAR10),
}
STRENGTHS = {rand_augment: NARROW, trivial_augment: WIDE, auto_augment: COARSE}
every_policy = pytest.mark.parametrize(
    "policy", POLICIES, ids=lambda policy: policy.draw.__name__.removeprefix("draw_")
)
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


def torchvisions(image, operation):
    """Apply one operation to one image [H, W, channels], as torchvision's policies do."""
    transform = POLICIES[rand_augment]
    planar = image.permute(2, 0, 1).contiguous()
    name, strength = operation
    made = transform._apply_image_or_video_transform(planar, name, strength, transform.interpolation, {})
    return made.permute(1, 2, 0)


@every_policy
@every_shape
def test_the_operations_and_strengths_are_torchvisions(policy, shape):
    space = POLICIES[policy]._AUGMENTATION_SPACE
    assert [name for name, (_, is_signed) in space.items() if is_signed] == list(SIGNED)
    assert list(space) == list(OPERATIONS) or policy is auto_augment
    strengths = STRENGTHS[policy]
    for name, (magnitudes, _) in space.items():
        expected = magnitudes(strengths.bins, *shape[:2])
        assert strengths_of(strengths, name, *shape[:2]) == (None if expected is None else expected.tolist())


def test_the_numbers_of_operations_and_bins_are_torchvisions():
    assert (POLICIES[rand_augment].num_ops, POLICIES[rand_augment].num_magnitude_bins) == (TAKEN, NARROW.bins)
    assert POLICIES[trivial_augment].num_magnitude_bins == WIDE.bins
    assert 2 * 5 * WIDE.bins <= TABLES  # each of TrivialAugment's moves keeps its table


@every_shape
@pytest.mark.parametrize("name", [*OPERATIONS, "Invert"])
def test_an_operation_is_torchvisions_on_each_image(shape, name):
    x = images(6, *shape)
    strengths = strengths_of(NARROW, name, *shape[:2]) or [0.0]
    signs = (1, -1) if name in SIGNED else (1,)
    for strength in sorted({strengths[0], strengths[len(strengths) // 3], strengths[-1]}):
        for sign in signs:
            operation = Operation(name, sign * strength)
            found = apply_operations(x, [[operation]] * 6)
            assert torch.equal(found, torch.stack([torchvisions(image, operation) for image in x])), operation


@every_policy
@every_shape
def test_each_image_takes_its_operations_in_its_order(policy, shape):
    x = images(40, *shape)
    drawn = policy.draw_batch(x, seeded(2))
    expected = []
    for image, operations in zip(x, drawn, strict=True):
        for operation in operations:
            image = torchvisions(image, operation)
        expected.append(image)
    assert torch.equal(apply_operations(x, drawn), torch.stack(expected))
    if shape[0] > 1 and policy is not trivial_augment:
        backwards = [operations[::-1] for operations in drawn]
        assert not torch.equal(apply_operations(x, backwards), torch.stack(expected))


@every_policy
@pytest.mark.parametrize("shape", [(32, 32, 3), (28, 28, 1), (224, 224, 3)], ids=str)
@pytest.mark.parametrize("seed", [2, 3, 4])
def test_draws_and_pixels_are_those_of_torchvisions_transform_on_one_image_after_the_other(policy, shape, seed):
    x = images(40, *shape)
    found, _ = policy(x, torch.arange(40), seeded(seed))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(torch.randint(2**62, (), generator=seeded(seed))))
        expected = [POLICIES[policy](image).permute(1, 2, 0) for image in x.permute(0, 3, 1, 2)]
    assert torch.equal(found, torch.stack(expected))


@pytest.mark.slow
def test_draws_are_uniform_and_half_of_the_strengths_are_negative():
    n = 8_000
    drawn = rand_augment.draw_batch(torch.empty(n, 8, 8, 3, dtype=torch.uint8), seeded(3))
    numbers = torch.tensor([[OPERATIONS.index(each.name) for each in operations] for operations in drawn])
    negative = torch.tensor([[each.strength < 0 for each in operations] for operations in drawn])
    pairs = torch.bincount(numbers[:, 0] * 14 + numbers[:, 1], minlength=196)
    assert ((pairs - n / 196) ** 2 / (n / 196)).sum() < 268  # chi-square, 195 degrees: p = 0.0004
    is_signed = torch.tensor([name in SIGNED for name in OPERATIONS])[numbers]
    assert not negative[~is_signed].any()
    share = negative[is_signed].float().mean()
    assert abs(share - 0.5) < 4 * 0.5 / is_signed.sum().sqrt()


@every_policy
def test_an_image_does_not_depend_on_the_others_of_its_batch(policy):
    x = images(40, 32, 32, 3)
    drawn = policy.draw_batch(x, seeded(4))
    whole = apply_operations(x, drawn)
    for rows in ([7], [3, 2], list(range(39, 20, -1))):
        assert torch.equal(apply_operations(x[rows], [drawn[row] for row in rows]), whole[rows])


@every_policy
def test_results_are_bytes_in_memory_of_their_own(policy):
    x, y = images(6, 8, 12, 3), torch.arange(6)
    before = x.clone()
    found, labels = policy(x, y, seeded(5))
    assert found.dtype == torch.uint8
    assert found.is_contiguous()
    assert torch.equal(x, before)
    assert labels is y
    assert torch.equal(policy(x.float() + 0.2, y, seeded(5))[0], found)
    assert torch.equal(policy(x.float() - 0.2, y, seeded(5))[0], found)
    assert not torch.equal(policy(x, y, seeded(6))[0], found)


@every_policy
def test_an_empty_batch_stays_empty(policy):
    found, _ = policy(images(4, 8, 12, 3)[:0], torch.arange(0), seeded())
    assert (found.shape, found.dtype) == ((0, 8, 12, 3), torch.uint8)
