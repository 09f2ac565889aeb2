"""Random crops, scales and flips of whole batches, one decision per sample, on the device the images are on.

Images are [B, H, W, channels] with values 0..255: uint8 in memory, float32 where an augmentation interpolates. Labels
[B] stay as they are; label maps uint8 [B, H, W] move with their images, by nearest neighbour, and are VOID where there
is nothing of the image. Every augmentation has two parts, one that draws and one that applies. Departure: CReFF's code
makes one decision per batch.
"""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from raylt.data.maps import VOID
from raylt.data.transforms import Augmentation, auto_augment, color_jitter, rand_augment, trivial_augment
from raylt.recordable import recordable

PADDING = 4


@recordable
def crop_flip(x: Tensor, y: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Each image cut at random out of its zero-padded self, and mirrored with probability 1/2.

    The border is black, as in torchvision's usual recipe; CReFF's code pads after normalisation, so there it has the
    colour of the mean.

    Args:
        x: uint8 [B, H, W, channels].
        y: int64 [B], or uint8 [B, H, W].
        generator: on the device of `x`.

    Returns:
        uint8 [B, H, W, channels], and the labels in the form they came in.
    """
    offsets, flips = draw_crops(len(x), generator)
    return apply_crops(x, offsets, flips), _moved(y, lambda maps: apply_crops(maps, offsets, flips, VOID))


def draw_crops(batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Top left corners in the padded image, int64 [B, 2] in 0..8, and whether to mirror, bool [B]."""
    offsets = torch.randint(0, 2 * PADDING + 1, (batch, 2), generator=generator, device=generator.device)
    return offsets, _draw_flips(batch, generator)


def apply_crops(x: Tensor, offsets: Tensor, flips: Tensor, fill: int = 0) -> Tensor:
    """`x` padded with `fill`, cut at `offsets` and mirrored where `flips` says so."""
    batch, height, width, channels = x.shape
    padded = F.pad(x, (0, 0, PADDING, PADDING, PADDING, PADDING), value=fill)
    tall, wide = padded.shape[1:3]
    rows = torch.arange(batch, device=x.device)[:, None] * tall + offsets[:, :1] + _steps(height, x)
    columns = offsets[:, 1:] + torch.where(flips[:, None], _steps(width, x).flip(0), _steps(width, x))
    pixels = rows[:, :, None] * wide + columns[:, None, :]                       # [B, H, W], into the flat batch
    # one index per pixel: indexing with (sample, row, column) takes three times as long
    return padded.view(-1, channels).index_select(0, pixels.view(-1)).view(x.shape)


@recordable
def resized_crop_flip(x: Tensor, y: Tensor, generator: torch.Generator,
                      least: float = 0.64) -> tuple[Tensor, Tensor]:
    """SFD's: a random part of 64 to 100 % of each image's area, brought to its size, and mirrored with probability 1/2.

    Args:
        x: uint8 [B, H, W, channels].
        y: int64 [B], or uint8 [B, H, W].
        generator: on the device of `x`.
        least: the smallest share of the area.

    Returns:
        float32 [B, H, W, channels] in 0..255, and the labels in the form they came in.
    """
    boxes, flips = draw_boxes(len(x), (x.shape[1], x.shape[2]), generator, least)
    return apply_boxes(x, boxes, flips), _moved(y, lambda maps: apply_boxes_to_maps(maps, boxes, flips))


@recordable
def scale_crop_flip(x: Tensor, y: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Street scenes': each image scaled by 0.5 to 2, cut at random to its size, and mirrored with probability 1/2.

    Where the scaled image is the smaller one it lies at a random place; from there its border pixels go on to the edge,
    where the map is VOID.

    Args:
        x: uint8 [B, H, W, channels].
        y: int64 [B], or uint8 [B, H, W].
        generator: on the device of `x`.

    Returns:
        float32 [B, H, W, channels] in 0..255, and the labels in the form they came in.
    """
    boxes, flips = draw_scaled_boxes(len(x), (x.shape[1], x.shape[2]), generator)
    return apply_boxes(x, boxes, flips), _moved(y, lambda maps: apply_boxes_to_maps(maps, boxes, flips))


def draw_boxes(batch: int, size: tuple[int, int], generator: torch.Generator,
               least: float = 0.64) -> tuple[Tensor, Tensor]:
    """Parts of an image as top, left, height, width, int64 [B, 4], and whether to mirror, bool [B]."""
    area, *corner = torch.rand(3, batch, 1, generator=generator, device=generator.device)
    full = _sides(size, generator.device)
    sides = (full * (least + (1 - least) * area).sqrt()).round()                         # [B, 2]
    corners = torch.floor(torch.cat(corner, dim=1) * (full - sides + 1))
    return torch.cat([corners, sides], dim=1).long(), _draw_flips(batch, generator)


def draw_scaled_boxes(batch: int, size: tuple[int, int], generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """What images scaled by s, uniform in 0.5..2, show of themselves in their own size: top, left, height, width,
    int64 [B, 4], larger than the image where s < 1; and whether to mirror, bool [B]."""
    scale, *corner = torch.rand(3, batch, 1, generator=generator, device=generator.device)
    full = _sides(size, generator.device)
    sides = (full / (0.5 + 1.5 * scale)).round()                                         # [B, 2]
    corners = torch.floor(torch.cat(corner, dim=1) * ((full - sides).abs() + 1)) * (full - sides).sign()
    return torch.cat([corners, sides], dim=1).long(), _draw_flips(batch, generator)


def apply_boxes(x: Tensor, boxes: Tensor, flips: Tensor) -> Tensor:
    """The parts `boxes` of `x`, bilinearly brought to its size and mirrored where `flips` says so."""
    parts = F.grid_sample(x.float().permute(0, 3, 1, 2), _grid(x, boxes, flips), mode="bilinear",
                          padding_mode="border", align_corners=False)
    return parts.permute(0, 2, 3, 1).contiguous()


def apply_boxes_to_maps(maps: Tensor, boxes: Tensor, flips: Tensor) -> Tensor:
    """The same of label maps [B, H, W, 1] by nearest neighbour; VOID outside of them."""
    # what grid_sample fills in is 0, so VOID is brought to 0 and back
    shifted = F.grid_sample(maps.permute(0, 3, 1, 2).float() - VOID, _grid(maps, boxes, flips), mode="nearest",
                            padding_mode="zeros", align_corners=False)
    return (shifted + VOID).to(maps.dtype).permute(0, 2, 3, 1)


def _grid(x: Tensor, boxes: Tensor, flips: Tensor) -> Tensor:
    """Where each pixel of the parts lies in the images, as grid_sample wants it, float32 [B, H, W, 2]."""
    height, width = x.shape[1:3]
    down = _centres(boxes[:, 0], boxes[:, 2], height)[:, :, None]                # [B, H, 1]
    across = _centres(boxes[:, 1], boxes[:, 3], width)
    across = torch.where(flips[:, None], across.flip(1), across)[:, None, :]     # [B, 1, W]
    return torch.stack(torch.broadcast_tensors(across, down), dim=-1)


def cutout(x: Tensor, y: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Each image with a black square of half its side about a random pixel, as much of it as lies within (DeVries and
    Taylor, arXiv 2017, at the 16 pixels of CIFAR).

    Args:
        x: [B, H, W, channels].
        y: int64 [B]; stays as it is.
        generator: on the device of `x`.
    """
    batch, sides = len(x), x.shape[1:3]
    hidden = torch.ones(batch, *sides, dtype=torch.bool, device=x.device)
    for axis, side in enumerate(sides, 1):
        centre = torch.randint(side, (batch, 1), generator=generator, device=generator.device)
        places = _steps(side, x)[None]
        within = (places >= centre - side // 4) & (places < centre + side // 4)           # [B, side]
        hidden &= within[:, :, None] if axis == 1 else within[:, None, :]
    return x.masked_fill(hidden[..., None], 0), y


def normalise(x: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """`(x / 255 - mean) / std` per channel.

    Args:
        x: [B, H, W, channels] in 0..255, uint8 or float32.
        mean, std: float32 [channels], of values in 0..1.

    Returns:
        float32 [B, channels, H, W] that lies in memory as [B, H, W, channels], which is torch.channels_last.
    """
    width = x.shape[2]
    scale, shift = 1 / (255 * std), -mean / std
    values = x.to(torch.float32, memory_format=torch.contiguous_format)
    # whole image rows against repeated constants: over an inner dimension of 3 nothing is vectorised
    rows = torch.addcmul(shift.repeat(width), values.flatten(2), scale.repeat(width))
    return rows.view(x.shape).permute(0, 3, 1, 2)


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
    """Height and width, int64 [2]; kept, since to bring them there makes the host wait for the device."""
    return torch.tensor(size, device=device)


def _draw_flips(batch: int, generator: torch.Generator) -> Tensor:
    return torch.rand(batch, generator=generator, device=generator.device) < 0.5


def _steps(n: int, like: Tensor) -> Tensor:
    return torch.arange(n, device=like.device)


def _centres(start: Tensor, length: Tensor, side: int) -> Tensor:
    """Where the `side` new pixels fall in the old image, in grid_sample's -1..1, float32 [B, side].

    The clamp keeps a part from showing what lies outside it, as resizing a cut-out does.
    """
    steps = torch.arange(side, device=start.device) + 0.5
    inside = (steps * (length[:, None] / side) - 0.5).clamp(min=0)
    pixels = start[:, None] + torch.minimum(inside, length[:, None] - 1)
    return (2 * pixels + 1) / side - 1
