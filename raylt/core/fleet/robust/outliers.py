"""`Outliers`: rejects replies whose values are far larger than in all other clients' replies.

A model of a thousand times the usual length passes the limits on single values, but a mean that contains it makes the
training of other clients diverge. So the server compares lengths. The length of a part is the Euclidean norm of all its
float tensors. A reply is rejected if one of its parts is longer than SHORT and longer than FACTOR times each of

- the median length of the part over the replies to the call,
- the length of the part that the server sent, if the template has values.

More samples mean more steps and a longer part. If the number of samples does not explain the length, that is, if the
length per sample also exceeds CLOSE times its median over the replies, CLOSE replaces FACTOR.

Parts with a template are compared if they become part of a model: a `mean`, or an `each` with the limit of a model's
values (`up_to`), unless the limit is larger. At least MIN_REPLIES are needed, since two clients have no majority.
Honest clients differ by far less. The longest such part in the contract's runs is 3.3 times the median. If one client
trains a linear classifier on 20,000 samples and nine others on 20 each, its part is 37 times as long (0.04 times per
sample). Momentum of 0.9 makes each of many steps in one direction ten times as long as a single one.

A `total` with a template is compared by its length per sample, with SHORT_SUM in place of SHORT and without CLOSE.
SHORT_SUM is the second moment of features of length 1,000.

Lengths below the bound, secure sums and uploads with noise are not compared. A server of secure sums sees no lengths,
and a rejection that depends on other clients would reveal more than noise accounts for. Robust rules compare replies
themselves.
"""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from raylt.core.client import Reply
from raylt.core.fleet.block_sums import SummedReply
from raylt.core.fleet.reductions import Reduction
from raylt.core.fleet.value_store import ValueStore
from raylt.core.fleet.wire import Fault
from raylt.tree import leaf_paths

FACTOR = 500
CLOSE = 50  # factor if a client's number of samples does not explain the length
SHORT = 1000.0  # no honest client's update is longer after one round, unless all are
SHORT_SUM = 1e6  # the same for the length of a sum per sample
MIN_REPLIES = 3


@dataclass(frozen=True)
class LengthBound:
    """The bound on the length of one part of the replies to a call.

    Attributes:
        sent: Length of the part that the server sent, or 0.
        per_sample: Whether lengths are divided by the number of samples, as for sums.
    """

    sent: float
    per_sample: bool

    @property
    def short(self) -> float:
        """The length up to which no reply is rejected."""
        return SHORT_SUM if self.per_sample else SHORT

    @property
    def unsuspicious(self) -> float:
        """The length up to which a reply need not wait for the lengths of the other replies."""
        return max(self.short, CLOSE * self.sent)

    def is_exceeded(self, length: float, samples: int, usual: float, usual_per_sample: float) -> bool:
        """Return whether a reply of this length is rejected.

        Args:
            length: Length of the reply's part.
            samples: Number of samples of its client.
            usual: Median of the lengths.
            usual_per_sample: Median of the lengths per sample.
        """
        usual = max(usual, self.sent)
        if length > max(self.short, FACTOR * usual):
            return True
        explained = self.per_sample or length <= CLOSE * usual_per_sample * samples
        return not explained and length > max(self.short, CLOSE * usual)


def is_compared(part: Reduction, largest: float) -> bool:
    """Return whether the lengths of a reply part are compared.

    Args:
        part: The reduction of the part.
        largest: Maximum magnitude of a value of a model.
    """
    if part.template is None:
        return False
    if part.largest is None:
        return part.kind != "each"
    return part.largest == largest if part.kind == "each" else part.largest <= largest


def length(value: Any) -> float:
    """Return the Euclidean norm of all float tensors in a tree together; numbers and tensors on meta count as zero."""
    squares = 0.0
    for _, leaf in leaf_paths(value, ()):
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and not leaf.is_meta:
            squares += torch.linalg.vector_norm(leaf.detach(), dtype=torch.float64).item() ** 2
    return math.sqrt(squares)


class Outliers:
    """Sets replies with suspicious lengths aside until the lengths of all replies to the call are known.

    Args:
        bounds: Bounds of the compared parts by name.
        lengths_of: Returns the lengths of a client's reply by the name of the part.
        sizes: Number of samples by client id.
    """

    def __init__(
        self,
        bounds: Mapping[str, LengthBound],
        lengths_of: Callable[[int, Reply], dict[str, float]],
        sizes: Mapping[int, int],
    ):
        self._bounds = bounds
        self._lengths_of = lengths_of
        self._sizes = sizes
        self._lengths: dict[str, list[float]] = {name: [] for name in bounds}
        self._per_sample: dict[str, list[float]] = {name: [] for name in bounds}
        self._suspicious: list[tuple[int, Reply, dict[str, float]]] = []
        self._store = ValueStore()

    def set_aside(self, id: int, reply: Reply | SummedReply) -> bool:
        """Record the lengths of a reply, and return whether the reply is set aside."""
        if not self._bounds:
            return False
        own = reply.lengths if isinstance(reply, SummedReply) else self._lengths_of(id, reply)
        for name, lengths in self._lengths.items():
            lengths.append(own[name])
            self._per_sample[name].append(own[name] / self._sizes[id])
        if isinstance(reply, SummedReply) or not exceeds(own, self._bounds):
            return False
        self._suspicious.append((id, replace(reply, tree=self._store.keep(reply.tree)), own))
        return True

    def decided(self) -> Iterator[tuple[int, Reply, Fault | None]]:
        """Yield each reply that was set aside, in ascending order of client ids, with its fault or None."""
        medians = {
            name: (statistics.median(values), statistics.median(self._per_sample[name]))
            for name, values in self._lengths.items()
            if len(values) >= MIN_REPLIES
        }
        for id, reply, lengths in self._suspicious:
            fault = None
            for name, (median, per_sample) in medians.items():
                if self._bounds[name].is_exceeded(lengths[name], self._sizes[id], median, per_sample):
                    fault = _fault(name, lengths[name], median)
                    break
            yield id, reply, fault


def exceeds(lengths: dict[str, float], bounds: Mapping[str, LengthBound]) -> bool:
    """Return whether one of the lengths is suspicious."""
    return any(lengths[name] > bound.unsuspicious for name, bound in bounds.items())


def _fault(name: str, value: float, median: float) -> Fault:
    times = f", {value / median:.3g} times" if median else "; zero is"
    return Fault("reply.outlier", f"{name} has the length {value:.3g}{times} the median of the replies", value)
