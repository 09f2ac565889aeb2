"""Formats shares, their intervals and numbers of bytes as text."""

from raylt.metrics import FEW_SAMPLES, wilson_interval


def percent(value: float | None) -> str:
    """Return a share as text in percent with the sign, or "-" for None."""
    return "-" if value is None else f"{in_percent(value)} %"


def in_percent(value: float | None) -> str:
    """Return a share as text in percent without the sign, or "-" for None."""
    return "-" if value is None else f"{100 * value:.2f}"


def with_images(value: float | None, images: int | None, task: str) -> str:
    """Return a share in percent with the number of test images.

    If there are few images, the confidence interval follows, except for a share of pixels, which is not binomial.

    Args:
        value: Share in [0, 1]; None if nothing was evaluated.
        images: Number of test images; None if unknown.
        task: Kind of the task, "classification" or "segmentation".
    """
    if value is None or not images:
        return percent(value)
    few = f", {interval_text(value, images)}" if images < FEW_SAMPLES and task == "classification" else ""
    return f"{percent(value)} (n = {images}{few})"


def interval_text(value: float, images: int) -> str:
    """Return Wilson's 95 % confidence interval of an accuracy as text, in percent."""
    low, high = wilson_interval(value, images)
    return f"{100 * low:.1f} to {100 * high:.1f} %"


def size(count: float) -> str:
    """Return a number of bytes as text with a binary unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
