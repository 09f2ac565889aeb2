"""Measures of an attack: the similarity of reconstructions, or the share of correct guesses."""

import importlib.util
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from raylt.errors import ConfigError

MIN_GAUSSIAN_SIDE = 16  # In pixels. Smaller images have no room for the Gaussian window of 11 pixels.


class Nearness(NamedTuple):
    """Mean similarity measures of reconstructions of images in [0, 1].

    Attributes:
        ssim: Structural similarity; 1 for identical images.
        psnr: Peak signal-to-noise ratio, in dB.
        mae: Mean absolute error.
        identified: Share of the reconstructions that are closer to their own image than to every other image of the
            same class. An average of the class resembles all its images and has a low share. None if there are no
            candidates.
    """

    ssim: float
    psnr: float
    mae: float
    identified: float | None = None


@dataclass(frozen=True)
class AttackFinding:
    """The result of one attack.

    Attributes:
        upload: The part of the uploads that was attacked.
        what: Description of the attack.
        count: Number of reconstructions or guesses.
        reached: Similarity of the reconstructions; None for guesses.
        control: Similarity for an attack with shuffled pairs; None for guesses.
        average: Similarity of the mean outside image of the true class, which needs no upload.
        guessed: Balanced accuracy of the guesses, 1/2 by chance; None for reconstructions.
        shown: True images, reconstructions and the nearest training images, [3, columns, channels, H, W].
    """

    upload: str
    what: str
    count: int
    reached: Nearness | None = None
    control: Nearness | None = None
    average: Nearness | None = None
    guessed: float | None = None
    shown: Tensor | None = None


def check_measures() -> None:
    """Check that the library that computes the measures is installed.

    Raises:
        ConfigError: It is not installed.
    """
    if importlib.util.find_spec("torchmetrics") is None:
        raise ConfigError(
            "raylt attack: torchmetrics is not installed. Run pip install '.[attack]' in the clone.",
            code="config.missing-package",
            name="torchmetrics",
        )


def nearness(
    made: Tensor,
    true: Tensor,
    candidates: Tensor | None = None,
    labels: Tensor | None = None,
    candidate_labels: Tensor | None = None,
) -> Nearness:
    """Measure how similar reconstructions are to true images.

    SSIM uses torchmetrics' Gaussian windows of 11 pixels, or uniform windows of 5 pixels for images below 16 pixels.

    Args:
        made: Reconstructions, [n, channels, H, W].
        true: True images in [0, 1], [n, channels, H, W].
        candidates: All images that a reconstruction may show, including the true ones, [N, channels, H, W].
        labels: Classes of the true images, [n].
        candidate_labels: Classes of the candidates, [N].
    """
    from torchmetrics.functional.image import (  # pyright: ignore[reportMissingImports]
        peak_signal_noise_ratio,
        structural_similarity_index_measure,
    )

    made = made.clamp(0, 1)
    window = {"gaussian_kernel": False, "kernel_size": 5} if min(true.shape[-2:]) < MIN_GAUSSIAN_SIDE else {}
    ssim = structural_similarity_index_measure(made, true, data_range=1.0, **window)
    psnr = peak_signal_noise_ratio(made, true, data_range=1.0, reduction="elementwise_mean", dim=(1, 2, 3))
    assert isinstance(ssim, Tensor)
    mae = (made - true).abs().mean()
    identified = None
    if candidates is not None and labels is not None and candidate_labels is not None:
        distances = torch.cdist(made.flatten(1), candidates.flatten(1))
        distances = distances.masked_fill(labels[:, None] != candidate_labels[None], torch.inf)
        nearest = candidates[distances.argmin(1)]
        identified = (nearest == true).flatten(1).all(1).float().mean().item()
    return Nearness(ssim.item(), psnr.item(), mae.item(), identified)
