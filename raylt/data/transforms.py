"""Augmentations of torchvision (transforms.v2), drawn anew for each image, and several after one another."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from raylt.recordable import is_recordable

Augmentation = Callable[[Tensor, Tensor, torch.Generator], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class EachImage:
    """A transform of torchvision on every image of a batch by itself, as on single images in a data loader.

    Attributes:
        make: gives the transform, of uint8 [channels, H, W].
        moves: whether it may move pixels, so that label maps would no longer fit.
    """

    make: Callable[[], Callable[[Tensor], Tensor]]
    moves: bool

    def __call__(self, x: Tensor, y: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Varies images.

        Args:
            x: [B, H, W, channels] in 0..255; what is not uint8 is rounded.
            y: stays as it is.
            generator: on the device of `x`; torchvision's own draws follow from one of its numbers.

        Returns:
            uint8 [B, H, W, channels], and the labels.
        """
        transform = self.make()
        images = x if x.dtype == torch.uint8 else x.round().clamp(0, 255).to(torch.uint8)
        seed = int(torch.randint(2**62, (), generator=generator, device=generator.device))
        with torch.random.fork_rng(devices=[x.device] if x.is_cuda else []):    # training goes on from where it was
            torch.manual_seed(seed)
            varied = [transform(image) for image in images.permute(0, 3, 1, 2)]
        return torch.stack(varied).permute(0, 2, 3, 1).contiguous(), y


@dataclass(frozen=True)
class InTurn:
    """Several augmentations, one after another."""

    steps: tuple[Augmentation, ...]

    @property
    def recordable(self) -> bool:
        return all(map(is_recordable, self.steps))

    def __call__(self, x: Tensor, y: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        for step in self.steps:
            x, y = step(x, y, generator)
        return x, y


def in_turn(steps: Sequence[Augmentation | None]) -> Augmentation | None:
    """The augmentations one after another; None for none."""
    given = tuple(step for step in steps if step is not None)
    return None if not given else given[0] if len(given) == 1 else InTurn(given)


def needs_grey_or_colour(augmentation: Augmentation | None) -> bool:
    """Whether it is for images of one channel or three alone, as torchvision's transforms are."""
    return bool(_of_torchvision(augmentation))


def moves_pixels(augmentation: Augmentation | None) -> bool:
    """Whether it moves pixels and leaves label maps where they were."""
    return any(step.moves for step in _of_torchvision(augmentation))


def _of_torchvision(augmentation: Augmentation | None) -> list[EachImage]:
    steps = augmentation.steps if isinstance(augmentation, InTurn) else (augmentation,)
    return [step for step in steps if isinstance(step, EachImage)]


def _color_jitter() -> Any:
    from torchvision.transforms import v2  # slow to import, and most runs need none of it
    return v2.ColorJitter(brightness=0.4, contrast=0.4, saturation=0.4, hue=0.1)


def _rand_augment() -> Any:
    from torchvision.transforms import v2
    return v2.RandAugment()


def _trivial_augment() -> Any:
    from torchvision.transforms import v2
    return v2.TrivialAugmentWide()


def _auto_augment() -> Any:
    from torchvision.transforms import v2
    return v2.AutoAugment(v2.AutoAugmentPolicy.CIFAR10)


# Howard (arXiv 2013) with the usual strengths; Cubuk et al. (NeurIPS 2020); Mueller and Hutter (ICCV 2021);
# Cubuk et al. (CVPR 2019), as searched on CIFAR-10
color_jitter = EachImage(_color_jitter, moves=False)
rand_augment = EachImage(_rand_augment, moves=True)
trivial_augment = EachImage(_trivial_augment, moves=True)
auto_augment = EachImage(_auto_augment, moves=True)
