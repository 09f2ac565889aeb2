"""What is judged: `EvaluationSet`, the test set of one process, and `Counts` of a model's answers."""

from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor, nn

from raylt.data.samples import IGNORED, Batch, Samples
from raylt.data.task import Facts, Shard
from raylt.metrics import confusion
from raylt.models.split import SplitModel, with_encoder

Predict = Callable[[nn.Module, Tensor], Tensor]
NOBODY = -1             # in the place of an owner: a test image that is of no client


class Counts:
    """Counts of (true, predicted) classes over a test set, and over the parts of it that are clients' own.

    Args:
        owners: the client of each test image or NOBODY, int64 [N]; None where they are nobody's.

    Attributes:
        all: int64 [C, C].
        own: of each client that has test images, int64 [C, C].
    """

    def __init__(self, classes: int, device: torch.device, owners: Tensor | None = None):
        self._classes, self._owners = classes, None if owners is None else owners.to(device)
        self.all = torch.zeros(classes, classes, dtype=torch.int64, device=device)
        self.own: dict[int, Tensor] = {}

    def add(self, predicted: Tensor, batch: Batch) -> None:
        """Counts the answers to a batch, int64 like its labels."""
        self.all += confusion(predicted, batch.y, self._classes, IGNORED)
        if self._owners is None:
            return
        owners = self._owners[batch.rows]
        for id in owners.unique().tolist():
            if id != NOBODY:
                one = owners == id
                counts = confusion(predicted[one], batch.y[one], self._classes, IGNORED)
                self.own[id] = self.own[id] + counts if id in self.own else counts

    def cpu(self) -> "Counts":
        """The same on the CPU."""
        self.all, self.own = self.all.cpu(), {id: counts.cpu() for id, counts in self.own.items()}
        return self


class EvaluationSet:
    """The test set of one process, in memory from when it is first asked for.

    Clients that share an encoder differ in their classifiers alone: the features of the last encoder are kept, so each
    process encodes the test set once for them, not once for each client.
    """

    def __init__(self, shard: Shard, facts: Facts, device: torch.device):
        self._shard, self._facts, self._device = shard, facts, device
        self._form: list[tuple[str, torch.dtype, torch.Size]] | None = None        # of the last encoder's entries
        self._bits = torch.empty(0, dtype=torch.uint8)
        self._features: list[Tensor] = []

    @cached_property
    def samples(self) -> Samples:
        return Samples(self._shard, self._facts, self._device)

    @torch.no_grad()
    def counts(self, model: SplitModel, predict: Predict, size: int, owners: Tensor | None = None) -> Counts:
        """Counts of a client's model.

        Args:
            predict: a method's: model and images to logits.
            size: images at a time, always the same.
            owners: as `Counts` has them.
        """
        model.eval()
        if self._facts.kind == "segmentation":          # features of every pixel would not fit into memory
            return counts_of(lambda x: predict(model, x), self.samples, self._facts.classes, size, owners)
        known = self._knows(model.encoder)
        if not known:
            self._features = []
        remembered = _Remembered(model.encoder)
        judged = with_encoder(model, remembered)
        counts = Counts(self._facts.classes, self._device, owners)
        try:
            for place, batch in enumerate(self.samples.in_order(size)):
                if not known:
                    self._features.append(model.encoder(batch.x))
                remembered.x, remembered.z = batch.x, self._features[place]
                counts.add(predict(judged, batch.x).argmax(1), batch)
        except BaseException:               # of a full device: it is tried again, and these are a part of the features
            self._form, self._features = None, []
            raise
        return counts

    def _knows(self, encoder: nn.Module) -> bool:
        """Whether the features that are kept are this encoder's; if not, it is the one to come."""
        entries = encoder.state_dict()
        form = [(name, value.dtype, value.shape) for name, value in entries.items()]
        # in one piece: a comparison of each entry would make the host wait for each
        pieces = [value.contiguous().flatten().view(torch.uint8) for value in entries.values()]
        bits = torch.cat(pieces) if pieces else self._bits
        if form == self._form and torch.equal(bits, self._bits):
            return True
        self._form, self._bits = form, bits
        return False


class _Remembered(nn.Module):
    """An encoder of which the features z of the images x are known; what else it is asked for, it computes."""

    x: Tensor
    z: Tensor

    def __init__(self, encoder: nn.Module):
        super().__init__()
        self.encoder = encoder

    def forward(self, x: Tensor) -> Tensor:
        return self.z if x is self.x else self.encoder(x)


@torch.no_grad()
def counts_of(predict: Callable[[Tensor], Tensor], samples: Samples, classes: int, size: int,
              owners: Tensor | None = None, told: Callable[[Tensor], None] | None = None) -> Counts:
    """Counts of (true, predicted) classes over all samples or labelled pixels, on the CPU.

    Args:
        predict: images [B, channels, H, W] to logits [B, C] or [B, C, H, W], in evaluation mode.
        size: images at a time.
        owners: as `Counts` has them.
        told: is given the logits of each batch.
    """
    counts = Counts(classes, samples.y.device, owners)
    for batch in samples.in_order(size):
        logits = predict(batch.x)
        counts.add(logits.argmax(1), batch)
        if told is not None:
            told(logits)
    return counts.cpu()


def confusion_of(predict: Callable[[Tensor], Tensor], samples: Samples, classes: int, size: int) -> Tensor:
    """The same over all of them alone, int64 [C, C]."""
    return counts_of(predict, samples, classes, size).all
