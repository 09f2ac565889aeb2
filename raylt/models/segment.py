"""MobileNetV3-small with an LR-ASPP head (Howard et al., ICCV 2019), MuPFL's network for street scenes.

torchvision's head ends in two 1x1 convolutions whose outputs are added: one of the low-level features at stride 8
[24, H/8, W/8], and one of the pooled and gated high-level features resized to them [128, H/8, W/8]. The sum equals one
1x1 convolution of the stacked features. So the encoder ends with the stack, d = 152, and the classifier is that
convolution (with one bias instead of two).

Departure: BatchNorm has torch's default momentum 0.1. With torchvision's 0.01, the statistics average over some hundred
steps, more than a client takes before its model is averaged.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raylt.models import pretrained
from raylt.models.split import PixelModel
from raylt.recordability import recordable

LOW, WIDE, HIGH = 24, 576, 128


@recordable
class LRASPPEncoder(nn.Module):
    """Encoder of LR-ASPP, which maps images [B, channels, H, W] to features [B, 152, H/8, W/8].

    `stage1` ends at stride 8. `stage2` ends at stride 16 with 576 channels; without dilation it would end at stride 32.
    """

    def __init__(self, channels: int):
        super().__init__()
        from torchvision.models import mobilenet_v3_small  # imported here because it is slow
        from torchvision.models.segmentation.lraspp import LRASPPHead

        blocks = list(mobilenet_v3_small(weights=None, dilated=True).features)
        self.stage1 = nn.Sequential(*blocks[:3])
        self.stage2 = nn.Sequential(*blocks[3:])
        if channels != 3:
            stem = nn.Conv2d(channels, 16, 3, stride=2, padding=1, bias=False)
            nn.init.kaiming_normal_(stem.weight, mode="fan_out")
            self.stage1.get_submodule("0").register_module("0", stem)
        head = LRASPPHead(LOW, WIDE, num_classes=1, inter_channels=HIGH)  # its classifiers are not used
        self.cbr = head.cbr
        self.scale = head.scale
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.momentum = 0.1

    def forward(self, x: Tensor) -> Tensor:
        low = self.stage1(x)
        high = self.stage2(low)
        gated = self.cbr(high) * self.scale(high)
        return torch.cat([low, F.interpolate(gated, low.shape[2:], mode="bilinear", align_corners=False)], dim=1)

    def load_imagenet(self, weights: str) -> None:
        """Load the backbone's weights from a state dict of torchvision's `mobilenet_v3_small`.

        Args:
            weights: A file, or "imagenet" to fetch torchvision's weights.

        Raises:
            ConfigError: The file is missing or has other weights, or torchvision's weights cannot be fetched.
        """
        from torchvision.models import MobileNet_V3_Small_Weights

        model = "torchvision's mobilenet_v3_small"
        if weights == "imagenet":
            state = pretrained.fetch(MobileNet_V3_Small_Weights.IMAGENET1K_V1)
        else:
            state = pretrained.read(Path(weights).expanduser(), model)
        prefix = "features."
        backbone = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
        try:
            nn.Sequential(*self.stage1, *self.stage2).load_state_dict(backbone)
        except RuntimeError as error:
            raise pretrained.mismatch(weights, model, error) from None


def lraspp(classes: int, shape: tuple[int, int, int]) -> PixelModel:
    """Build MobileNetV3-small with an LR-ASPP head; 1,076,556 parameters with 12 classes."""
    return PixelModel(LRASPPEncoder(shape[2]), LOW + HIGH, classes)
