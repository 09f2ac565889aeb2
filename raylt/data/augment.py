"""Random augmentations of whole image batches, drawn separately for each sample, on the device of the images.

Images are [B, H, W, channels] with values 0..255: uint8 in memory, float32 after an augmentation that interpolates.
Labels [B] do not change. Label maps uint8 [B, H, W] are moved with their images, by nearest neighbour, and are VOID
outside of the image. Each crop has two functions: one draws the crops, the other applies them.

Departure: CReFF's code makes one decision per batch.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from raylt.data.colour_jitter import color_jitter
from raylt.data.image_policies import ImagePolicy, auto_augment, rand_augment, trivial_augment
from raylt.data.label_maps import VOID
from raylt.errors import ConfigError
from raylt.recordability import is_recordable, recordable
from raylt.seeds import seeded

#: A function (x, y, generator) -> (x, y) on images uint8 [B, H, W, channels] and their labels.
Augmentation = Callable[[Tensor, Tensor, torch.Generator], tuple[Tensor, Tensor]]

PADDING = 4
TRIED = 8  # images on which an augmentation is tried
ROUNDING = 0.5  # grey levels by which interpolated images may exceed 0..255


def normalise(x: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Compute `(x / 255 - mean) / std` per channel.

    Args:
        x: Images [B, H, W, channels] in 0..255, uint8 or float32.
        mean, std: Mean and standard deviation of pixel values in 0..1, float32 [channels].

    Returns:
        float32 [B, channels, H, W] that lies in memory as [B, H, W, channels], which is torch.channels_last.
    """
    return normalise_rows(x, *_row_constants(mean, std, x.shape[2]))


def normalise_rows(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Normalise images by `x * scale + shift`, with precomputed constants for each image row.

    Args:
        x: Images [B, H, W, channels] in 0..255, uint8 or float32.
        scale: Factors for a row, from `row_constants`, float32 [W * channels].
        shift: Summands for a row, in the same form.
    """
    values = x.to(torch.float32, memory_format=torch.contiguous_format)
    # multiply whole image rows by repeated constants, because an inner dimension of 3 is not vectorised
    return torch.addcmul(shift, values.flatten(2), scale).view(x.shape).permute(0, 3, 1, 2)


@functools.cache
def row_constants(
    mean: tuple[float, ...], std: tuple[float, ...], width: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the scale and shift for `normalise_rows`, float32 [W * channels] each. Callers must not modify them.

    They are cached, because computing them takes a tenth of the time of a small step.

    Args:
        mean, std: Mean and standard deviation of pixel values in 0..1, one value per channel.
        width: Width of the images, W.
        device: Device of the images.
    """
    return _row_constants(torch.tensor(mean, device=device), torch.tensor(std, device=device), width)


def _row_constants(mean: Tensor, std: Tensor, width: int) -> tuple[Tensor, Tensor]:
    return (1 / (255 * std)).repeat(width), (-mean / std).repeat(width)


@recordable
def crop_flip(x: Tensor, y: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Pad each image with zeros, crop it randomly to its original size, and mirror it with probability 1/2.

    The border is black, as in torchvision's usual recipe. CReFF's code pads after normalisation, so its border has the
    colour of the mean.

    Args:
        x: uint8 [B, H, W, channels].
        y: int64 [B], or uint8 [B, H, W].
        generator: Random generator on the device of `x`.

    Returns:
        uint8 [B, H, W, channels], and the labels in the form they came in.
    """
    offsets, flips = draw_crops(len(x), generator)
    return apply_crops(x, offsets, flips), _moved(y, lambda maps: apply_crops(maps, offsets, flips, VOID))


def draw_crops(batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw the top left corners of random crops in padded images, int64 [B, 2] in 0..8, and mirror flags, bool [B]."""
    offsets = torch.randint(0, 2 * PADDING + 1, (batch, 2), generator=generator, device=generator.device)
    return offsets, _draw_flips(batch, generator)


def apply_crops(x: Tensor, offsets: Tensor, flips: Tensor, fill: int = 0) -> Tensor:
    """Pad images with `fill`, crop them to their original size, and mirror some of them.

    Args:
        x: Images or maps [B, H, W, channels].
        offsets: Top left corners of the crops in the padded images, int64 [B, 2].
        flips: The images to mirror, bool [B].
        fill: Value of the padding.
    """
    batch, height, width, channels = x.shape
    padded = F.pad(x, (0, 0, PADDING, PADDING, PADDING, PADDING), value=fill)
    tall, wide = padded.shape[1:3]
    rows = torch.arange(batch, device=x.device)[:, None] * tall + offsets[:, :1] + _steps(height, x)
    columns = offsets[:, 1:] + torch.where(flips[:, None], _steps(width, x).flip(0), _steps(width, x))
    pixels = rows[:, :, None] * wide + columns[:, None, :]  # [B, H, W], into the flat batch
    # one index per pixel: indexing with (sample, row, column) takes three times as long
    return padded.view(-1, channels).index_select(0, pixels.view(-1)).view(x.shape)


@recordable
def resized_crop_flip(x: Tensor, y: Tensor, generator: torch.Generator, least: float = 0.64) -> tuple[Tensor, Tensor]:
    """Resize a random crop of 64 to 100 % of each image's area to the image size; mirror it with probability 1/2.

    This is SFD's augmentation.

    Args:
        x: uint8 [B, H, W, channels].
        y: int64 [B], or uint8 [B, H, W].
        generator: Random generator on the device of `x`.
        least: Smallest fraction of the area that a crop has.

    Returns:
        float32 [B, H, W, channels] in 0..255, and the labels in the form they came in.
    """
    boxes, flips = draw_boxes(len(x), (x.shape[1], x.shape[2]), generator, least)
    return apply_boxes(x, boxes, flips), _moved(y, lambda maps: apply_boxes_to_maps(maps, boxes, flips))


@recordable
def scale_crop_flip(x: Tensor, y: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Scale each image by 0.5 to 2, crop it randomly to its original size, and mirror it with probability 1/2.

    This is the usual augmentation of street scenes.

    An image that is scaled down gets a random position. Its border pixels are repeated up to the edge, and the map is
    VOID there.

    Args:
        x: uint8 [B, H, W, channels].
        y: int64 [B], or uint8 [B, H, W].
        generator: Random generator on the device of `x`.

    Returns:
        float32 [B, H, W, channels] in 0..255, and the labels in the form they came in.
    """
    boxes, flips = draw_scaled_boxes(len(x), (x.shape[1], x.shape[2]), generator)
    return apply_boxes(x, boxes, flips), _moved(y, lambda maps: apply_boxes_to_maps(maps, boxes, flips))


@recordable
def draw_view(x: Tensor, y: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Choose one of each sample's precomputed augmented views at random.

    Args:
        x: Features float32 [B, 1 + k, d], of the image and of its k views.
        y: int64 [B].
        generator: Random generator on the device of `x`.

    Returns:
        float32 [B, d], and the labels.
    """
    batch, count = x.shape[:2]
    views = torch.randint(1, count, (batch,), generator=generator, device=x.device)
    return x[torch.arange(batch, device=x.device), views], y


def draw_boxes(
    batch: int, size: tuple[int, int], generator: torch.Generator, least: float = 0.64
) -> tuple[Tensor, Tensor]:
    """Draw random crop boxes (top, left, height, width), int64 [B, 4], and the images to mirror, bool [B].

    Args:
        batch: Number of images, B.
        size: Height and width of the images.
        generator: Random generator on the device of the images.
        least: Smallest fraction of the area that a crop has.
    """
    area, *corner = torch.rand(3, batch, 1, generator=generator, device=generator.device)
    full = _sides(size, generator.device)
    sides = (full * (least + (1 - least) * area).sqrt()).round()  # [B, 2]
    corners = torch.floor(torch.cat(corner, dim=1) * (full - sides + 1))
    return torch.cat([corners, sides], dim=1).long(), _draw_flips(batch, generator)


def draw_scaled_boxes(batch: int, size: tuple[int, int], generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw crop boxes that scale images by a random factor in 0.5..2, and the images to mirror.

    Args:
        batch: Number of images, B.
        size: Height and width of the images.
        generator: Random generator on the device of the images.

    Returns:
        Boxes as (top, left, height, width), int64 [B, 4], larger than the image for factors below 1; and the images to
        mirror, bool [B].
    """
    scale, *corner = torch.rand(3, batch, 1, generator=generator, device=generator.device)
    full = _sides(size, generator.device)
    sides = (full / (0.5 + 1.5 * scale)).round()  # [B, 2]
    corners = torch.floor(torch.cat(corner, dim=1) * ((full - sides).abs() + 1)) * (full - sides).sign()
    return torch.cat([corners, sides], dim=1).long(), _draw_flips(batch, generator)


def apply_boxes(x: Tensor, boxes: Tensor, flips: Tensor) -> Tensor:
    """Resize crops of images bilinearly to the image size, and mirror some of them.

    Args:
        x: Images [B, H, W, channels].
        boxes: Crops as (top, left, height, width), int64 [B, 4].
        flips: The images to mirror, bool [B].
    """
    parts = F.grid_sample(
        x.float().permute(0, 3, 1, 2),
        _grid(x, boxes, flips),
        mode="bilinear",
        padding_mode="border",
        align_corners=False,
    )
    return parts.permute(0, 2, 3, 1).contiguous()


def apply_boxes_to_maps(maps: Tensor, boxes: Tensor, flips: Tensor) -> Tensor:
    """Crop and resize label maps by nearest neighbour. Pixels outside the maps become VOID.

    Args:
        maps: Label maps [B, H, W, 1].
        boxes: Crops as (top, left, height, width), int64 [B, 4].
        flips: The maps to mirror, bool [B].
    """
    # grid_sample fills with 0, so shift VOID to 0 and back
    shifted = F.grid_sample(
        maps.permute(0, 3, 1, 2).float() - VOID,
        _grid(maps, boxes, flips),
        mode="nearest",
        padding_mode="zeros",
        align_corners=False,
    )
    return (shifted + VOID).to(maps.dtype).permute(0, 2, 3, 1)


def _grid(x: Tensor, boxes: Tensor, flips: Tensor) -> Tensor:
    """Return the sampling grid of the crops for `grid_sample`, float32 [B, H, W, 2]."""
    height, width = x.shape[1:3]
    down = _centres(boxes[:, 0], boxes[:, 2], height)[:, :, None]  # [B, H, 1]
    across = _centres(boxes[:, 1], boxes[:, 3], width)
    across = torch.where(flips[:, None], across.flip(1), across)[:, None, :]  # [B, 1, W]
    return torch.stack(torch.broadcast_tensors(across, down), dim=-1)


def cutout(x: Tensor, y: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Blacken a random square of half the side length in each image (DeVries and Taylor, arXiv 2017).

    The square is cut off at the image's edge. On CIFAR its side is 16 pixels, as in the paper.

    Args:
        x: Images [B, H, W, channels].
        y: Labels, int64 [B]; returned unchanged.
        generator: Random generator on the device of `x`.
    """
    batch = len(x)
    sides = x.shape[1:3]
    hidden = torch.ones(batch, *sides, dtype=torch.bool, device=x.device)
    for axis, side in enumerate(sides, 1):
        centre = torch.randint(side, (batch, 1), generator=generator, device=generator.device)
        positions = _steps(side, x)[None]
        within = (positions >= centre - side // 4) & (positions < centre + side // 4)  # [B, side]
        hidden &= within[:, :, None] if axis == 1 else within[:, None, :]
    return x.masked_fill(hidden[..., None], 0), y


@dataclass(frozen=True)
class InTurn:
    """Augmentation that applies several augmentations one after the other."""

    steps: tuple[Augmentation, ...]

    @property
    def recordable(self) -> bool:
        """Return whether all augmentations in the sequence are recordable, see `raylt.recordability.recordable`."""
        return all(map(is_recordable, self.steps))

    def __call__(self, x: Tensor, y: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        for step in self.steps:
            x, y = step(x, y, generator)
        return x, y


@dataclass(frozen=True)
class Checked:
    """A user's own augmentation, whose results are checked.

    Args:
        name: Name of the augmentation.
        function: The user's function.
    """

    name: str
    function: Augmentation

    @property
    def recordable(self) -> bool:
        """Return whether the user's function is recordable, see `raylt.recordability.recordable`."""
        return is_recordable(self.function)

    def __call__(self, x: Tensor, y: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        result = self.function(x, y, generator)
        problem = _problem(result, x, y)
        if problem is not None:
            raise ConfigError(
                f"augment: {self.name} returned {problem}. Return the images and labels of the batch, with values of 0 "
                "to 255.",
                code="plugin.failed",
                key="augment",
                value=self.name,
            )
        return result


def try_augmentation(augment: Augmentation, shape: tuple[int, int, int], classes: int, maps: bool) -> None:
    """Raise an error if an augmentation returns unusable images or labels for a batch of random ones.

    Args:
        augment: The augmentation.
        shape: Height, width and channels of an image.
        classes: Number of classes.
        maps: Whether labels are label maps.

    Raises:
        ConfigError: An augmentation of the user's own returned something that cannot be used.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (TRIED, *shape), generator=generator).to(torch.uint8)
    y = torch.randint(0, min(classes, VOID), (TRIED, *shape[:2]) if maps else (TRIED,), generator=generator)
    y = y.to(torch.uint8) if maps else y
    results = []
    for _ in range(2):
        with seeded(0, "trial"):  # a client function may use torch's own generator, too
            results.append(augment(x.clone(), y.clone(), torch.Generator().manual_seed(0)))
    images, labels = results[0]
    if not (torch.equal(images, results[1][0]) and torch.equal(labels, results[1][1])):
        raise ConfigError(
            "augment: a second call with the same batch and generator returned different images or labels, so no run "
            "would be repeatable. Draw random numbers only from the generator, and keep no state between calls.",
            code="plugin.failed",
            key="augment",
        )
    labels = labels[labels != VOID] if maps else labels
    if not labels.is_floating_point() and ((labels < 0) | (labels >= classes)).any():
        raise ConfigError(
            f"augment: labels outside of 0..{classes - 1} were returned ({labels.min()} to {labels.max()}). Return the "
            "labels of the batch.",
            code="plugin.failed",
            key="augment",
            value=[int(labels.min()), int(labels.max())],
        )


def _problem(result: object, x: Tensor, y: Tensor) -> str | None:
    """Return why the result of an augmentation cannot be used, in a few words; None if it can."""
    if not isinstance(result, tuple | list) or len(result) != 2 or not all(isinstance(part, Tensor) for part in result):
        return f"a {type(result).__name__} instead of two tensors"
    images, labels = result
    if images.shape != x.shape:
        return f"images {list(images.shape)} for images {list(x.shape)}"
    soft = y.ndim == 1 and labels.ndim == 2 and len(labels) == len(y) and labels.is_floating_point()
    if not soft and (labels.shape != y.shape or labels.dtype != y.dtype):
        return f"labels {labels.dtype} {list(labels.shape)} for labels {y.dtype} {list(y.shape)}"
    # on a GPU, reading a value would wait for all earlier work in every step
    if images.device.type == "cpu" and images.dtype != torch.uint8 and len(images):
        low, high = (bound.item() for bound in images.aminmax())
        if not (low >= -ROUNDING and high <= 255 + ROUNDING):  # also if one is NaN
            return f"images with values from {low:.4g} to {high:.4g}"
    return None


def in_turn(steps: Sequence[Augmentation | None]) -> Augmentation | None:
    """Combine several augmentations into one; return None if there are none."""
    augmentations = tuple(step for step in steps if step is not None)
    if len(augmentations) > 1:
        return InTurn(augmentations)
    return augmentations[0] if augmentations else None


def needs_grey_or_colour(augmentation: Augmentation | None) -> bool:
    """Return whether an augmentation works only on images with one or three channels, as colour operations do."""
    return any(isinstance(step, ImagePolicy) or step is color_jitter for step in _steps_of(augmentation))


def moves_pixels(augmentation: Augmentation | None) -> bool:
    """Return whether an augmentation moves pixels of images without moving the label maps."""
    return any(isinstance(step, ImagePolicy) for step in _steps_of(augmentation))


def is_own(augmentation: Augmentation | None) -> bool:
    """Return whether an augmentation consists of built-in ones, which draw from their generator alone."""
    return all(step is draw_view or step in AUGMENTATIONS.values() for step in _steps_of(augmentation))


def _steps_of(augmentation: Augmentation | None) -> tuple[Augmentation | None, ...]:
    return augmentation.steps if isinstance(augmentation, InTurn) else (augmentation,)


AUGMENTATIONS: dict[str, Augmentation | None] = {
    "none": None,
    "crop_flip": crop_flip,
    "resized_crop_flip": resized_crop_flip,
    "scale_crop_flip": scale_crop_flip,
    "color_jitter": color_jitter,
    "rand_augment": rand_augment,
    "trivial_augment": trivial_augment,
    "auto_augment": auto_augment,
}


def _moved(y: Tensor, move: Callable[[Tensor], Tensor]) -> Tensor:
    return y if y.ndim == 1 else move(y[..., None])[..., 0]


@functools.cache
def _sides(size: tuple[int, int], device: torch.device) -> Tensor:
    """Return the height and width of images as a cached tensor on the device, int64 [2].

    It is cached because the copy synchronises with the device.
    """
    return torch.tensor(size, device=device)


def _draw_flips(batch: int, generator: torch.Generator) -> Tensor:
    return torch.rand(batch, generator=generator, device=generator.device) < 0.5


def _steps(n: int, like: Tensor) -> Tensor:
    return torch.arange(n, device=like.device)


def _centres(start: Tensor, length: Tensor, side: int) -> Tensor:
    """Return the positions of the centres of `side` new pixels in the old image, in -1..1, float32 [B, side].

    The clamp excludes pixels outside of the crop from the interpolation, as if the crop were cut out and then resized.
    """
    steps = torch.arange(side, device=start.device) + 0.5
    inside = (steps * (length[:, None] / side) - 0.5).clamp(min=0)
    pixels = start[:, None] + torch.minimum(inside, length[:, None] - 1)
    return (2 * pixels + 1) / side - 1
