"""`Source`: a data set as it is, before it is thinned and dealt to clients."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from raylt.data.cache import Stored, load, take

Channels = tuple[float, ...]
Kind = Literal["classification", "segmentation"]

IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CIFAR = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)      # CReFF's code uses them for CIFAR-100 too
PUBLISHED = {
    "cifar10": CIFAR,
    "cifar100": CIFAR,
    "fashion_mnist": ((0.2860,), (0.3530,)),
    "cinic10": ((0.47889522, 0.47227842, 0.43047404), (0.24205776, 0.23828046, 0.25874835)),
    "imagenet_lt": IMAGENET,
    "camvid": IMAGENET,             # so that weights from ImageNet see what they saw there
    "cityscapes": IMAGENET,
}


@dataclass(frozen=True, eq=False)
class Source:
    """A data set before it is thinned and partitioned.

    Args:
        x_train, x_test: uint8 [N, H, W, channels].
        y_train, y_test: int64 [N], in [0, C); or label maps uint8 [N, H, W], in [0, C) or VOID.
        class_names: C names.
        mean, std: per channel, of pixels in [0, 1].
        ids: recorded id of each training sample, [N], where there is one.
        test_ids: the same of each test sample, in the id space of `ids`.
        client_names: of the different ids, in sorted order.
        notes: what a user should hear of it, in whole sentences.

    Without any test sample a part of each id's training samples becomes the test set, see `raylt.data.task`.
    """

    name: str
    x_train: Stored
    y_train: Stored
    x_test: Stored
    y_test: Stored
    class_names: tuple[str, ...]
    mean: Channels
    std: Channels
    ids: np.ndarray | None = None
    test_ids: np.ndarray | None = None
    client_names: tuple[str, ...] | None = None
    notes: tuple[str, ...] = ()

    @property
    def kind(self) -> Kind:
        return "classification" if len(self.y_train.shape) == 1 else "segmentation"

    @property
    def strata(self) -> np.ndarray:
        """What a validation part is to be representative of: the labels; images with maps are all of one kind."""
        return load(self.y_train) if self.kind == "classification" else np.zeros(len(self.y_train), dtype=np.int64)


def channel_statistics(x: Stored) -> tuple[Channels, Channels]:
    """Mean and standard deviation per channel of pixels in [0, 1], of at most 2,000 evenly spaced images if `x` is
    mapped. A constant channel gets the deviation of one grey level, so that dividing by it is safe."""
    if not isinstance(x, np.ndarray):
        x = load(take(x, np.linspace(0, len(x) - 1, min(len(x), 2000)).astype(np.int64)))
    levels = np.arange(256) / 255
    mean, std = [], []
    for channel in range(x.shape[3]):
        # a histogram is exact and needs no float copy of the images
        share = sum(np.bincount(part[..., channel].ravel(), minlength=256)
                    for part in np.array_split(x, 1 + len(x) // 4096)) / x[..., 0].size
        mean.append(float(levels @ share))
        std.append(max(float(np.sqrt((levels - mean[-1]) ** 2 @ share)), 1 / 255))
    return tuple(mean), tuple(std)
