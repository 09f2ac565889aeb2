"""`Secure`: adds up masked replies, so that the server sees only their sums (`federation.secure`).

The aggregator simulates both sides of the protocol in the server's process: it computes from a client's reply what the
client would send, and from that alone what the server would learn. Anyone who can inspect this process sees the
replies. The bits of the sums, the consequences of lost clients, and the cost in bytes and seconds are real.

`FixedPoint` encodes the summable parts of a reply as one vector of whole numbers, and decodes a sum of such vectors. A
float is rounded to a multiple of a power of two. The power depends on the maximum magnitude of the part and the number
of clients, so that all sums fit into 62 bits. Sums of whole numbers are exact: they do not depend on their order, and
masks modulo 2^64 can be removed without a trace.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raylt.core.client import Reply
from raylt.core.fleet.aggregation import Aggregator, Replies
from raylt.core.fleet.block_sums import SummedReply
from raylt.core.fleet.reductions import Reduction
from raylt.core.protection.masking import HASH_BYTES, KEY_BYTES, SHARE_BYTES, Collector, Member, introduce
from raylt.core.protection.survivors import fewest_survivors
from raylt.core.round_stats import Traffic
from raylt.errors import ConfigError, Overflow
from raylt.tree import LeafPath, Tree, from_leaf_paths, leaf_paths

# Maximum encoded magnitude of parameters and gradients, and of sums over a client's samples. A part may only declare
# smaller ones. Whole numbers in totals may use all 62 bits.
MAX_MAGNITUDE = {"mean": 1e6, "total": 1e9}
BITS = 62
MAX_COUNTER = 2.0**36  # maximum number of batches that a normalisation layer has seen
SEALED_BYTES = 2 * SHARE_BYTES + 16  # two shares and their authentication tag


class Secure(Aggregator):
    """An aggregator that computes means and sums from masked replies.

    Args:
        parts: The reductions by name, `mean` or `total`; empty if nothing is uploaded.
        members: Ids of the asked clients.
        weights: The weight of each client's reply, by id.

    Attributes:
        overhead: Additional bytes compared with plain replies; `up` is negative if whole numbers took more.
    """

    def __init__(self, parts: Mapping[str, Reduction], members: Iterable[int], weights: Mapping[int, float]):
        super().__init__()
        self._parts = parts
        self._ids = list(members)
        self._declared_weights = weights
        self._numbers = {id: number for number, id in enumerate(self._ids)}  # member number by client id
        heaviest = max((weights[id] for id in self._ids), default=1.0) or 1.0
        self._fixed_point = FixedPoint(parts, len(self._ids), heaviest)
        self._threshold = fewest_survivors(len(self._ids))
        self._members = [Member(number) for number in range(len(self._ids))] if parts else []
        self._collector = Collector(introduce(self._members, self._threshold), self._fixed_point.length)
        count = len(self._members)
        pairs = count * max(0, count - 1)
        self.overhead = Traffic(
            down=2 * KEY_BYTES * count**2 + SEALED_BYTES * pairs,
            up=2 * KEY_BYTES * count + SEALED_BYTES * pairs + HASH_BYTES * (2 * count + 1) * count,
        )

    def accept(self, id: int, reply: Reply | SummedReply) -> None:
        assert isinstance(reply, Reply)
        if self._members:
            number = self._numbers[id]
            masked = self._members[number].mask(self._fixed_point.encode(reply.tree, reply.weight))
            self._collector.add(number, masked)
            self.overhead.up += masked.nbytes - self._fixed_point.plain_bytes(reply.tree)
        self.weights[id] = reply.weight

    def result(self) -> Replies:
        if not self._members:
            return Replies({}, self.weights)
        survivors = [self._numbers[id] for id in self.weights]
        answers = {number: self._members[number].unmask(survivors) for number in survivors}
        self.overhead.up += SHARE_BYTES * len(survivors) * len(self._members)
        total = self._collector.unmasked(answers, self._threshold)
        self.troubles = [
            f"client {self._ids[number]} {fault}; the secure sum was unmasked without it"
            for number, fault in self._collector.wrong.items()
        ]
        return Replies(self._fixed_point.decode(total, sum(self.weights.values())), self.weights)

    def empty(self) -> "Secure":
        return Secure(self._parts, self._ids, self._declared_weights)


@dataclass(frozen=True)
class VectorEntry:
    """One tensor or number of a reply, encoded in a slice of the vector.

    Attributes:
        path: Path of the leaf in the reply.
        kind: Kind of the reduction, "mean" or "total".
        like: Template of the entry, a tensor or a number.
        step: The value that 1 in the vector stands for.
        largest: Maximum magnitude of a value.
    """

    path: LeafPath
    kind: str
    like: Any
    step: float
    largest: float

    @property
    def size(self) -> int:
        return self.like.numel() if isinstance(self.like, Tensor) else 1

    @property
    def nbytes(self) -> int:
        return self.like.nbytes if isinstance(self.like, Tensor) else 8


class FixedPoint:
    """The fixed-point encoding of reply parts as one vector of integers.

    The vector also contains, for each entry that a reply may omit, the number of clients that have it.

    Args:
        parts: Reductions by name, `mean` or `total`, each with a template.
        clients: Maximum number of vectors in a sum.
        heaviest: The largest weight; in means, clients' weights are relative to it.

    Raises:
        ConfigError: A part has no template or is not a sum; the message names the part.
    """

    def __init__(self, parts: Mapping[str, Reduction], clients: int, heaviest: float):
        self._parts = parts
        self._heaviest = heaviest
        self._entries: list[VectorEntry] = []
        self._optional: list[LeafPath] = []
        for name, part in parts.items():
            _check_summable(name, part)
            largest = min(MAX_MAGNITUDE[part.kind], part.largest or math.inf)
            step = 2.0 ** -math.floor(BITS - math.log2(clients * largest))
            for path, like in leaf_paths(part.template, (name,)):
                entry_step, entry_largest = _step_and_largest(like, part.kind, step, largest, clients)
                self._entries.append(VectorEntry(path, part.kind, like, entry_step, entry_largest))
            if part.partial:
                self._optional += [(name, key) for key in part.template]

    @property
    def length(self) -> int:
        return sum(entry.size for entry in self._entries) + len(self._optional)

    def plain_bytes(self, tree: Tree) -> int:
        """Return the size in bytes of a reply in the types that clients send; clipped replies are float64."""
        flat = dict(leaf_paths(tree, ()))
        return sum(entry.nbytes for entry in self._entries if flat.get(entry.path) is not None)

    def encode(self, tree: Tree, weight: float) -> np.ndarray:
        """Return a reply's parts as a vector in two's complement, uint64 [n].

        Raises:
            Overflow: A value does not fit; the message names its entry.
        """
        flat = dict(leaf_paths(tree, ()))
        vector = []
        for entry in self._entries:
            value = flat.get(entry.path)
            if value is None:
                vector.append(np.zeros(entry.size, dtype=np.int64))
                continue
            values = torch.as_tensor(value).detach().reshape(-1)
            if values.dtype == torch.bool:
                values = values.to(torch.uint8)
            largest = float(values.abs().max()) if len(values) else 0.0
            if not largest <= entry.largest:
                path = ".".join(map(str, entry.path))
                raise Overflow(
                    f"{path}: a secure sum accepts values of at most {entry.largest:.3g} ({largest:.3g}). Lower "
                    "local.lr, or make features smaller.",
                    code="reply.overflow",
                    path=path,
                    value=largest,
                )
            if entry.step == 1:
                vector.append(values.to(torch.int64).numpy())
            else:
                share = weight / self._heaviest if entry.kind == "mean" else 1.0
                vector.append((values.double() * (share / entry.step)).round().to(torch.int64).numpy())
        present = [int(key in tree[name]) for name, key in self._optional]
        return np.concatenate([*vector, np.array(present, dtype=np.int64)]).astype(np.int64).view(np.uint64)

    def decode(self, total: np.ndarray, weight: float) -> Tree:
        """Decode a sum of vectors to the parts that an aggregation without masks would return.

        Means have the types of their templates, totals are float64 and int64. Counters in a mean are the clients' mean,
        rounded; a plain aggregation takes their maximum.

        Args:
            total: The sum of the vectors, uint64 [n].
            weight: The sum of the weights.
        """
        numbers = torch.from_numpy(total.view(np.int64).copy())
        counts = dict(zip(self._optional, numbers[self.length - len(self._optional) :].tolist(), strict=True))
        leaves: dict[LeafPath, Any] = {}
        start = 0
        for entry in self._entries:
            value = numbers[start : start + entry.size]
            start += entry.size
            if counts.get(entry.path[:2], 1) == 0:
                continue
            leaves[entry.path] = self._restored(entry, value, weight)
        empty = {name: {} for name, part in self._parts.items() if isinstance(part.template, dict)}
        return empty | from_leaf_paths(leaves)

    def _restored(self, entry: VectorEntry, value: Tensor, weight: float) -> Any:
        like = entry.like
        if entry.step != 1:
            real = value.double() * (entry.step * (self._heaviest / weight if entry.kind == "mean" else 1.0))
            if not isinstance(like, Tensor):
                return real.item()
            whole = entry.kind == "mean" and not like.is_floating_point()
            real = (real.round() if whole else real).reshape(like.shape)
            return real.to(like.dtype) if entry.kind == "mean" else real
        return value.reshape(like.shape).clone() if isinstance(like, Tensor) else value.item()


def _check_summable(name: str, part: Reduction) -> None:
    if part.kind == "each":
        raise ConfigError(
            f"federation.secure: the method requests each client's own value, which a secure sum hides (part {name}). "
            "Request a mean or a total, or set federation.secure=false.",
            code="privacy.not-summable",
            key="federation.secure",
            part=name,
        )
    if part.template is None:
        raise ConfigError(
            f"federation.secure: the layout of a part is not known in advance (part {name}). Declare it with like(...) "
            "or within(...), so that all clients' vectors have the same layout.",
            code="privacy.not-summable",
            key="federation.secure",
            part=name,
        )


def _step_and_largest(like: Any, kind: str, step: float, largest: float, clients: int) -> tuple[float, float]:
    """Return the resolution and the largest value of the fixed-point numbers for an entry.

    Whole numbers of totals are exact. Whole numbers in means may be counters, which grow with the run.
    """
    whole = not like.is_floating_point() if isinstance(like, Tensor) else type(like) is int
    if whole and kind == "mean":
        return 2.0 ** -math.floor(BITS - math.log2(clients * MAX_COUNTER)), MAX_COUNTER
    return (1.0, 2.0**BITS / clients) if whole else (step, largest)
