"""The network `small` with normalised features, for sfd_normalised.yaml beside this file."""

import torch.nn.functional as F
from torch import Tensor, nn

import raylt
from raylt.models import build_model


class Normalise(nn.Module):
    """Scales each feature vector to one length.

    Args:
        length: Euclidean length of the result.
    """

    def __init__(self, length: float):
        super().__init__()
        self.length = length

    def forward(self, z: Tensor) -> Tensor:
        return self.length * F.normalize(z, dim=1)


def small_unit(classes: int, shape: tuple[int, int, int]) -> raylt.SplitModel:
    """Build `small` with features of length 1."""
    return _normalised(classes, shape, 1)


def small_sphere(classes: int, shape: tuple[int, int, int]) -> raylt.SplitModel:
    """Build `small` with features of length 8 = sqrt(d), the usual length of a draw from N(0, I)."""
    return _normalised(classes, shape, 8)


def _normalised(classes: int, shape: tuple[int, int, int], length: float) -> raylt.SplitModel:
    model = build_model("small", classes, shape)
    model.encoder.add_module("normalise", Normalise(length))
    return model


raylt.register(small_unit, kind="model")
raylt.register(small_sphere, kind="model")
