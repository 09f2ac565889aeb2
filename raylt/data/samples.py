"""Samples of a client or test set as uint8 images on a device, and the batches made from them."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from raylt.data.augment import Augmentation, normalise_rows, row_constants
from raylt.data.images.cache import load
from raylt.data.label_maps import VOID
from raylt.data.task import Shard, TaskSpec
from raylt.tree import view

IGNORED = -100  # the label that torch's cross-entropy ignores by default


class Batch(NamedTuple):
    """A batch of normalised samples.

    Attributes:
        x: Images float32 [B, channels, H, W], or features [B, d].
        y: Labels int64 [B], soft labels float32 [B, C], or maps int64 [B, H, W] with IGNORED.
        rows: Positions in the shard, int64 [B].
    """

    x: Tensor
    y: Tensor
    rows: Tensor


class Samples:
    """The images and labels of one client or test set, on one device.

    Attributes:
        x: Images uint8 [n, H, W, channels]; with a frozen encoder features float32 [n, 1 + k, d], see
            raylt/core/encoding.py.
        y: Labels int64 [n], or maps uint8 [n, H, W] with VOID, as the shard's holder sees them.
        ids: Ids of the shard.
        view: The shard's renaming of the classes, int64 [C], or None.
    """

    def __init__(self, shard: Shard, spec: TaskSpec, device: torch.device):
        self.x = view(load(shard.x)).to(device)
        self.y = view(shard.labels()).to(device)
        self.ids = shard.ids
        self.view = None if shard.renaming is None else torch.from_numpy(shard.renaming).to(device)
        self._mean = tuple(spec.mean)
        self._std = tuple(spec.std)

    def __len__(self) -> int:
        return len(self.y)

    @property
    def nbytes(self) -> int:
        """Return the number of bytes that images and labels take on the device."""
        return self.x.nbytes + self.y.nbytes

    @property
    def encoded(self) -> bool:
        """Return whether the samples are features instead of images."""
        return self.x.ndim == 3

    def counts(self, classes: int) -> Tensor:
        """Count the images or labelled pixels of each class, int64 [C]."""
        total = torch.zeros(classes, dtype=torch.int64, device=self.y.device)
        for part in self.y.split(64):
            total = total + torch.bincount(part.flatten(), minlength=classes)[:classes]
        return total

    def batch(
        self, rows: Tensor, augment: Augmentation | None = None, generator: torch.Generator | None = None
    ) -> Batch:
        """Return some samples as a batch.

        Args:
            rows: Numbers of the samples, int64 [B], on the device.
            augment: Augmentation of the images; by default none.
            generator: Random generator for the augmentation, on the device.
        """
        x = self.x.index_select(0, rows)
        y = self.y.index_select(0, rows)
        if augment is not None:
            assert generator is not None
            x, y = augment(x, y, generator)
        elif self.encoded:
            x = x[:, 0]
        if y.dtype == torch.uint8:
            y = torch.where(y == VOID, IGNORED, y.long())
        if not self.encoded:
            x = normalise_rows(x, *row_constants(self._mean, self._std, x.shape[2], x.device))
        return Batch(x, y, rows)

    def in_order(
        self, size: int, augment: Augmentation | None = None, generator: torch.Generator | None = None
    ) -> Iterator[Batch]:
        """Yield all samples once, in order, in batches of `size`; for evaluations and statistics. See `batch`."""
        for rows in torch.arange(len(self), device=self.y.device).split(size):
            yield self.batch(rows, augment, generator)
