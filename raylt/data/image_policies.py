"""Augmentations `rand_augment`, `trivial_augment` and `auto_augment` of whole image batches.

They are torchvision's policies of the same names (transforms.v2): each image goes through a few operations of random
strength. The draws are the same, and so are the strengths and, to the bit, the pixels. In torchvision, one image after
the other takes longer than a step of a small network. Here an operation is applied at once to all images that have it
in the same position. Two kinds of operations use tables that torchvision's operation fills once: operations that move
pixels by nearest neighbour, a table with the source of each pixel, and operations on single values, a table of 256
values.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

MOVES = ("ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate")
BLENDS = ("Brightness", "Color", "Contrast", "Sharpness")
# Operations of RandAugment and TrivialAugment in torchvision's order, which their drawn numbers refer to.
OPERATIONS = ("Identity", *MOVES, *BLENDS, "Posterize", "Solarize", "AutoContrast", "Equalize")
SIGNED = (*MOVES, *BLENDS)  # operations whose strength is negative in half of the cases
BY_VALUE = ("Brightness", "Posterize", "Solarize", "Invert")

TAKEN, BIN = 2, 9  # RandAugment: number of operations per image, and the bin of their strengths
TABLES = 512  # kept tables of operations that move pixels; TrivialAugment has 310


class Operation(NamedTuple):
    """One of torchvision's operations with its strength, which is 0 for operations that have none."""

    name: str
    strength: float = 0.0


IDENTITY = Operation("Identity")


@dataclass(frozen=True)
class Strengths:
    """The strengths of a policy's operations, in equal bins from the weakest to the strongest.

    Attributes:
        bins: Number of bins.
        shear, turn, blend: Strongest shear (as a tangent), rotation in degrees, and change of brightness, colour,
            contrast and sharpness.
        shift: Strongest translation in pixels; None for 150/331 of the image's side.
        cleared: Number of bits that the strongest posterisation clears.
    """

    bins: int
    shear: float
    turn: float
    blend: float
    shift: float | None
    cleared: int


NARROW = Strengths(bins=31, shear=0.3, turn=30.0, blend=0.9, shift=None, cleared=4)
WIDE = Strengths(bins=31, shear=0.99, turn=135.0, blend=0.99, shift=32.0, cleared=6)
COARSE = Strengths(bins=10, shear=0.3, turn=30.0, blend=0.9, shift=None, cleared=4)


@functools.lru_cache(maxsize=256)
def strengths_of(policy: Strengths, name: str, height: int, width: int) -> list[float] | None:
    """Return the strengths of an operation for images of a size, by bin; None if it has no strength."""
    if name == "Posterize":
        return (8 - torch.arange(policy.bins) / ((policy.bins - 1) / policy.cleared)).round().tolist()
    if name == "Solarize":
        return torch.linspace(1, 0, policy.bins).tolist()
    strongest = {
        "ShearX": policy.shear,
        "ShearY": policy.shear,
        "TranslateX": 150 / 331 * width if policy.shift is None else policy.shift,
        "TranslateY": 150 / 331 * height if policy.shift is None else policy.shift,
        "Rotate": policy.turn,
        **dict.fromkeys(BLENDS, policy.blend),
    }
    return torch.linspace(0, strongest[name], policy.bins).tolist() if name in strongest else None


#: A function (height, width, generator) -> operations of an image, in the order in which they are applied.
DrawOperations = Callable[[int, int, torch.Generator], list[Operation]]


@dataclass(frozen=True)
class ImagePolicy:
    """Augmentation that applies random operations to each image of a batch.

    Attributes:
        draw: Draws the operations of one image with the numbers that torchvision would draw.
    """

    draw: DrawOperations

    def __call__(self, x: Tensor, y: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Apply random operations to each image.

        Args:
            x: Images [B, H, W, channels] in 0..255 with one or three channels; floats are rounded.
            y: Labels; returned unchanged.
            generator: Random generator on the device of `x`; one of its numbers seeds the draws.

        Returns:
            uint8 [B, H, W, channels], and the labels.
        """
        return apply_operations(x, self.draw_batch(x, generator)), y

    def draw_batch(self, x: Tensor, generator: torch.Generator) -> list[list[Operation]]:
        """Draw the operations of images [B, H, W, channels], one image after the other."""
        seed = int(torch.randint(2**62, (), generator=generator, device=generator.device))
        draws = torch.Generator().manual_seed(seed)
        return [self.draw(x.shape[1], x.shape[2], draws) for _ in range(len(x))]


def draw_rand_augment(height: int, width: int, draws: torch.Generator) -> list[Operation]:
    """Draw two operations of equal strength (Cubuk et al., NeurIPS 2020), as `v2.RandAugment()` does."""
    drawn = []
    for _ in range(TAKEN):
        name = OPERATIONS[_number(len(OPERATIONS), draws)]
        strengths = strengths_of(NARROW, name, height, width)
        drawn.append(_signed(name, strengths[BIN] if strengths else 0.0, draws))
    return drawn


def draw_trivial_augment(height: int, width: int, draws: torch.Generator) -> list[Operation]:
    """Draw an operation and its strength (Mueller and Hutter, ICCV 2021), as `v2.TrivialAugmentWide()` does."""
    name = OPERATIONS[_number(len(OPERATIONS), draws)]
    strengths = strengths_of(WIDE, name, height, width)
    strength = strengths[_number(WIDE.bins, draws)] if strengths else 0.0
    return [_signed(name, strength, draws)]


def draw_auto_augment(height: int, width: int, draws: torch.Generator) -> list[Operation]:
    """Draw the operations of one of 25 pairs, which were learned on CIFAR-10 (Cubuk et al., CVPR 2019).

    They are those of `v2.AutoAugment(v2.AutoAugmentPolicy.CIFAR10)`.
    """
    pairs = _learned_pairs()
    drawn = []
    for name, probability, place in pairs[_number(len(pairs), draws)]:
        if torch.rand((), generator=draws) <= probability:
            strengths = strengths_of(COARSE, name, height, width)
            drawn.append(_signed(name, strengths[place] if strengths else 0.0, draws))
    return drawn


rand_augment = ImagePolicy(draw_rand_augment)
trivial_augment = ImagePolicy(draw_trivial_augment)
auto_augment = ImagePolicy(draw_auto_augment)


def apply_operations(x: Tensor, drawn: list[list[Operation]]) -> Tensor:
    """Apply operations to images [B, H, W, channels] in 0..255; return uint8 of the same shape.

    Args:
        x: The images.
        drawn: The operations of each image, in the order in which they are applied.
    """
    images = x if x.dtype == torch.uint8 else x.round().clamp(0, 255).to(torch.uint8)
    images = images.permute(0, 3, 1, 2).clone(memory_format=torch.contiguous_format)
    for place in range(max(map(len, drawn), default=0)):
        moved, mapped, others = _grouped([each[place] if place < len(each) else IDENTITY for each in drawn])
        if moved:
            images[list(moved)] = _move(images[list(moved)], list(moved.values()))
        if mapped:
            images[list(mapped)] = _map_values(images[list(mapped)], list(mapped.values()))
        for operation, rows in others.items():
            images[rows] = operate(images[rows], operation)
    return images.permute(0, 2, 3, 1).contiguous()


def operate(images: Tensor, operation: Operation) -> Tensor:
    """Apply one of torchvision's operations to images [n, channels, H, W]."""
    from torchvision.transforms.v2 import functional as tv  # imported here because it is slow, and few runs need it

    name, strength = operation
    match name:
        case "ShearX":
            slant = math.degrees(math.atan(strength))
            return tv.affine(images, 0.0, [0, 0], 1.0, shear=[slant, 0.0], center=[0, 0])
        case "ShearY":
            slant = math.degrees(math.atan(strength))
            return tv.affine(images, 0.0, [0, 0], 1.0, shear=[0.0, slant], center=[0, 0])
        case "TranslateX":
            return tv.affine(images, 0.0, [int(strength), 0], 1.0, shear=[0.0, 0.0])
        case "TranslateY":
            return tv.affine(images, 0.0, [0, int(strength)], 1.0, shear=[0.0, 0.0])
        case "Rotate":
            return tv.rotate(images, strength)
        case "Brightness":
            return tv.adjust_brightness(images, 1 + strength)
        case "Color":
            return tv.adjust_saturation(images, 1 + strength)
        case "Contrast":
            return tv.adjust_contrast(images, 1 + strength)
        case "Sharpness":
            return tv.adjust_sharpness(images, 1 + strength)
        case "Posterize":
            return tv.posterize(images, int(strength))
        case "Solarize":
            return tv.solarize(images, 255 * strength)
        case "AutoContrast":
            return tv.autocontrast(images)
        case "Equalize":
            return tv.equalize(images)
        case "Invert":
            return tv.invert(images)
    return images


def _number(below: int, draws: torch.Generator) -> int:
    return int(torch.randint(below, (), generator=draws))


def _signed(name: str, strength: float, draws: torch.Generator) -> Operation:
    """Return an operation, with a negative strength in half of the cases if the operation has signs."""
    negative = name in SIGNED and bool(torch.rand((), generator=draws) <= 0.5)
    return Operation(name, -strength if negative else strength)


@functools.cache
def _learned_pairs() -> Any:
    from torchvision.transforms import v2

    return v2.AutoAugment(v2.AutoAugmentPolicy.CIFAR10)._policies  # torchvision offers its table nowhere else


def _grouped(
    of_place: list[Operation],
) -> tuple[dict[int, Operation], dict[int, Operation], dict[Operation, list[int]]]:
    """Group the images of a batch by the operation that each takes.

    Returns:
        The operations that move pixels, by image; the operations by value, by image; and for each other operation, the
        images that have it.
    """
    moved: dict[int, Operation] = {}
    mapped: dict[int, Operation] = {}
    others: dict[Operation, list[int]] = {}
    for row, operation in enumerate(of_place):
        if operation.name in MOVES:
            moved[row] = operation
        elif operation.name in BY_VALUE:
            mapped[row] = operation
        elif operation != IDENTITY:
            others.setdefault(operation, []).append(row)
    return moved, mapped, others


def _move(images: Tensor, operations: list[Operation]) -> Tensor:
    """Move the pixels of images [n, channels, H, W], each by its operation."""
    size = images.shape[2:]
    sources = torch.stack([_sources(operation, *size, images.device) for operation in operations]).long()  # [n, H * W]
    pixels = F.pad(images.flatten(2), (1, 0))  # source 0 is black
    return pixels.gather(2, sources[:, None].expand(-1, images.shape[1], -1)).view(images.shape)


def _map_values(images: Tensor, operations: list[Operation]) -> Tensor:
    """Map the values of images [n, channels, H, W], each by its operation."""
    values = torch.stack([_values(operation, images.device) for operation in operations])  # [n, 256]
    return values.gather(1, images.flatten(1).long()).view(images.shape)


@functools.lru_cache(maxsize=TABLES)
def _sources(operation: Operation, height: int, width: int, device: torch.device) -> Tensor:
    """Return the source of each pixel under an operation that moves pixels, int32 [H * W].

    Pixels count from 1; 0 lies outside of the image.
    """
    pixels = torch.arange(1, height * width + 1, dtype=torch.float32).view(1, 1, height, width)
    return operate(pixels, operation).flatten().int().to(device)


@functools.lru_cache(maxsize=TABLES)
def _values(operation: Operation, device: torch.device) -> Tensor:
    """Return the results of an operation by value for the values 0 to 255, uint8 [256]."""
    return operate(torch.arange(256, dtype=torch.uint8).view(1, 1, 1, 256), operation).flatten().to(device)
