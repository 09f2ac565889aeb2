"""Augmentation `color_jitter`: random brightness, contrast, saturation and hue of whole image batches.

The draws have the distribution of torchvision's `v2.ColorJitter` (0.4, 0.4, 0.4, 0.1): each image has its own factors
and its own order of the four operations. The operations are torchvision's, with the same rounding. Each is applied at
once to all images that have it in the same position, because one image after the other takes longer than a step of a
small network.
"""

from collections.abc import Callable

import torch
from torch import Tensor

# Strengths of brightness, contrast, saturation and hue; Howard (arXiv 2013).
STRENGTHS = (0.4, 0.4, 0.4, 0.1)
MIDDLES = (1.0, 1.0, 1.0, 0.0)
GREY = (0.2989, 0.587, 0.114)  # weights of red, green and blue


def color_jitter(x: Tensor, y: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Change the brightness, contrast, saturation and hue of each image randomly, in a random order.

    Args:
        x: Images [B, H, W, channels] in 0..255 with one or three channels; floats are rounded.
        y: Labels; returned unchanged.
        generator: Random generator on the device of `x`.

    Returns:
        uint8 [B, H, W, channels], and the labels.
    """
    return apply_jitter(x, *draw_jitter(len(x), generator)), y


def draw_jitter(batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw the order of the four colour operations, int64 [B, 4], and their factors, float32 [B, 4]."""
    device = generator.device
    order = torch.rand(batch, 4, generator=generator, device=device).argsort(1)
    uniform = torch.rand(batch, 4, generator=generator, device=device)
    strengths, middles = (torch.tensor(values, device=device) for values in (STRENGTHS, MIDDLES))
    return order, middles + strengths * (2 * uniform - 1)


def apply_jitter(x: Tensor, order: Tensor, factors: Tensor) -> Tensor:
    """Apply the colour operations to images [B, H, W, channels] in 0..255; return uint8 of the same shape.

    Args:
        x: The images.
        order: Numbers of the operations in the order in which they are applied to each image, int64 [B, 4].
        factors: Factors of the operations by number, float32 [B, 4].
    """
    images = x.float().round().clamp(0, 255).permute(0, 3, 1, 2).contiguous()  # whole numbers throughout
    for place in range(len(OPERATIONS)):
        for number, operation in enumerate(OPERATIONS):
            rows = (order[:, place] == number).nonzero().flatten()
            if len(rows):
                images[rows] = operation(images[rows], factors[rows, number, None, None, None])
    return images.to(torch.uint8).permute(0, 2, 3, 1).contiguous()


def brightness(x: Tensor, factor: Tensor) -> Tensor:
    """Multiply images [n, channels, H, W] by factors [n, 1, 1, 1]."""
    return _rounded(x * factor)


def contrast(x: Tensor, factor: Tensor) -> Tensor:
    """Blend images [n, channels, H, W] with the mean of their grey values, by factors [n, 1, 1, 1]."""
    return _blend(x, _grey(x).mean((1, 2, 3), keepdim=True), factor)


def saturation(x: Tensor, factor: Tensor) -> Tensor:
    """Blend images [n, channels, H, W] with their grey values, by factors [n, 1, 1, 1]."""
    return x if x.shape[1] == 1 else _blend(x, _grey(x), factor)


def hue(x: Tensor, shift: Tensor) -> Tensor:
    """Shift the hues of images [n, channels, H, W] by `shift` [n, 1, 1, 1], fractions of the colour circle."""
    if x.shape[1] == 1:
        return x
    x = x / 255
    red, green, blue = x.split(1, 1)
    least, value = x.amin(1, keepdim=True), x.amax(1, keepdim=True)
    span = value - least
    divisor = span.where(span > 0, 1.0)
    angle = torch.where(
        value == red,
        (green - blue) / divisor,
        torch.where(value == green, 2 + (blue - red) / divisor, 4 + (red - green) / divisor),
    )
    sixths = (angle / 6 + shift).remainder(1) * 6
    places = (torch.tensor([5.0, 3.0, 1.0], device=x.device)[:, None, None] + sixths).remainder(6)
    turned = value - span * torch.minimum(places, 4 - places).clamp(0, 1)
    return (turned * (256 - 1e-3)).floor_()  # torchvision's conversion from 0..1 to bytes


OPERATIONS: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (brightness, contrast, saturation, hue)


def _grey(x: Tensor) -> Tensor:
    if x.shape[1] == 1:
        return x
    red, green, blue = x.split(1, 1)
    return (GREY[0] * red + GREY[1] * green + GREY[2] * blue).floor_()


def _blend(x: Tensor, other: Tensor, ratio: Tensor) -> Tensor:
    return _rounded(x * ratio + other * (1 - ratio))


def _rounded(x: Tensor) -> Tensor:
    """Return pixel values as bytes with the fraction truncated, as in torchvision."""
    return x.clamp_(0, 255).floor_()
