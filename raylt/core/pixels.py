"""Features of single pixels, for methods that train classifiers on them; and what pixels without a label teach."""

import torch
import torch.nn.functional as F
from torch import Tensor

from raylt.data.samples import IGNORED


def pixel_features(z: Tensor, y: Tensor, per_class: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Features and labels of at most `per_class` pixels of each class that an image shows, drawn at random.

    A pixel's feature is interpolated as a `PixelModel` interpolates its logits, so the classifier gives the same logits
    for it. One feature per image is its own: z [B, d] and y [B] come back as they are.

    Args:
        z: feature maps [B, d, h, w].
        y: label maps int64 [B, H, W], negative where there is no label.
        generator: on the device of `z`.

    Returns:
        z [n, d] and y int64 [n], image by image, each class by class.
    """
    if y.ndim == 1:
        return z, y
    height, width = y.shape[1:]
    labels = y.flatten(1)                                                           # [B, H * W]
    # sorted by class and a random number, so the first of each class are a random sample of it
    draws = torch.rand(labels.shape, generator=generator, device=generator.device, dtype=torch.float64)
    order = (labels + draws).argsort(1)
    chosen_z, chosen_y = [], []
    for image, its_labels, its_order in zip(z, labels, order, strict=True):
        ordered = its_labels[its_order]
        sizes = ordered.unique_consecutive(return_counts=True)[1]
        starts = sizes.cumsum(0) - sizes
        rank = torch.arange(len(ordered), device=y.device) - starts.repeat_interleave(sizes)
        kept = (rank < per_class) & (ordered >= 0)
        places, chosen = its_order[kept], ordered[kept]
        rows, columns = places // width, places % width
        grid = torch.stack([(2 * columns + 1) / width - 1, (2 * rows + 1) / height - 1], dim=-1).to(z.dtype)
        sampled = F.grid_sample(image[None], grid[None, None], mode="bilinear", padding_mode="border",
                                align_corners=False)                                # [1, d, 1, n]
        chosen_z.append(sampled[0, :, 0].T)
        chosen_y.append(chosen)
    return torch.cat(chosen_z), torch.cat(chosen_y)


def labelled_cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy of the pixels that have a label; 0, without a gradient, of a batch in which none has.

    Args:
        logits: [B, C, H, W].
        y: int64 [B, H, W] with IGNORED.

    Returns:
        The mean over the pixels that count, a scalar.
    """
    return F.cross_entropy(logits, y, ignore_index=IGNORED, reduction="sum") / (y != IGNORED).sum().clamp(min=1)


def back_cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy where a pixel without a label is of one of the classes that the batch's labels do not show.

    Its probability is the sum of theirs (BackCE of FedSeg, Miao et al., CVPR 2023, as its code takes the absent
    classes: of the batch). Where the labels show all classes such pixels are left out. Nothing here waits for a GPU.

    Args:
        logits: [B, C, H, W].
        y: int64 [B, H, W] with IGNORED.

    Returns:
        The mean over the pixels that count, a scalar.
    """
    classes, none = logits.shape[1], y == IGNORED
    with_none = torch.where(none, classes, y)
    shows = torch.zeros(classes + 1, dtype=torch.bool, device=y.device).index_fill_(0, with_none.flatten(), True)
    shows, all_shown = shows[:classes], shows[:classes].all()
    log_p = F.log_softmax(logits.float(), 1)
    # where all are shown nothing is masked: the logarithm of no class at all has no gradient
    hidden = (shows & ~all_shown)[:, None, None]
    absent = log_p.masked_fill(hidden, -torch.inf).logsumexp(1, keepdim=True)
    target = torch.where(none & all_shown, IGNORED, with_none)
    return F.nll_loss(torch.cat([log_p, absent], 1), target, ignore_index=IGNORED)
