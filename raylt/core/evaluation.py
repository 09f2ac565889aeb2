"""What is judged: `EvaluationSet`, the test set of one process, and the counts of a model's answers."""

from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor, nn

from raylt.data.samples import IGNORED, Samples
from raylt.data.task import Facts, Shard
from raylt.metrics import confusion
from raylt.models.split import Params, SplitModel, with_encoder

Predict = Callable[[nn.Module, Tensor], Tensor]


class EvaluationSet:
    """The test set of one process, in memory from when it is first asked for.

    Clients that share an encoder differ in their classifiers alone: the features of the last encoder are kept, so each
    process encodes the test set once for them, not once for each client.
    """

    def __init__(self, shard: Shard, facts: Facts, device: torch.device):
        self._shard, self._facts, self._device = shard, facts, device
        self._encoder: Params = {}
        self._features: list[Tensor] = []

    @cached_property
    def samples(self) -> Samples:
        return Samples(self._shard, self._facts, self._device)

    @torch.no_grad()
    def confusion(self, model: SplitModel, predict: Predict, size: int) -> Tensor:
        """Counts of (true, predicted) classes of a client's model, int64 [C, C] on the CPU.

        Args:
            predict: a method's: model and images to logits.
            size: images at a time, always the same.
        """
        model.eval()
        if self._facts.kind == "segmentation":          # features of every pixel would not fit into memory
            return confusion_of(lambda x: predict(model, x), self.samples, self._facts.classes, size)
        known = self._knows(model.encoder)
        if not known:
            self._features = []
        remembered = _Remembered(model.encoder)
        judged = with_encoder(model, remembered)
        total = torch.zeros(2 * [self._facts.classes], dtype=torch.int64, device=self._device)
        for place, batch in enumerate(self.samples.in_order(size)):
            if not known:
                self._features.append(model.encoder(batch.x))
            remembered.x, remembered.z = batch.x, self._features[place]
            total += confusion(predict(judged, batch.x).argmax(1), batch.y, self._facts.classes)
        return total.cpu()

    def _knows(self, encoder: nn.Module) -> bool:
        """Whether the features that are kept are this encoder's; if not, it is the one to come."""
        entries, known = encoder.state_dict(), self._encoder
        if known.keys() == entries.keys() and all(map(torch.equal, entries.values(), known.values())):
            return True
        self._encoder = {name: value.clone() for name, value in entries.items()}
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
def confusion_of(predict: Callable[[Tensor], Tensor], samples: Samples, classes: int, size: int) -> Tensor:
    """Counts of (true class, predicted class) over all samples or labelled pixels, int64 [C, C] on the CPU.

    Args:
        predict: images [B, channels, H, W] to logits [B, C] or [B, C, H, W], in evaluation mode.
        size: images at a time.
    """
    total = torch.zeros(classes, classes, dtype=torch.int64, device=samples.y.device)
    for batch in samples.in_order(size):
        total += confusion(predict(batch.x).argmax(1), batch.y, classes, IGNORED)
    return total.cpu()
