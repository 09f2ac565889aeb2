"""`Client`, one participant of the federation, and `Reply`, the value that a client sends to the server.

The module also has the operations on pixels that clients share: features of single pixels, on which methods train
classifiers, and losses for pixels without a label.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from raylt.config import Config
from raylt.core.evaluation.counts import EvaluationSet
from raylt.core.training.schedules import Schedule
from raylt.data.augment import in_turn
from raylt.data.samples import IGNORED, Augmentation, Batch, Samples
from raylt.errors import LateWrite
from raylt.models.split import SplitModel, StateDict, load_entries
from raylt.recordability import recordable
from raylt.seeds import seed_for
from raylt.tree import Stamps, Tree

#: The message that the server sends to clients: a tree with string keys, such as {"model": entries}.
Message = Tree


@dataclass(frozen=True)
class Reply:
    """The value that a client returns from one call: a weight (its number of samples) and a tree of values.

    The transport brings the tree to the CPU.
    """

    weight: float
    tree: Tree


ClientFunction = Callable[["Client", Message], Reply]


class ClientState(dict[str, Any]):
    """A client's private memory between its calls: a tree of tensors.

    A tensor is recorded when it is stored, so that later changes in place are detected.
    """

    def __init__(self, values: Tree, stamps: Stamps):
        super().__init__()
        self._stamps = stamps
        self.update(values)

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        self._stamps.add({key: value}, "state")

    def __delitem__(self, key: str) -> None:
        super().__delitem__(key)
        self._stamps.forget(key, "state")

    def __ior__(self, values: Any) -> ClientState:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.update(values)
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)

    def pop(self, key: str, *default: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        value = super().pop(key, *default)
        self._stamps.forget(key, "state")
        return value

    def setdefault(self, key: str, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def update(self, *values: Any, **more: Any) -> None:
        for key, value in dict(*values, **more).items():
            self[key] = value


class Client:
    """One participant: its data, its model and its private state.

    Messages, replies and states are values. It is an error to change a tensor of a message, or a tensor of a reply or
    state after it was handed over.

    Attributes:
        samples: The client's images and labels, on its device.
        counts: Samples, or pixels, per class, int64 [C], on its device.
        model: The client's model. Shared entries come from the call's message (`receive`); the entries that a method
            does not share come from this client's last call.
        state: Anything else the client must remember; a tree of tensors, part of every checkpoint. Between calls the
            tensors are moved to the CPU, and the next call finds them on the CPU.
        cache: Values that can be computed again from the client's data (a teacher's features); never in a checkpoint.
        round: Number of the round, from 1; 0 before the first.
        test: The balanced test set of the experiment; for the framework's evaluations, never for training.
        schedule: The learning rate over the rounds; None for the built-in schedule that `local.schedule` names.
    """

    def __init__(
        self,
        id: int,
        samples: Samples,
        test: EvaluationSet,
        model: SplitModel,
        config: Config,
        device: torch.device,
        augment: Augmentation | None = None,
        schedule: Schedule | None = None,
    ):
        self.id = id
        self.samples = samples
        self.model = model
        self.config = config
        self.device = device
        self.counts = samples.counts(model.classes)
        self.cache: dict[str, Any] = {}
        self.round = 0
        self.test = test
        self.schedule = schedule
        self._augment = augment
        self.recall({})

    def recall(self, state: Tree) -> None:
        """Start a call of a client function with the private state from the client's previous call."""
        self._stamps = Stamps()
        self._state = ClientState(state, self._stamps)

    def watch(self, message: Message) -> None:
        """Record the tensors of the call's message, so that changes in place are detected."""
        self._stamps.add(message, "message")

    @property
    def state(self) -> ClientState:
        return self._state

    @state.setter
    def state(self, values: Tree) -> None:
        self._state = ClientState(values, self._stamps)

    def check_stamps(self) -> None:
        """Check, at the end of a call, that no tensor of the message, the reply or the state was changed.

        Raises:
            LateWrite: A tensor was changed after it was received or handed over.
        """
        path = self._stamps.changed()
        if path is not None:
            raise LateWrite(self.id, path)

    @property
    def augment(self) -> Augmentation | None:
        """Return the augmentation of the client's training images, or None if there is none."""
        return self._augment

    def __len__(self) -> int:
        return len(self.samples)

    def receive(self, params: StateDict) -> None:
        """Load the model entries in the server's message; the model's other entries do not change."""
        load_entries(self.model, params)

    def reply(self, **parts: Any) -> Reply:
        """Return a reply that is weighted by this client's number of samples.

        The tensors of the reply must not be changed afterwards.
        """
        self._stamps.add(parts, "reply")
        return Reply(float(len(self)), parts)

    def cross_entropy(self, logits: Tensor, y: Tensor) -> Tensor:
        """Return the mean cross-entropy of a batch, a scalar.

        The setting `local.unlabelled` says how unlabelled pixels count.

        Args:
            logits: [B, C], or [B, C, H, W].
            y: int64 [B], soft labels [B, C], or maps [B, H, W] with IGNORED.
        """
        if y.ndim == 3:
            ignored = self.config.local.unlabelled == "ignored"
            return labelled_cross_entropy(logits, y) if ignored else back_cross_entropy(logits, y)
        return F.cross_entropy(logits, y)

    def steps(self, epochs: float | None = None, batch: int | None = None) -> int:
        """Return the number of SGD steps, one for each batch that `batches` yields.

        By default, the settings in `local` give the epochs and the batch size.
        """
        return self.config.local.step_count(len(self), epochs, batch)

    @property
    def epochs(self) -> float:
        """Return the number of epochs in a round: `local.epochs`, or `local.steps` converted to epochs."""
        local = self.config.local
        steps_per_epoch = self.steps(epochs=1)
        if local.steps is None or not steps_per_epoch:
            return local.epochs
        return local.steps / steps_per_epoch

    def batches(self, epochs: float | None, size: int) -> Iterator[Batch]:
        """Yield shuffled, augmented batches of 2 to `size` samples.

        The order depends only on (seed, function, round, client).

        Args:
            epochs: Number of passes over the samples, possibly a fraction; None for the setting in `local`.
            size: Maximum number of samples in a batch.
        """
        return (self.batch(rows) for rows in self.rows(epochs, size))

    def rows(self, epochs: float | None, size: int) -> Iterator[Tensor]:
        """Yield the row numbers of the samples in each batch, int64 [n] with 2 <= n <= size; see `batches`."""
        left = self.steps(epochs, size)
        while left:
            order = torch.randperm(len(self), generator=self.order).to(self.device, non_blocking=True)
            for rows in order.split(size)[:left]:
                if len(rows) > 1:
                    yield rows
                    left -= 1

    @recordable  # if the augmentation is
    def batch(self, rows: Tensor, then: Augmentation | None = None) -> Batch:
        """Return the samples at `rows` after the configured augmentation and, if given, the augmentation `then`."""
        return self.samples.batch(rows, in_turn([self._augment, then]), self.noise)

    def begin(self, purpose: str, round: int) -> None:
        """Set the round of a call, and seed the random generators that the call uses."""
        self.round = round
        self.order = torch.Generator().manual_seed(seed_for(self.config.seed, "order", purpose, round, self.id))
        self.noise = torch.Generator(self.device).manual_seed(
            seed_for(self.config.seed, "noise", purpose, round, self.id)
        )


def pixel_features(z: Tensor, y: Tensor, per_class: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return the features and labels of randomly chosen pixels, at most `per_class` per class and image.

    A pixel's feature is interpolated as a `PixelModel` interpolates its logits, so the classifier gives the same logits
    for it. Images with one feature and one label each, z [B, d] and y [B], are returned as they are.

    Args:
        z: Feature maps [B, d, h, w].
        y: Label maps int64 [B, H, W]; unlabelled pixels are negative.
        per_class: Maximum number of pixels per class and image.
        generator: Random generator on the device of `z`.

    Returns:
        z [n, d] and y int64 [n], image by image, each class by class.
    """
    if y.ndim == 1:
        return z, y
    height, width = y.shape[1:]
    labels = y.flatten(1)  # [B, H * W]
    # sort by class and a random number, so that the first pixels of each class are a random sample
    draws = torch.rand(labels.shape, generator=generator, device=generator.device, dtype=torch.float64)
    order = (labels + draws).argsort(1)
    chosen_z = []
    chosen_y = []
    for image, image_labels, image_order in zip(z, labels, order, strict=True):
        ordered = image_labels[image_order]
        sizes = ordered.unique_consecutive(return_counts=True)[1]
        starts = sizes.cumsum(0) - sizes
        rank = torch.arange(len(ordered), device=y.device) - starts.repeat_interleave(sizes)
        kept = (rank < per_class) & (ordered >= 0)
        positions = image_order[kept]
        rows = positions // width
        columns = positions % width
        grid = torch.stack([(2 * columns + 1) / width - 1, (2 * rows + 1) / height - 1], dim=-1).to(z.dtype)
        sampled = F.grid_sample(
            image[None], grid[None, None], mode="bilinear", padding_mode="border", align_corners=False
        )  # [1, d, 1, n]
        chosen_z.append(sampled[0, :, 0].T)
        chosen_y.append(ordered[kept])
    return torch.cat(chosen_z), torch.cat(chosen_y)


def labelled_cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """Return the mean cross-entropy of the labelled pixels, or 0 if no pixel has a label.

    Args:
        logits: [B, C, H, W].
        y: int64 [B, H, W] with IGNORED.

    Returns:
        The mean over the pixels that count, a scalar.
    """
    return F.cross_entropy(logits, y, ignore_index=IGNORED, reduction="sum") / (y != IGNORED).sum().clamp(min=1)


def back_cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """Return the cross-entropy of a batch, in which unlabelled pixels count as any class without labels in the batch.

    The probability of such a pixel is the sum of these classes' probabilities (BackCE of FedSeg, Miao et al., CVPR
    2023; the absent classes are those of the batch, as in its code). Where the labels show all classes, such pixels are
    left out. No operation synchronises with a GPU.

    Args:
        logits: [B, C, H, W].
        y: int64 [B, H, W] with IGNORED.

    Returns:
        The mean over the pixels that count, a scalar.
    """
    classes = logits.shape[1]
    unlabelled = y == IGNORED
    extended = torch.where(unlabelled, classes, y)  # unlabelled pixels as one more class
    shows = torch.zeros(classes + 1, dtype=torch.bool, device=y.device).index_fill_(0, extended.flatten(), True)
    shows = shows[:classes]
    all_shown = shows.all()
    log_p = F.log_softmax(logits.float(), 1)
    # if all classes are shown, mask none: the logarithm of an empty sum has no gradient
    hidden = (shows & ~all_shown)[:, None, None]
    absent = log_p.masked_fill(hidden, -torch.inf).logsumexp(1, keepdim=True)
    target = torch.where(unlabelled & all_shown, IGNORED, extended)
    return F.nll_loss(torch.cat([log_p, absent], 1), target, ignore_index=IGNORED)
