"""`Samples`: images that live as uint8 on a device from the start, and the batches cut from them."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from raylt.data.augment import normalise
from raylt.data.cache import load
from raylt.data.maps import VOID
from raylt.data.task import Facts, Shard
from raylt.data.transforms import Augmentation
from raylt.tree import view

IGNORED = -100          # what torch's cross-entropy leaves out unless told otherwise


class Batch(NamedTuple):
    """x float32 [B, channels, H, W] normalised; y int64 [B], or soft labels float32 [B, C], or maps int64 [B, H, W]
    with IGNORED; rows int64 [B], the places in their shard."""

    x: Tensor
    y: Tensor
    rows: Tensor


class Samples:
    """The images and labels of one shard, on one device; labels int64 [n], or uint8 maps [n, H, W] with VOID. `ids`
    are the shard's, `view` is its renaming of the classes, int64 [C] or None."""

    def __init__(self, shard: Shard, facts: Facts, device: torch.device):
        self.x, self.y = view(load(shard.x)).to(device), view(shard.labels()).to(device)
        self.ids = shard.ids
        self.view = None if shard.renaming is None else torch.from_numpy(shard.renaming).to(device)
        self.mean, self.std = torch.tensor(facts.mean, device=device), torch.tensor(facts.std, device=device)

    def __len__(self) -> int:
        return len(self.y)

    @property
    def nbytes(self) -> int:
        """What images and labels take on the device."""
        return self.x.nbytes + self.y.nbytes

    def counts(self, classes: int) -> Tensor:
        """Images or labelled pixels of each class, int64 [C]."""
        return sum((torch.bincount(part.flatten(), minlength=classes)[:classes] for part in self.y.split(64)),
                   start=torch.zeros(classes, dtype=torch.int64, device=self.y.device))

    def batch(self, rows: Tensor, augment: Augmentation | None = None,
              generator: torch.Generator | None = None) -> Batch:
        """The samples at `rows` (int64 [B], on the device), augmented when asked."""
        x, y = self.x.index_select(0, rows), self.y.index_select(0, rows)
        if augment is not None:
            assert generator is not None
            x, y = augment(x, y, generator)
        if y.dtype == torch.uint8:
            y = torch.where(y == VOID, IGNORED, y.long())
        return Batch(normalise(x, self.mean, self.std), y, rows)

    def in_order(self, size: int, augment: Augmentation | None = None,
                 generator: torch.Generator | None = None) -> Iterator[Batch]:
        """All samples once, in their order, without augmentation unless asked: for evaluation and statistics."""
        for rows in torch.arange(len(self), device=self.y.device).split(size):
            yield self.batch(rows, augment, generator)
