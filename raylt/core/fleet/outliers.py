"""`Outliers`: tells a reply whose values are far longer than those of all other clients from honest replies.

A model of a thousand times the usual length has values that a model may have, and leaves other clients a mean on which
their training diverges. So the server compares lengths: the Euclidean norm of all float tensors of a part. A reply is
rejected if one of its parts is longer than SHORT and longer than FACTOR times each of

- the median length of the part over the replies to the call,
- the part as the server sent it, where the template has values.

Parts with a template are compared if they become part of a model: a `mean`, or an `each` with the limit of a model's
values (`up_to`), unless the limit is larger. At least FEWEST replies are needed, since two clients have no majority.
Honest clients differ by far less: the longest such part in the contract's runs is 3.3 times the median, and a linear
classifier that one client trains on 20,000 samples, and nine on 20 each, is 37 times as long.

A `total` with a template is compared by its length per sample, with SHORT_SUM in place of SHORT: the second moment of
features of length 1,000.

Lengths below the bound, secure sums and uploads with noise are not compared. A server of secure sums sees no length,
and a rejection that depends on other clients would reveal more than noise accounts for. Robust rules compare replies
themselves.
"""

import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
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
SHORT = 1000.0  # a length that no update of an honest client reaches in one round, unless all of them do
SHORT_SUM = 1e6  # the same for the share of one sample in a sum
FEWEST = 3  # replies


def is_compared(part: Reduction, largest: float) -> bool:
    """Return whether the lengths of a reply part are compared.

    Args:
        largest: magnitude that a value of a model may have.
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
        bounds: for each compared part, the length up to which a reply is not suspicious.
        lengths_of: returns the lengths of a client's reply by the name of the part.
    """

    def __init__(self, bounds: dict[str, float], lengths_of: Callable[[int, Reply], dict[str, float]]):
        self._bounds = bounds
        self._lengths_of = lengths_of
        self._lengths: dict[str, list[float]] = {name: [] for name in bounds}
        self._suspicious: list[tuple[int, Reply, dict[str, float]]] = []
        self._store = ValueStore()

    def set_aside(self, id: int, reply: Reply | SummedReply) -> bool:
        """Record the lengths of a reply, and return whether the reply is set aside."""
        if not self._bounds:
            return False
        own = reply.lengths if isinstance(reply, SummedReply) else self._lengths_of(id, reply)
        for name, lengths in self._lengths.items():
            lengths.append(own[name])
        if isinstance(reply, SummedReply) or not exceeds(own, self._bounds):
            return False
        self._suspicious.append((id, replace(reply, tree=self._store.keep(reply.tree)), own))
        return True

    def decided(self) -> Iterator[tuple[int, Reply, Fault | None]]:
        """Yield each reply that was set aside, in ascending order of client ids, with its fault or None."""
        medians = {name: statistics.median(values) for name, values in self._lengths.items() if len(values) >= FEWEST}
        for id, reply, lengths in self._suspicious:
            fault = None
            for name, median in medians.items():
                if lengths[name] > max(self._bounds[name], FACTOR * median):
                    fault = _fault(name, lengths[name], median)
                    break
            yield id, reply, fault


def exceeds(lengths: dict[str, float], bounds: dict[str, float]) -> bool:
    """Return whether one of the lengths exceeds its bound."""
    return any(lengths[name] > bound for name, bound in bounds.items())


def _fault(name: str, value: float, median: float) -> Fault:
    times = f", {value / median:.3g} times" if median else "; zero is"
    return Fault("reply.outlier", f"{name} has the length {value:.3g}{times} the median of the replies", value)
