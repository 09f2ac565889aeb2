"""Features of a client's samples, from the client's encoder and from a frozen image-text teacher."""

import torch
from torch import Tensor
from torch.nn import functional as F

from raylt.core.client import Client, pixel_features
from raylt.core.training.sgd import autocast, take_statistics
from raylt.data.samples import Augmentation
from raylt.models.clip import open_teacher
from raylt.models.split import clipped


@torch.no_grad()
def features(client: Client, augment: Augmentation | None = None, pixels: int = 16) -> tuple[Tensor, Tensor]:
    """Compute the features of all samples of a client, in evaluation mode and sample order.

    With `privacy.epsilon`, features are clipped to the length `privacy.clip`. A client that never trained and keeps its
    running statistics computes them from its samples first: with the statistics of a new model, features do not
    separate classes.

    Args:
        client: The client.
        augment: Augmentation, which draws from the call's own generator; by default the images are not augmented.
        pixels: Maximum number of features per class and image for label maps, at random positions that are drawn from
            the call's own generator.

    Returns:
        z float32 [n, d] and y int64 [n], on the client's device.
    """
    take_statistics(client)
    encoder, size = client.model.encoder.eval(), client.config.evaluation.batch

    def encode(x: Tensor) -> Tensor:
        with autocast(client):  # only the encoder: crops and means have full precision
            return encoder(x).float()

    parts = [
        pixel_features(encode(batch.x), batch.y, pixels, client.noise)
        for batch in client.samples.in_order(size, augment, client.noise)
    ]
    z, y = zip(*parts, strict=True)
    longest = client.config.privacy.longest
    all_z = torch.cat(z)
    return all_z if longest is None else clipped(all_z, longest), torch.cat(y)


def teacher_features(client: Client, teacher: str, projected: bool = True) -> Tensor:
    """Return the teacher's features of a client's images, float16 [n, w], in sample order.

    The first call in a process encodes the images in batches, without augmentation, and keeps the features in the
    client's cache. They are never in a checkpoint: every process computes the same values again. If clients hold the
    features of a frozen encoder that is the teacher's image tower, these are the teacher's features.

    Args:
        client: The client.
        teacher: The teacher's name.
        projected: Whether to return features of unit length in the joint space, or the features before the projection.
    """
    key = f"teacher {teacher}" if projected else f"teacher {teacher}, not projected"
    if key not in client.cache:
        source = open_teacher(teacher)
        if client.samples.encoded and not teacher.startswith("npz:"):  # features of the teacher's own tower
            h = client.samples.x[:, 0]
        else:
            h = source.images(client.samples)
            projection = source.projection(client.device) if projected else None
            h = h if projection is None else h @ projection
        client.cache[key] = (F.normalize(h, dim=1) if projected else h).half()
    return client.cache[key]
