"""`Client`: one participant, all that a client function may see. `Reply`: what it sends back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from raylt.config import Config
from raylt.core.evaluation import EvaluationSet
from raylt.data.augment import AUGMENTATIONS
from raylt.data.samples import Batch, Samples
from raylt.models.split import Params, SplitModel, load_entries
from raylt.seeds import seed_for
from raylt.tree import Tree

Message = Tree


@dataclass(frozen=True)
class Reply:
    """What one client sends back once: its weight (its number of samples) and a tree of CPU tensors."""

    weight: float
    tree: Tree


ClientFunction = Callable[["Client", Message], Reply]


class Client:
    """One participant: its data, its model and its private state.

    Attributes:
        samples: its images and labels, on its device.
        counts: samples, or pixels, per class, int64 [C], on its device.
        model: weights are what the call's message brought (`receive`) and, for the entries that a method does not
            share, what this client's last call left.
        state: anything else it must remember; a tree of CPU tensors, part of every checkpoint.
        cache: what can be computed again from its data (a teacher's features); never in a checkpoint.
        round: number of the round, from 1; 0 before the first.
    """

    def __init__(self, id: int, samples: Samples, test: EvaluationSet, model: SplitModel, config: Config,
                 device: torch.device):
        self.id, self.samples, self.model, self.config, self.device = id, samples, model, config, device
        self.counts = samples.counts(model.classes)
        self.state: Tree = {}
        self.cache: dict[str, Any] = {}
        self.round = 0
        self._test = test

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def test(self) -> Samples:
        """The balanced test set of the experiment; for judging personal models, never for training."""
        return self._test.samples

    def test_features(self) -> Tensor:
        """The test set's features under this client's encoder, [N, d]; clients of one process that have the same
        encoder share them."""
        return self._test.features(self.model.encoder, self.config.evaluation.batch)

    def receive(self, params: Params) -> None:
        """Takes over the entries that came with a message; the others stay as they are."""
        load_entries(self.model, params)

    def reply(self, **parts: Any) -> Reply:
        """A reply weighted by this client's number of samples."""
        return Reply(float(len(self)), parts)

    def batches(self, epochs: int, size: int) -> Iterator[Batch]:
        """Shuffled, augmented batches of [2, size] samples; the order depends on (seed, function, round, client)."""
        return (self.batch(rows) for rows in self.rows(epochs, size))

    def rows(self, epochs: int, size: int) -> Iterator[Tensor]:
        """The places of the samples of each batch, int64 [2..size]."""
        for _ in range(epochs):
            order = torch.randperm(len(self), generator=self.order)
            yield from (rows for rows in order.to(self.device).split(size) if len(rows) > 1)

    def batch(self, rows: Tensor) -> Batch:
        """The samples at `rows`, augmented as `augment` says."""
        return self.samples.batch(rows, AUGMENTATIONS[self.config.augment], self.noise)

    def begin(self, purpose: str, round: int) -> None:
        """Sets the round and the generators of one call."""
        self.round = round
        self.order = torch.Generator().manual_seed(seed_for(self.config.seed, "order", purpose, round, self.id))
        self.noise = torch.Generator(self.device).manual_seed(
            seed_for(self.config.seed, "noise", purpose, round, self.id))
