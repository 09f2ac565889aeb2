"""What is judged: `EvaluationSet`, the test set of one process, and the counts of a model's answers."""

from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor, nn

from raylt.data.samples import IGNORED, Samples
from raylt.data.task import Facts, Shard
from raylt.metrics import confusion
from raylt.models.split import Params


class EvaluationSet:
    """The test set of one process, in memory from when it is first asked for."""

    def __init__(self, shard: Shard, facts: Facts, device: torch.device):
        self._shard, self._facts, self._device = shard, facts, device
        self._encoder: Params = {}
        self._features = torch.empty(0)

    @cached_property
    def samples(self) -> Samples:
        return Samples(self._shard, self._facts, self._device)

    @torch.no_grad()
    def features(self, encoder: nn.Module, size: int) -> Tensor:
        """The features of all samples, in their order, `size` at a time; kept until an encoder comes that differs."""
        entries = encoder.eval().state_dict()
        known = self._encoder
        if known.keys() != entries.keys() or not all(map(torch.equal, entries.values(), known.values())):
            self._features = torch.cat([encoder(batch.x) for batch in self.samples.in_order(size)])
            self._encoder = {name: value.clone() for name, value in entries.items()}
        return self._features


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
