"""What a client has of a frozen image-text teacher: features of its images."""

from torch import Tensor
from torch.nn import functional as F

from raylt.core.client import Client
from raylt.models.clip import open_teacher


def encoded(client: Client, teacher: str, projected: bool = True) -> Tensor:
    """The teacher's features of a client's images, float16 [n, w], in the order of its samples.

    They are encoded where this process has not got them, in batches and without augmentation, and kept in the client's
    cache: never in a checkpoint, and the same wherever they are computed again.

    Args:
        teacher: its name.
        projected: whether in the joint space, of unit length; else what comes before the projection.
    """
    if "teacher" not in client.cache:
        source = open_teacher(teacher)
        h = source.images(client.samples)
        if projected:
            projection = source.projection(client.device)
            h = F.normalize(h if projection is None else h @ projection, dim=1)
        client.cache["teacher"] = h.half()
    return client.cache["teacher"]
