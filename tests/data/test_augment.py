import numpy as np
import pytest
import torch
import torch.nn.functional as F
from refusals import refused
from torchvision.transforms import v2

from raylt.data.augment import (
    AUGMENTATIONS,
    Checked,
    apply_boxes,
    apply_boxes_to_maps,
    apply_crops,
    cutout,
    draw_boxes,
    draw_crops,
    draw_scaled_boxes,
    draw_view,
    in_turn,
    is_own,
    moves_pixels,
    needs_grey_or_colour,
    normalise,
    resized_crop_flip,
    try_augmentation,
)
from raylt.data.label_maps import VOID
from raylt.errors import ConfigError
from raylt.recordability import is_recordable

Y = torch.arange(8)
OWN = {name: AUGMENTATIONS[name] for name in ("crop_flip", "resized_crop_flip", "scale_crop_flip")}
every_augmentation = pytest.mark.parametrize("augment", OWN.values(), ids=OWN)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def images(batch: int, height: int = 32, width: int = 32, channels: int = 3) -> torch.Tensor:
    return torch.randint(0, 256, (batch, height, width, channels), dtype=torch.uint8, generator=seeded(9))


@pytest.mark.parametrize("shape", [(32, 32, 3), (28, 28, 1), (8, 12, 3)])
def test_crop_flip_equals_a_loop_over_samples(shape):
    x = images(24, *shape)
    offsets, flips = draw_crops(24, seeded())
    expected = []
    for image, (top, left), flip in zip(x.numpy(), offsets.tolist(), flips.tolist(), strict=True):
        padded = np.pad(image, ((4, 4), (4, 4), (0, 0)))
        cut = padded[top : top + shape[0], left : left + shape[1]]
        expected.append(cut[:, ::-1] if flip else cut)
    assert np.array_equal(apply_crops(x, offsets, flips).numpy(), np.stack(expected))


@pytest.mark.parametrize("shape", [(32, 32, 3), (28, 28, 1), (8, 12, 3)])
def test_resized_crop_flip_equals_torchvisions_on_each_sample(shape):
    x = images(24, *shape)
    boxes, flips = draw_boxes(24, shape[:2], seeded())
    expected = []
    for image, box, flip in zip(x.float(), boxes.tolist(), flips.tolist(), strict=True):
        part = v2.functional.resized_crop(image.permute(2, 0, 1), *box, size=list(shape[:2]), antialias=False)
        expected.append((part.flip(2) if flip else part).permute(1, 2, 0))
    assert torch.allclose(apply_boxes(x, boxes, flips), torch.stack(expected), atol=0.01)  # on the scale of 255


def test_resized_crop_of_the_whole_image_is_the_identity():
    x = images(4)
    whole = torch.tensor([[0, 0, 32, 32]]).expand(4, 4)
    unmirrored = torch.zeros(4, dtype=torch.bool)
    assert torch.allclose(apply_boxes(x, whole, unmirrored), x.float(), atol=1e-2)
    assert torch.allclose(apply_boxes(x, whole, ~unmirrored), x.float().flip(2), atol=1e-2)


def test_resized_crop_keeps_64_percent_unless_told_otherwise():
    x = images(8)
    found, _ = resized_crop_flip(x, Y, seeded())
    assert torch.equal(found, apply_boxes(x, *draw_boxes(8, (32, 32), seeded(), 0.64)))
    found, _ = resized_crop_flip(x, Y, seeded(), 0.2)
    assert torch.equal(found, apply_boxes(x, *draw_boxes(8, (32, 32), seeded(), 0.2)))


@pytest.mark.parametrize(
    ("augment", "draw"), [("resized_crop_flip", draw_boxes), ("scale_crop_flip", draw_scaled_boxes)]
)
def test_boxes_are_drawn_for_the_height_and_width_of_the_images(augment, draw):
    x = images(8, 8, 12)
    assert torch.equal(OWN[augment](x, Y, seeded())[0], apply_boxes(x, *draw(8, (8, 12), seeded())))


def test_each_sample_gets_a_view_of_its_own_and_never_the_image_itself():
    x = torch.arange(5.0)[None, :, None].expand(400, 5, 1)
    drawn, _ = draw_view(x, torch.arange(400), seeded())
    counts = drawn.flatten().long().bincount(minlength=5).tolist()
    assert counts[0] == 0
    assert min(counts[1:]) > 60  # 100 are expected of each view, with a standard deviation of 9


def test_draws_of_crops_are_uniform_and_independent():
    n = 18_000
    offsets, flips = draw_crops(n, seeded())
    cells = torch.bincount(offsets[:, 0] * 9 + offsets[:, 1], minlength=81)
    assert ((cells - n / 81) ** 2 / (n / 81)).sum() < 131  # chi-square, 80 degrees: p = 0.0003
    assert abs(flips.float().mean() - 0.5) < 4 * 0.5 / n**0.5
    assert abs(torch.corrcoef(torch.stack([offsets[:, 0], offsets[:, 1], flips]).float()).triu(1)).max() < 0.03


def test_draws_of_boxes_lie_inside_and_cover_64_to_100_percent():
    n = 20_000
    boxes, flips = draw_boxes(n, (32, 32), seeded())
    corners, sides = boxes[:, :2], boxes[:, 2:]
    assert torch.equal(sides[:, 0], sides[:, 1])
    # side = round(32 sqrt(s)), s uniform in 0.64..1: 26 = round(25.6) to 32
    assert sides.unique().tolist() == [26, 27, 28, 29, 30, 31, 32]
    assert abs((sides[:, 0] / 32).square().mean() - 0.82) < 0.005
    room = 32 - sides
    assert (corners >= 0).all()
    assert (corners <= room).all()
    for side in (26, 30):
        tops = torch.bincount(corners[sides[:, 0] == side][:, 0], minlength=33 - side)
        expected = tops.sum() / (33 - side)
        assert len(tops) == 33 - side
        assert ((tops - expected).abs() < 5 * expected.sqrt()).all()
    assert abs(flips.float().mean() - 0.5) < 4 * 0.5 / n**0.5


@every_augmentation
def test_equal_seeds_give_equal_images_and_others_do_not(augment):
    x = images(8)
    first, again, other = (augment(x, Y, seeded(seed))[0] for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@every_augmentation
def test_augmentation_leaves_its_argument_and_the_global_generator_alone(augment):
    x, state = images(8), torch.get_rng_state()
    before = x.clone()
    assert augment(x, Y, seeded())[0].shape == x.shape
    assert torch.equal(x, before)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("channels", [1, 3])
def test_normalise_equals_torchvisions(channels):
    x = images(6, channels=channels)
    mean, std = torch.tensor([0.4914, 0.4822, 0.4465])[:channels], torch.tensor([0.2023, 0.1994, 0.2010])[:channels]
    expected = x.permute(0, 3, 1, 2).float() / 255
    expected = v2.functional.normalize(expected, mean.tolist(), std.tolist())
    assert torch.allclose(normalise(x, mean, std), expected, atol=1e-6, rtol=0)
    assert torch.equal(normalise(x.float(), mean, std), normalise(x, mean, std))


@pytest.mark.parametrize("augment", AUGMENTATIONS.values(), ids=AUGMENTATIONS.keys())
@pytest.mark.parametrize("channels", [1, 3])
def test_normalised_batches_are_channels_last(augment, channels):
    x = images(5, 8, 12, channels)
    if augment is not None:
        x, _ = augment(x, Y[:5], seeded())
    y = normalise(x, torch.zeros(channels), torch.ones(channels))
    assert y.shape == (5, channels, 8, 12)
    assert y.is_contiguous(memory_format=torch.channels_last)


def coded(batch: int, height: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return images whose grey value is 40 times the label in their maps, in blocks of 8 x 8 pixels."""
    blocks = torch.randint(0, 6, (batch, height // 8, width // 8), generator=seeded(5), dtype=torch.uint8)
    maps = blocks.repeat_interleave(8, 1).repeat_interleave(8, 2)
    return (40 * maps)[..., None].repeat(1, 1, 1, 3), maps


def inner(maps: torch.Tensor) -> torch.Tensor:
    """Return which pixels have a neighbourhood of their own label, so that interpolation does not mix labels."""
    near = torch.nn.functional.unfold(maps[:, None].float(), 5, padding=2).view(len(maps), 25, *maps.shape[1:])
    return (near == near[:, :1]).all(1)


@every_augmentation
@pytest.mark.parametrize("seed", range(5))
def test_image_and_map_stay_aligned(augment, seed):
    x, y = coded(16, 48, 64)
    moved, maps = augment(x, y, seeded(seed))
    assert (moved.shape, maps.shape, maps.dtype) == (x.shape, y.shape, y.dtype)
    seen = inner(maps) & (maps != VOID)
    assert seen.float().mean() > 0.1
    assert (moved[seen].float() - 40.0 * maps[seen][:, None]).abs().max() < 0.02
    assert not torch.equal(maps, y)


@every_augmentation
def test_images_are_moved_alike_whatever_their_labels_are(augment):
    x, y = coded(16, 48, 64)
    moved, labels = augment(x, torch.arange(16), seeded())
    assert torch.equal(moved, augment(x, y, seeded())[0])
    assert torch.equal(labels, torch.arange(16))


def test_the_border_of_a_crop_is_black_and_has_no_label():
    x, y = torch.full((16, 8, 12, 3), 200, dtype=torch.uint8), torch.full((16, 8, 12), 3, dtype=torch.uint8)
    moved, maps = OWN["crop_flip"](x, y, seeded())
    assert maps.unique().tolist() == [3, VOID]
    assert torch.equal(maps == VOID, (moved == 0).all(3))


def test_scaled_boxes_are_of_half_to_double_scale_and_cover_or_lie_in_the_image():
    n = 20_000
    boxes, _ = draw_scaled_boxes(n, (48, 64), seeded())
    corners, sides, full = boxes[:, :2], boxes[:, 2:], torch.tensor([48, 64])
    scale = 48 / sides[:, 0]
    assert sides[:, 0].min() == 24
    assert sides[:, 0].max() == 96
    # s is uniform in 0.5..2 with the mean 1.25
    assert abs(scale.mean() - 1.25) < 0.01
    assert ((sides[:, 1] - sides[:, 0] * 64 / 48).abs() < 0.5 * (1 + 64 / 48)).all()  # both sides are rounded
    inside, around = sides <= full, sides >= full
    assert (corners >= 0)[inside].all()
    assert (corners + sides <= full)[inside].all()
    assert (corners <= 0)[around].all()
    assert (corners + sides >= full)[around].all()


@pytest.mark.parametrize("draw", [draw_boxes, draw_scaled_boxes])
def test_corners_of_boxes_are_uniform_and_independent_of_each_other_and_of_the_flips(draw):
    boxes, flips = draw(40_000, (32, 32), seeded(4))
    corners, room = boxes[:, :2], 32 - boxes[:, 2:]
    rooms = [r for r in room.unique().tolist() if r and (room[:, 0] == r).sum() > 300]
    assert (min(rooms) < 0) == (draw is draw_scaled_boxes)  # larger boxes begin above and to the left of the image
    for r in rooms:
        for axis in (0, 1):
            places = torch.bincount((corners[:, axis] * (1 if r > 0 else -1))[room[:, axis] == r])
            expected = places.sum() / (abs(r) + 1)
            assert len(places) == abs(r) + 1
            assert ((places - expected).abs() < 5 * expected.sqrt()).all()
    free = (room != 0).all(1)
    drawn = torch.cat([corners[free] / room[free], flips[free, None]], dim=1)
    assert torch.corrcoef(drawn.T).triu(1).abs().max() < 0.03


def test_what_lies_outside_a_scaled_image_is_void_and_looks_like_its_border():
    x, y = coded(1, 48, 64)
    boxes = torch.tensor([[-24, -32, 96, 128]])  # the image is shrunk to half its size, in the middle
    flips = torch.zeros(1, dtype=torch.bool)
    maps = apply_boxes_to_maps(y[..., None], boxes, flips)[..., 0]
    assert (maps[0, 12:36, 16:48] != VOID).all()
    assert (maps == VOID).sum() == 48 * 64 - 24 * 32
    moved = apply_boxes(x, boxes, flips)
    assert torch.allclose(moved[0, 0, 32], moved[0, 12, 32], atol=0.02)


@pytest.mark.parametrize("name", ["color_jitter", "rand_augment", "trivial_augment", "auto_augment"])
@pytest.mark.parametrize("channels", [1, 3])
def test_torchvisions_transforms_draw_for_each_image_and_disturb_no_other_draw(name, channels):
    x = images(1, channels=channels).expand(12, -1, -1, -1).contiguous()
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    first, labels = AUGMENTATIONS[name](x, torch.arange(12), seeded(1))
    assert torch.equal(torch.rand(1), expected)  # the next draw of training is unchanged
    again, _ = AUGMENTATIONS[name](x.float(), torch.arange(12), seeded(1))
    assert torch.equal(first, again)
    assert torch.equal(labels, torch.arange(12))
    assert first.shape == x.shape
    assert len({image.numpy().tobytes() for image in first}) >= 6  # grey images do not change when colours do


@pytest.mark.parametrize("name", ["color_jitter", "rand_augment", "trivial_augment"])
def test_pixels_between_two_bytes_count_as_the_nearer_byte(name):
    x = images(6)
    expected, _ = AUGMENTATIONS[name](x, Y[:6], seeded(1))
    for off in (-0.4, 0.4):
        assert torch.equal(AUGMENTATIONS[name](x.float() + off, Y[:6], seeded(1))[0], expected)


def test_several_augmentations_are_applied_in_their_order():
    crop, jitter, x = OWN["crop_flip"], AUGMENTATIONS["color_jitter"], images(8)
    generator = seeded(2)
    expected, _ = jitter(*crop(x, Y, generator), generator)
    assert torch.equal(in_turn([crop, None, jitter])(x, Y, seeded(2))[0], expected)
    assert in_turn([None, crop]) is crop
    assert in_turn([None]) is None


@pytest.mark.parametrize("transform", ["trivial_augment", "auto_augment"])
def test_of_several_augmentations_each_counts(transform):
    crop, both = OWN["crop_flip"], in_turn([OWN["crop_flip"], AUGMENTATIONS[transform]])
    assert (is_own(in_turn([crop, draw_view])), is_own(in_turn([crop, cutout]))) == (True, False)
    assert (needs_grey_or_colour(crop), needs_grey_or_colour(both)) == (False, True)
    assert (moves_pixels(crop), moves_pixels(both)) == (False, True)
    assert (is_recordable(in_turn([crop, crop])), is_recordable(both)) == (True, False)


@pytest.mark.parametrize("shape", [(32, 32, 3), (8, 12, 1)])
def test_cutout_blackens_a_square_about_a_drawn_pixel(shape):
    height, width, _ = shape
    x = images(40, *shape).clamp(min=1)
    cut, labels = cutout(x, torch.arange(40), seeded(3))
    rows, columns = (
        torch.randint(side, (40, 1), generator=generator).flatten().tolist()
        for generator in [seeded(3)]
        for side in (height, width)
    )
    for image, made, row, column in zip(x, cut, rows, columns, strict=True):
        expected = image.clone()
        expected[max(row - height // 4, 0) : row + height // 4, max(column - width // 4, 0) : column + width // 4] = 0
        assert torch.equal(made, expected)
    assert torch.equal(labels, torch.arange(40))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x, y: None, "a NoneType instead of two tensors"),
        (lambda x, y: (x.numpy(), y), "a tuple instead of two tensors"),
        (lambda x, y: (x[:2], y[:2]), "images [2, 5, 4, 3] for images [6, 5, 4, 3]"),
        (lambda x, y: (x[:, 1:], y), "images [6, 4, 4, 3]"),
        (lambda x, y: (x, y[:2]), "labels torch.int64 [2] for labels torch.int64 [6]"),
        (lambda x, y: (x, y.float()), "labels torch.float32 [6]"),
        (lambda x, y: (x - 300.0, y), "images with values from -300"),
        (lambda x, y: (x + 256.0, y), "images with values from 2"),
        (lambda x, y: (x * float("nan"), y), "from nan to nan"),
    ],
)
def test_an_augmentation_of_ones_own_that_returns_other_data_is_named(change, words):
    augment = Checked("mine", lambda x, y, generator: change(x, y))
    x = torch.randint(0, 256, (6, 5, 4, 3), generator=seeded(0)).to(torch.uint8)
    with refused("plugin.failed", ConfigError, key="augment", value="mine") as caught:
        in_turn([augment, OWN["crop_flip"]])(x, torch.arange(6), seeded(1))
    assert words in str(caught.value)


def test_an_augmentation_of_ones_own_may_return_floats_and_soft_labels():
    x = torch.randint(0, 256, (6, 5, 4, 3), generator=seeded(0)).to(torch.uint8)
    augment = Checked("mine", lambda x, y, generator: (x + 0.4, F.one_hot(y).float()))
    images, labels = augment(x, torch.arange(6), seeded(1))
    assert images.dtype == labels.dtype == torch.float32
    assert not is_recordable(augment)
    assert is_recordable(Checked("mine", OWN["crop_flip"]))
    assert not is_own(augment)


CALLS = iter(range(1, 9))


def darken_by(draw):
    return lambda x, y, generator: ((x * draw(generator)).to(torch.uint8), y)


@pytest.mark.parametrize(
    "draw",
    [lambda generator: np.random.default_rng().random(), lambda generator: next(CALLS) / 9],
    ids=["numpy", "kept"],
)
def test_an_augmentation_that_no_run_could_repeat_is_refused_before_it(draw):
    with refused("plugin.failed", ConfigError, key="augment"):
        try_augmentation(darken_by(draw), (5, 4, 3), 8, False)


def test_an_augmentation_may_draw_from_its_generator_and_from_torch():
    try_augmentation(darken_by(lambda generator: torch.rand((), generator=generator)), (5, 4, 3), 8, False)
    try_augmentation(darken_by(lambda generator: torch.rand(())), (5, 4, 3), 8, False)


def test_the_labels_of_a_batch_are_compared_with_the_classes_once_before_a_run():
    def of_another_class(x, y, generator):
        return x, torch.where(y == 255, y, 7 * torch.ones_like(y))

    for maps in (False, True):
        try_augmentation(of_another_class, (5, 4, 3), 8, maps)
        with refused("plugin.failed", ConfigError, key="augment", value=[7, 7]):
            try_augmentation(of_another_class, (5, 4, 3), 7, maps)
