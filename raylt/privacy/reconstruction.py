"""Measures of an attack: the similarity of reconstructions, or the share of right guesses."""

import importlib.util
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from raylt.errors import ConfigError

SMALL = 16  # images of a smaller side have no room for the Gaussian window of 11 pixels


class Nearness(NamedTuple):
    """Mean similarity measures of reconstructions of images in [0, 1].

    Attributes:
        ssim: structural similarity; 1 is the same image.
        psnr: peak signal to noise ratio, in dB.
        mae: mean absolute error.
        identified: share of the reconstructions that are closer to their own image than to every other image of the
            same class. An average of the class resembles all its images and has a low share. None without others.
    """

    ssim: float
    psnr: float
    mae: float
    identified: float | None = None


@dataclass(frozen=True)
class AttackFinding:
    """The result of one attack.

    Attributes:
        upload: the part of the uploads that was attacked.
        what: a description of the attack.
        count: number of reconstructions, or of guesses.
        reached: how close the reconstructions are; None for guesses.
        control: the same of an attack that was trained on shuffled pairs; None where nothing is trained.
        average: the same of the mean outside image of the true class, which needs no upload.
        guessed: balanced share of the guesses that are right, 1/2 by chance; None for reconstructions.
        shown: true images, reconstructions and the nearest training images, [3, columns, channels, H, W].
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
    """Raise a ConfigError if the library that computes the measures is not installed."""
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
    """Measure how close reconstructions [n, channels, H, W] are to true images in [0, 1] of the same shape.

    Windows are torchmetrics' Gaussian ones of 11 pixels, and uniform ones of 5 for images below 16 pixels.

    Args:
        candidates: all N images that a reconstruction may be of, with the true ones.
        labels: classes [n] of the true images.
        candidate_labels: classes [N] of the candidates.
    """
    from torchmetrics.functional.image import (  # pyright: ignore[reportMissingImports]
        peak_signal_noise_ratio,
        structural_similarity_index_measure,
    )

    made = made.clamp(0, 1)
    window = {"gaussian_kernel": False, "kernel_size": 5} if min(true.shape[-2:]) < SMALL else {}
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
