"""What an encoder makes of a client's samples."""

import torch
from torch import Tensor

from raylt.core.client import Client
from raylt.core.pixels import pixel_features
from raylt.core.training import autocast, take_statistics
from raylt.data.samples import Augmentation
from raylt.models.split import clipped


@torch.no_grad()
def features(client: Client, augment: Augmentation | None = None, pixels: int = 16) -> tuple[Tensor, Tensor]:
    """The features of all of a client's samples under its model as it is, in evaluation mode and the samples' order;
    with `privacy.epsilon` none is longer than `privacy.clip`. A client that never trained and keeps its running
    statistics takes these first: features under those of a new model are no class's.

    Args:
        augment: drawn from the call's own generator; by default the images are taken as they are.
        pixels: of an image with a label map, so many features of each class that it shows, at random places, drawn
            from the call's own generator.

    Returns:
        z float32 [n, d] and y int64 [n], on the client's device.
    """
    take_statistics(client)
    encoder, size = client.model.encoder.eval(), client.config.evaluation.batch

    def encoded(x: Tensor) -> Tensor:
        with autocast(client):                      # the encoder alone: crops and means are of full precision
            return encoder(x).float()

    parts = [pixel_features(encoded(batch.x), batch.y, pixels, client.noise)
             for batch in client.samples.in_order(size, augment, client.noise)]
    z, y = zip(*parts, strict=True)
    longest = client.config.privacy.longest
    return torch.cat(z) if longest is None else clipped(torch.cat(z), longest), torch.cat(y)
