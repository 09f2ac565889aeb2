"""Residual networks: CReFF's ResNet-8, ResNet-18 and ResNet-34 for small images, the narrow ResNet-32, and ResNet-50.

The stages of every encoder are called `stage1`, `stage2`, ...; the average pooling before the features is `pool`.
"""

from collections import OrderedDict
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from raylt.models.split import SplitModel
from raylt.recordability import recordable


@recordable
class BasicBlock(nn.Module):
    """Residual block of two 3x3 convolutions and a shortcut, which is a 1x1 convolution if the shape changes."""

    ends_in_relu: ClassVar[bool] = True

    def __init__(self, before: int, width: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(before, width, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.shortcut = (
            nn.Identity()
            if before == width and stride == 1
            else nn.Sequential(nn.Conv2d(before, width, 1, stride, bias=False), nn.BatchNorm2d(width))
        )

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu_(self.bn1(self.conv1(x)))
        return F.relu_(self.bn2(self.conv2(h)) + self.shortcut(x))


def resnet8(classes: int, shape: tuple[int, int, int]) -> SplitModel:
    """Build CReFF's ResNet-8: three stages of one block (widths 64, 128, 256), d = 256.

    It has 1,227,594 parameters with 10 classes.
    """
    return SplitModel(_encoder(shape[2], (64, 128, 256), blocks=(1, 1, 1)), 256, classes)


def resnet8_proj(classes: int, shape: tuple[int, int, int]) -> SplitModel:
    """Build ResNet-8 with an extra linear layer that maps its features to CLIP's d = 512, for CLIP2FL and FedSM."""
    encoder = _encoder(shape[2], (64, 128, 256), blocks=(1, 1, 1))
    encoder.add_module("add_mlp", nn.Linear(256, 512))
    return SplitModel(encoder, 512, classes)


def resnet18(classes: int, shape: tuple[int, int, int]) -> SplitModel:
    """Build SFD's ResNet-18: 3x3 stem without max-pooling, d = 512; 11,173,962 parameters with 10 classes."""
    return SplitModel(_encoder(shape[2], (64, 128, 256, 512), blocks=(2, 2, 2, 2)), 512, classes)


def resnet32(classes: int, shape: tuple[int, int, int]) -> SplitModel:
    """Build the ResNet-32 of CIFAR benchmarks: three stages of five blocks, widths 16, 32 and 64, d = 64.

    Shortcuts are 1x1 convolutions if the shape changes, as in the other networks of this module. For CIFAR, He et al.
    pad instead, which saves 2,752 of the 466,906 parameters (10 classes).
    """
    return SplitModel(_encoder(shape[2], (16, 32, 64), blocks=(5, 5, 5)), 64, classes)


def resnet34(classes: int, shape: tuple[int, int, int]) -> SplitModel:
    """Build ResNet-34 for small images: 3x3 stem without max-pooling, d = 512.

    It has 21,282,122 parameters with 10 classes.
    """
    return SplitModel(_encoder(shape[2], (64, 128, 256, 512), blocks=(3, 4, 6, 3)), 512, classes)


def resnet50(classes: int, shape: tuple[int, int, int]) -> SplitModel:
    """Build torchvision's ResNet-50 (7x7 stem) with random weights, d = 2048."""
    from torchvision.models import resnet  # imported here because it is slow, and no other model needs it

    net = resnet.resnet50(weights=None)
    if shape[2] != 3:
        net.conv1 = nn.Conv2d(shape[2], 64, 7, stride=2, padding=3, bias=False)
        _draw_convolutions(net.conv1)
    encoder = nn.Sequential(
        OrderedDict(
            stem=nn.Sequential(net.conv1, net.bn1, net.relu, net.maxpool),
            stage1=net.layer1,
            stage2=net.layer2,
            stage3=net.layer3,
            stage4=net.layer4,
            pool=nn.Sequential(net.avgpool, nn.Flatten()),
        )
    )
    return SplitModel(encoder, 2048, classes)


def resnet50_proj(classes: int, shape: tuple[int, int, int]) -> SplitModel:
    """Build ResNet-50 with an extra linear layer that maps its features to CLIP's d = 512.

    CLIP2FL and FedSM use it on ImageNet-LT.
    """
    encoder = resnet50(classes, shape).encoder
    encoder.add_module("add_mlp", nn.Linear(2048, 512))
    return SplitModel(encoder, 512, classes)


def _encoder(channels: int, widths: tuple[int, ...], blocks: tuple[int, ...]) -> nn.Sequential:
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    before = widths[0]
    layers["stem"] = nn.Sequential(
        nn.Conv2d(channels, before, 3, padding=1, bias=False), nn.BatchNorm2d(before), nn.ReLU(inplace=True)
    )
    for number, (width, depth) in enumerate(zip(widths, blocks, strict=True), start=1):
        stage = nn.Sequential()
        for block in range(depth):
            stage.append(BasicBlock(before, width, stride=2 if number > 1 and block == 0 else 1))
            before = width
        layers[f"stage{number}"] = stage
    layers["pool"] = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
    encoder = nn.Sequential(layers)
    _draw_convolutions(encoder)
    return encoder


def _draw_convolutions(net: nn.Module) -> None:
    """Initialise convolution weights from N(0, 2 / (k * k * out)), as CReFF's and SFD's code does."""
    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
