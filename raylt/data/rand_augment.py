"""Augmentation `rand_augment` (Cubuk et al., NeurIPS 2020) of whole image batches.

Two of torchvision's 14 operations are applied to each image, as in `v2.RandAugment()`: with the same draws, the same
strengths and, to the bit, the same pixels. In torchvision, one image after the other takes longer than a step of a
small network. Here an operation is applied at once to all images that have it in the same position. Two kinds of
operations use tables that torchvision's operation fills once: operations that move pixels by nearest neighbour, a table
with the source of each pixel, and operations on single values, a table of 256 values.
"""

import functools
import math

import torch
import torch.nn.functional as F
from torch import Tensor

TAKEN = 2  # number of operations per image
BIN, BINS = 9, 31  # chosen bin of the range of strengths, and the number of bins
# Operations in torchvision's order, which their drawn numbers refer to.
MOVES = ("ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate")
BLENDS = ("Brightness", "Color", "Contrast", "Sharpness")
OPERATIONS = ("Identity", *MOVES, *BLENDS, "Posterize", "Solarize", "AutoContrast", "Equalize")
SIGNED = (*MOVES, *BLENDS)  # operations whose strength is negative in half of the cases
BY_VALUE = ("Brightness", "Posterize", "Solarize")
STRONGEST = {"ShearX": 0.3, "ShearY": 0.3, "Rotate": 30.0} | dict.fromkeys(BLENDS, 0.9)


def rand_augment(x: Tensor, y: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Apply two random operations to each image.

    Args:
        x: Images [B, H, W, channels] in 0..255 with one or three channels; floats are rounded.
        y: Labels; returned unchanged.
        generator: Random generator on the device of `x`; one of its numbers seeds the draws.

    Returns:
        uint8 [B, H, W, channels], and the labels.
    """
    return apply_operations(x, draw_operations(len(x), generator)), y


def draw_operations(batch: int, generator: torch.Generator) -> Tensor:
    """Draw the operations of each image, one image after the other, with the numbers that torchvision would draw.

    Returns:
        Codes of the operations in the order in which they are applied, int64 [B, 2], on the CPU. A code is twice the
        number of an operation, plus 1 if its strength is negative.
    """
    seed = int(torch.randint(2**62, (), generator=generator, device=generator.device))
    draws = torch.Generator().manual_seed(seed)
    codes = []
    for _ in range(batch * TAKEN):
        number = int(torch.randint(len(OPERATIONS), (), generator=draws))
        is_negative = OPERATIONS[number] in SIGNED and bool(torch.rand((), generator=draws) <= 0.5)
        codes.append(2 * number + is_negative)
    return torch.tensor(codes, dtype=torch.int64).view(batch, TAKEN)


def apply_operations(x: Tensor, codes: Tensor) -> Tensor:
    """Apply operations to images [B, H, W, channels] in 0..255; return uint8 of the same shape.

    Args:
        x: The images.
        codes: Codes of the operations of each image, as drawn by `draw_operations`.
    """
    images = x if x.dtype == torch.uint8 else x.round().clamp(0, 255).to(torch.uint8)
    images = images.permute(0, 3, 1, 2).clone(memory_format=torch.contiguous_format)
    for of_place in codes.unbind(1):
        moved, mapped, others = _grouped(of_place.tolist())
        if moved:
            images[list(moved)] = _move(images[list(moved)], list(moved.values()))
        if mapped:
            images[list(mapped)] = _map_values(images[list(mapped)], list(mapped.values()))
        for code, rows in others.items():
            images[rows] = operate(images[rows], code)
    return images.permute(0, 2, 3, 1).contiguous()


def operate(images: Tensor, code: int) -> Tensor:
    """Apply torchvision's operation with this code to images [n, channels, H, W], with RandAugment's strength."""
    from torchvision.transforms.v2 import functional as tv  # imported here because it is slow, and few runs need it

    name, height, width = OPERATIONS[code // 2], *images.shape[2:]
    strength = _strength(name, height, width) * (-1 if code % 2 else 1)
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
            return tv.posterize(images, round(8 - 4 * BIN / (BINS - 1)))
        case "Solarize":
            return tv.solarize(images, 255 * float(torch.linspace(1, 0, BINS)[BIN]))
        case "AutoContrast":
            return tv.autocontrast(images)
        case "Equalize":
            return tv.equalize(images)
    return images


def _strength(name: str, height: int, width: int) -> float:
    """Return the strength of a signed operation in the chosen bin, in float32; 0 for other operations."""
    side = {"TranslateX": width, "TranslateY": height}.get(name, 0)
    return float(torch.linspace(0, STRONGEST.get(name, 150 / 331 * side), BINS)[BIN])


def _grouped(codes: list[int]) -> tuple[dict[int, int], dict[int, int], dict[int, list[int]]]:
    """Group the images of a batch by the operation that each takes.

    Returns:
        The codes of operations that move pixels, by image; the codes of operations by value, by image; and for each
        other code, the images that have it.
    """
    moved: dict[int, int] = {}
    mapped: dict[int, int] = {}
    others: dict[int, list[int]] = {}
    for row, code in enumerate(codes):
        name = OPERATIONS[code // 2]
        if name in MOVES:
            moved[row] = code
        elif name in BY_VALUE:
            mapped[row] = code
        elif name != "Identity":
            others.setdefault(code, []).append(row)
    return moved, mapped, others


def _move(images: Tensor, codes: list[int]) -> Tensor:
    """Move the pixels of images [n, channels, H, W], each by its operation."""
    sources = _sources(*images.shape[2:], images.device)[codes].long()  # [n, H * W]
    pixels = F.pad(images.flatten(2), (1, 0))  # source 0 is black
    return pixels.gather(2, sources[:, None].expand(-1, images.shape[1], -1)).view(images.shape)


def _map_values(images: Tensor, codes: list[int]) -> Tensor:
    """Map the values of images [n, channels, H, W], each by its operation."""
    values = _values(images.device)[codes]  # [n, 256]
    return values.gather(1, images.flatten(1).long()).view(images.shape)


@functools.lru_cache(maxsize=2)
def _sources(height: int, width: int, device: torch.device) -> Tensor:
    """Return the source of each pixel under the operations that move pixels, int32 [codes, H * W].

    Pixels count from 1; 0 lies outside of the image. Rows of other operations are 0.
    """
    pixels = torch.arange(1, height * width + 1, dtype=torch.float32).view(1, 1, height, width)
    sources = torch.zeros(2 * len(OPERATIONS), height * width, dtype=torch.int32)
    for code in range(len(sources)):
        if OPERATIONS[code // 2] in MOVES:
            sources[code] = operate(pixels, code).flatten().int()
    return sources.to(device)


@functools.cache
def _values(device: torch.device) -> Tensor:
    """Return the results of the operations by value for the values 0 to 255, uint8 [codes, 256]; 0 for others."""
    values = torch.zeros(2 * len(OPERATIONS), 256, dtype=torch.uint8)
    for code in range(len(values)):
        if OPERATIONS[code // 2] in BY_VALUE:
            values[code] = operate(torch.arange(256, dtype=torch.uint8).view(1, 1, 1, 256), code).flatten()
    return values.to(device)
