"""`Samples`: images that live as uint8 on a device from the start, and the batches cut from them."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from raylt.data.augment import normalise
from raylt.data.cache import load
from raylt.data.task import Facts, Shard
from raylt.tree import view

Augmentation = Callable[[Tensor, torch.Generator], Tensor]


class Batch(NamedTuple):
    """x float32 [B, channels, H, W] normalised; y int64 [B], or soft labels float32 [B, C]; rows int64 [B], the places
    in their shard."""

    x: Tensor
    y: Tensor
    rows: Tensor


class Samples:
    """The images and labels of one shard, on one device; `ids` are the shard's."""

    def __init__(self, shard: Shard, facts: Facts, device: torch.device):
        self.x, self.y, self.ids = view(load(shard.x)).to(device), view(shard.y).to(device), shard.ids
        self.mean, self.std = torch.tensor(facts.mean, device=device), torch.tensor(facts.std, device=device)

    def __len__(self) -> int:
        return len(self.y)

    def batch(self, rows: Tensor, augment: Augmentation | None = None,
              generator: torch.Generator | None = None) -> Batch:
        """The samples at `rows` (int64 [B], on the device), augmented when asked."""
        x = self.x.index_select(0, rows)
        if augment is not None:
            assert generator is not None
            x = augment(x, generator)
        return Batch(normalise(x, self.mean, self.std), self.y.index_select(0, rows), rows)

    def in_order(self, size: int, augment: Augmentation | None = None,
                 generator: torch.Generator | None = None) -> Iterator[Batch]:
        """All samples once, in their order, without augmentation unless asked: for evaluation and statistics."""
        for rows in torch.arange(len(self), device=self.y.device).split(size):
            yield self.batch(rows, augment, generator)
