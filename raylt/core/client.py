"""`Client`: one participant, all that a client function may see. `Reply`: what it sends back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from raylt.config import Config
from raylt.core.evaluation import EvaluationSet
from raylt.core.pixels import back_cross_entropy, labelled_cross_entropy
from raylt.data.samples import Augmentation, Batch, Samples
from raylt.data.transforms import in_turn
from raylt.errors import LateWrite
from raylt.models.split import Params, SplitModel, load_entries
from raylt.recordable import recordable
from raylt.seeds import seed_for
from raylt.tree import Stamps, Tree

Message = Tree


@dataclass(frozen=True)
class Reply:
    """What one client sends back once: its weight (its number of samples) and a tree, brought to the CPU on its way."""

    weight: float
    tree: Tree


ClientFunction = Callable[["Client", Message], Reply]


class State(dict[str, Any]):
    """What a client must remember: a tree of tensors. Each value is stamped as it is handed over."""

    def __init__(self, values: Tree, stamps: Stamps):
        super().__init__()
        self._stamps = stamps
        self.update(values)

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        self._stamps.add({key: value}, "state")

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)

    def setdefault(self, key: str, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def update(self, *values: Any, **more: Any) -> None:
        for key, value in dict(*values, **more).items():
            self[key] = value


class Client:
    """One participant: its data, its model and its private state.

    What it hands over, in a reply or to its state, is a value: changing a tensor of it afterwards is an error.

    Attributes:
        samples: its images and labels, on its device.
        counts: samples, or pixels, per class, int64 [C], on its device.
        model: weights are what the call's message brought (`receive`) and, for the entries that a method does not
            share, what this client's last call left.
        state: anything else it must remember; a tree of tensors, part of every checkpoint. Between calls they are on
            the CPU, and so they come to the next.
        cache: what can be computed again from its data (a teacher's features); never in a checkpoint.
        round: number of the round, from 1; 0 before the first.
        test: the balanced test set of the experiment; for the framework's judgements, never for training.
    """

    def __init__(self, id: int, samples: Samples, test: EvaluationSet, model: SplitModel, config: Config,
                 device: torch.device, augment: Augmentation | None = None):
        self.id, self.samples, self.model, self.config, self.device = id, samples, model, config, device
        self.counts = samples.counts(model.classes)
        self.cache: dict[str, Any] = {}
        self.round = 0
        self.test = test
        self._augment = augment
        self.recall({})

    def recall(self, state: Tree) -> None:
        """Starts a call: the state is what the last call left, and nothing has been handed over yet."""
        self._stamps = Stamps()
        self._state = State(state, self._stamps)

    @property
    def state(self) -> State:
        return self._state

    @state.setter
    def state(self, values: Tree) -> None:
        self._state = State(values, self._stamps)

    def check_stamps(self) -> None:
        """Ends a call.

        Raises:
            LateWrite: a tensor was changed after it was handed over.
        """
        if (path := self._stamps.changed()) is not None:
            raise LateWrite(f"client {self.id}: {path}")

    @property
    def augment(self) -> Augmentation | None:
        """How its training images are varied; None: not at all."""
        return self._augment

    def __len__(self) -> int:
        return len(self.samples)

    def receive(self, params: Params) -> None:
        """Takes over the entries that came with a message; the others stay as they are."""
        load_entries(self.model, params)

    def reply(self, **parts: Any) -> Reply:
        """A reply weighted by this client's number of samples. Its tensors may not be changed afterwards."""
        self._stamps.add(parts, "reply")
        return Reply(float(len(self)), parts)

    def cross_entropy(self, logits: Tensor, y: Tensor) -> Tensor:
        """The mean cross-entropy of a batch, a scalar; pixels without a label count as `local.unlabelled` says.

        Args:
            logits: [B, C], or [B, C, H, W].
            y: int64 [B], soft labels [B, C], or maps [B, H, W] with IGNORED.
        """
        if y.ndim == 3:
            known = self.config.local.unlabelled == "ignored"
            return labelled_cross_entropy(logits, y) if known else back_cross_entropy(logits, y)
        return F.cross_entropy(logits, y)

    def steps(self, epochs: int | None = None, batch: int | None = None) -> int:
        """How many batches `batches` gives: SGD steps of so many epochs; those of `local` by default."""
        return self.config.local.steps(len(self), epochs, batch)

    def batches(self, epochs: int, size: int) -> Iterator[Batch]:
        """Shuffled, augmented batches of [2, size] samples; the order depends on (seed, function, round, client)."""
        return (self.batch(rows) for rows in self.rows(epochs, size))

    def rows(self, epochs: int, size: int) -> Iterator[Tensor]:
        """The places of the samples of each batch, int64 [2..size]."""
        for _ in range(epochs):
            order = torch.randperm(len(self), generator=self.order)
            yield from (rows for rows in order.to(self.device, non_blocking=True).split(size) if len(rows) > 1)

    @recordable                         # as far as the augmentation is
    def batch(self, rows: Tensor, then: Augmentation | None = None) -> Batch:
        """The samples at `rows`, augmented as the configuration says, and by `then` after it."""
        return self.samples.batch(rows, in_turn([self._augment, then]), self.noise)

    def begin(self, purpose: str, round: int) -> None:
        """Sets the round and the generators of one call."""
        self.round = round
        self.order = torch.Generator().manual_seed(seed_for(self.config.seed, "order", purpose, round, self.id))
        self.noise = torch.Generator(self.device).manual_seed(
            seed_for(self.config.seed, "noise", purpose, round, self.id))
