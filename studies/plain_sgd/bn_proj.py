"""A small network with BatchNorm and CLIP's length of features, for fedsm_plain_sgd.yaml beside this file."""

from torch import nn

import raylt
from raylt.models import build_model


def bn_proj(classes: int, shape: tuple[int, int, int]) -> raylt.SplitModel:
    """Build `small` with a third stage of 128 channels, and a linear layer to d = 512, as in `resnet8_proj`."""
    encoder = build_model("small", classes, shape).encoder
    layers = [encoder.stage1, encoder.stage2]
    layers.append(
        nn.Sequential(
            nn.Conv2d(64, 128, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(128), nn.ReLU(inplace=True)
        )
    )
    return raylt.SplitModel(nn.Sequential(*layers, encoder.pool, nn.Linear(128, 512)), 512, classes)


raylt.register(bn_proj, kind="model")
