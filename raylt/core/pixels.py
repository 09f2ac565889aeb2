"""Features of single pixels, for methods that train classifiers on features."""

import torch
import torch.nn.functional as F
from torch import Tensor


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
