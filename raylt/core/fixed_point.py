"""Summable parts of a reply as one vector of whole numbers, and a sum of such vectors as parts again.

A float is rounded to a multiple of a power of two. The power follows from the magnitude that a part may have and the
number of clients, so that no sum of theirs leaves 62 bits. Sums of such numbers are exact: they do not depend on their
order, and can be masked and unmasked modulo 2^64 without a trace.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raylt.core.reductions import Reduction
from raylt.errors import ConfigError, Overflow
from raylt.tree import Tree

# Magnitudes for which digits are set aside where a part declares none, or larger ones: of parameters and gradients, and
# of sums over a client's samples. Whole numbers have all that leaves 62 bits.
LARGEST = {"mean": 1e6, "total": 1e9}
BITS = 62
COUNTER = 2.0**36       # batches that a normalisation layer has seen, at most
Path = tuple[Any, ...]


@dataclass(frozen=True)
class Entry:
    """One tensor or number of a part.

    Attributes:
        like: its template; a tensor or a number.
        step: what 1 stands for.
        largest: magnitude up to which it fits.
    """

    path: Path
    kind: str
    like: Any
    step: float
    largest: float

    @property
    def size(self) -> int:
        return self.like.numel() if isinstance(self.like, Tensor) else 1


class FixedPoint:
    """The place of every entry of the parts in a vector.

    Beside the entries it holds, of each part whose entries may be left out, how many clients have which.

    Args:
        parts: `mean` or `total`, each with a template.
        clients: at most so many vectors are summed.
        heaviest: the largest weight; in means a client counts as its share of it.

    Raises:
        ConfigError: a part has no template, or is not to be summed; names it.
    """

    def __init__(self, parts: Mapping[str, Reduction], clients: int, heaviest: float):
        self._parts, self._heaviest = parts, heaviest
        self._entries: list[Entry] = []
        self._owned: list[Path] = []
        for name, part in parts.items():
            if part.kind == "each":
                raise ConfigError(f"federation.secure = true: the part {name} is asked for of each client by itself, "
                                  "and a secure sum shows none")
            if part.template is None:
                raise ConfigError(f"federation.secure = true: the part {name} has no template; ask for it with "
                                  "like(...) or within(...), so that every client's vector is laid out alike")
            largest = min(LARGEST[part.kind], part.largest or math.inf)
            step = 2.0 ** -math.floor(BITS - math.log2(clients * largest))
            self._entries += [Entry(path, part.kind, like, *_of(like, part.kind, step, largest, clients))
                              for path, like in _leaves(part.template, (name,))]
            if part.partial:
                self._owned += [(name, key) for key in part.template]

    @property
    def length(self) -> int:
        return sum(entry.size for entry in self._entries) + len(self._owned)

    def encode(self, tree: Tree, weight: float) -> np.ndarray:
        """A reply's parts, uint64 [n]: two's complement.

        Raises:
            Overflow: a value is beyond what fits; names it.
        """
        flat, vector = dict(_leaves(tree, ())), []
        for entry in self._entries:
            value = flat.get(entry.path)
            if value is None:
                vector.append(np.zeros(entry.size, dtype=np.int64))
                continue
            values = torch.as_tensor(value).detach().reshape(-1)
            largest = float(values.abs().max()) if len(values) else 0.0
            if not largest <= entry.largest:
                raise Overflow(f"{'.'.join(map(str, entry.path))} holds {largest:.3g}, and up to {entry.largest:.3g} "
                               "fits into a secure sum; bring it down (a lower local.lr, features of smaller norm)")
            if entry.step == 1:
                vector.append(values.to(torch.int64).numpy())
            else:
                share = weight / self._heaviest if entry.kind == "mean" else 1.0
                vector.append((values.double() * (share / entry.step)).round().to(torch.int64).numpy())
        owned = [int(key in tree[name]) for name, key in self._owned]
        return np.concatenate([*vector, np.array(owned, dtype=np.int64)]).astype(np.int64).view(np.uint64)

    def decode(self, total: np.ndarray, weight: float) -> Tree:
        """The parts from a sum of vectors, as a plain aggregation gives them: means in their own types, totals in
        float64 and int64. Counters in a mean are the clients' mean, rounded, where plainly they are the maximum.

        Args:
            weight: the sum of the weights.
        """
        numbers, place = torch.from_numpy(total.view(np.int64).copy()), 0
        grown: Tree = {name: {} for name, part in self._parts.items() if isinstance(part.template, dict)}
        counts = dict(zip(self._owned, numbers[self.length - len(self._owned):].tolist(), strict=True))
        for entry in self._entries:
            value, place = numbers[place:place + entry.size], place + entry.size
            if counts.get(entry.path[:2], 1) == 0:
                continue
            here = grown
            for name in entry.path[:-1]:
                here = here.setdefault(name, {})
            here[entry.path[-1]] = self._restored(entry, value, weight)
        return grown

    def _restored(self, entry: Entry, value: Tensor, weight: float) -> Any:
        like = entry.like
        if entry.step != 1:
            real = value.double() * (entry.step * (self._heaviest / weight if entry.kind == "mean" else 1.0))
            if not isinstance(like, Tensor):
                return real.item()
            whole = entry.kind == "mean" and not like.is_floating_point()
            real = (real.round() if whole else real).reshape(like.shape)
            return real.to(like.dtype) if entry.kind == "mean" else real
        return value.reshape(like.shape).clone() if isinstance(like, Tensor) else value.item()


def _of(like: Any, kind: str, step: float, largest: float, clients: int) -> tuple[float, float]:
    """Step and largest value of an entry: whole numbers of totals are exact, and those in means may be counters, which
    grow with the run."""
    whole = not like.is_floating_point() if isinstance(like, Tensor) else type(like) is int
    if whole and kind == "mean":
        return 2.0 ** -math.floor(BITS - math.log2(clients * COUNTER)), COUNTER
    return (1.0, 2.0**BITS / clients) if whole else (step, largest)


def _leaves(value: Any, path: Path) -> list[tuple[Path, Any]]:
    """With the names themselves for a path: a dot in a name is not a dict in a dict."""
    if isinstance(value, dict):
        return [leaf for name, inner in value.items() for leaf in _leaves(inner, (*path, name))]
    return [(path, value)]
