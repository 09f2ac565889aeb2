"""Small convolutional networks: MuPFL's network for Fashion-MNIST, and one for tests and the 8x8 digits.

As in the residual networks, `stage1` and `stage2` end with an activation, and `pool` computes the features.
"""

from collections import OrderedDict

from torch import nn

from raylt.models.split import SplitModel


def cnn(classes: int, shape: tuple[int, int, int]) -> SplitModel:
    """Build a CNN of two 5x5 convolutions and a linear layer.

    d = 1024 for 28x28 images, 62,346 parameters with C = 10. MuPFL does not state the widths; 32 and 64 are ours.
    """
    return SplitModel(*_convolutions(shape), classes)


def cnn_proj(classes: int, shape: tuple[int, int, int]) -> SplitModel:
    """Build `cnn` with an extra linear layer that maps its features to CLIP's d = 512, as in `resnet8_proj`."""
    encoder, dim = _convolutions(shape)
    encoder.add_module("add_mlp", nn.Linear(dim, 512))
    return SplitModel(encoder, 512, classes)


def small(classes: int, shape: tuple[int, int, int]) -> SplitModel:
    """Build a CNN of two 3x3 convolutions with BatchNorm and global average pooling; d = 64."""
    encoder = nn.Sequential(
        OrderedDict(
            stage1=nn.Sequential(
                nn.Conv2d(shape[2], 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(inplace=True)
            ),
            stage2=nn.Sequential(
                nn.Conv2d(32, 64, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True)
            ),
            pool=nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        )
    )
    return SplitModel(encoder, 64, classes)


def _convolutions(shape: tuple[int, int, int]) -> tuple[nn.Sequential, int]:
    """Build the encoder of `cnn`; return the encoder and the length of its features."""
    height, width, channels = shape
    encoder = nn.Sequential(
        OrderedDict(
            stage1=nn.Sequential(nn.Conv2d(channels, 32, 5), nn.ReLU(inplace=True)),
            stage2=nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(32, 64, 5), nn.ReLU(inplace=True)),
            pool=nn.Sequential(nn.MaxPool2d(2), nn.Flatten()),
        )
    )
    return encoder, 64 * _side(height) * _side(width)


def _side(side: int) -> int:
    """Return the image side after two rounds of an unpadded 5x5 convolution and 2x pooling."""
    return ((side - 4) // 2 - 4) // 2
