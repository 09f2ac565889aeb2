"""How near reconstructions come to images."""

import importlib.util
from typing import NamedTuple

import torch
from torch import Tensor

from raylt.errors import ConfigError

SMALL = 16          # images of a smaller side have no room for the Gaussian window of 11 pixels


class Nearness(NamedTuple):
    """Means over images in [0, 1]: structural similarity (1: the same), peak signal to noise in dB, absolute error.

    Attributes:
        told: share of the reconstructions that lie nearer to their own image than to every other of the same class:
            an average of the class, which looks like all of them, tells few. None where no other image is known.
    """

    ssim: float
    psnr: float
    mae: float
    told: float | None = None


def check_measures() -> None:
    """Raises a ConfigError where the library that measures is missing."""
    if importlib.util.find_spec("torchmetrics") is None:
        raise ConfigError("raylt attack: needs torchmetrics; pip install 'raylt[attack]'")


def nearness(made: Tensor, true: Tensor, others: Tensor | None = None, labels: Tensor | None = None,
             other_labels: Tensor | None = None) -> Nearness:
    """Figures of reconstructions [n, channels, H, W] of images in [0, 1] of the same shape.

    Windows are torchmetrics' Gaussian ones of 11 pixels, and uniform ones of 5 for images below 16 pixels.

    Args:
        others: all images that a reconstruction may be of, the true ones among them; with their labels [N], and the
            labels [n] of the true ones.
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
    told = None
    if others is not None and labels is not None and other_labels is not None:
        distances = torch.cdist(made.flatten(1), others.flatten(1))
        distances = distances.masked_fill(labels[:, None] != other_labels[None], torch.inf)
        nearest = others[distances.argmin(1)]
        told = (nearest == true).flatten(1).all(1).float().mean().item()
    return Nearness(ssim.item(), psnr.item(), (made - true).abs().mean().item(), told)
