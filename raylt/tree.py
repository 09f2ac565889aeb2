"""Nested dicts of tensors: what messages, replies and states are made of. Leaves: tensors, numbers, strings, None.

Keys are strings; in messages and replies they may be whole numbers too, as of classes.
"""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raylt.staging import moved

Tree = dict[Any, Any]


def leaves(tree: Tree, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf with its dotted path, in the order of the dicts."""
    for key, value in tree.items():
        here = f"{path}.{key}" if path else str(key)
        if isinstance(value, dict):
            yield from leaves(value, here)
        else:
            yield here, value


def map_tensors(fn: Callable[[Tensor], Any], tree: Tree) -> Tree:
    """The tree with `fn` applied to its tensors; other leaves stay."""
    return {key: map_tensors(fn, value) if isinstance(value, dict)
            else fn(value) if isinstance(value, Tensor) else value for key, value in tree.items()}


def to(tree: Tree, device: torch.device) -> Tree:
    """The tree on a device, in one copy (raylt.staging); tensors already there are shared, not copied."""
    arrived = iter(moved([leaf for _, leaf in leaves(tree) if isinstance(leaf, Tensor)], device))
    return map_tensors(lambda _: next(arrived), tree)


def snapshot(tree: Tree) -> Tree:
    """A copy on the CPU that no later step can change."""
    own = map_tensors(lambda t: t.detach().clone() if t.device.type == "cpu" else t.detach(), tree)
    return to(own, torch.device("cpu"))


def view(array: np.ndarray) -> Tensor:
    """A tensor over an array's memory. Arrays from an object store are read-only: nobody may write to the tensor."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)


def to_arrays(tree: Tree) -> Tree:
    """Tensors as numpy arrays, which an object store shares between processes without copying."""
    return map_tensors(lambda t: t.numpy(), tree)


def from_arrays(tree: Tree) -> Tree:
    """The inverse of `to_arrays`, without a copy: see `view`."""
    return {key: from_arrays(value) if isinstance(value, dict) else view(value) if isinstance(value, np.ndarray)
            else value for key, value in tree.items()}


def nbytes(tree: Tree) -> int:
    """Bytes of the tensors; 8 for each number and the length of each string, as a plain encoding would take."""
    total = 0
    for _, leaf in leaves(tree):
        if isinstance(leaf, Tensor):
            total += leaf.numel() * leaf.element_size()
        else:
            total += len(leaf.encode()) if isinstance(leaf, str) else 0 if leaf is None else 8
    return total


def zip_tensors(fn: Callable[..., Any], *trees: Tree) -> Tree:
    """A tree with `fn` of the tensors or numbers that the trees have at each place; they have the same names.

    Raises:
        KeyError: a name of the first is missing in another.
    """
    first = trees[0]
    return {key: zip_tensors(fn, *(other[key] for other in trees)) if isinstance(value, dict)
            else fn(*(other[key] for other in trees)) for key, value in first.items()}


def add(a: Tree, b: Tree) -> Tree:
    """a + b, for the names of a."""
    return zip_tensors(lambda x, y: x + y, a, b)


def sub(a: Tree, b: Tree) -> Tree:
    """a - b, for the names of a."""
    return zip_tensors(lambda x, y: x - y, a, b)


def scale(a: Tree, factor: float) -> Tree:
    """factor * a."""
    return zip_tensors(lambda x: factor * x, a)


class Stamps:
    """Tensors as they were when they were handed over: one that is changed in place afterwards is found.

    It costs no copy: torch counts the changes of each tensor's memory, over all its views.
    """

    def __init__(self) -> None:
        self._handed_over: dict[str, tuple[Tensor, int]] = {}

    def add(self, tree: Tree, path: str) -> None:
        """Remembers the tensors of a tree; those that were handed over under the same names before are forgotten."""
        for here, leaf in leaves(tree, path):
            if isinstance(leaf, Tensor):
                self._handed_over[here] = leaf, leaf._version

    def changed(self) -> str | None:
        """The path of the first tensor that is no longer what it was, or None."""
        return next((path for path, (tensor, version) in self._handed_over.items() if tensor._version != version), None)


class Fold:
    """Adds trees up one by one, in float64, without keeping them.

    Float tensors and numbers are summed (times the weight), integer and boolean tensors take the maximum in a mean
    (BatchNorm's batch counters) and are summed in a sum. A key that is absent from a tree counts as zero in a sum.
    """

    def __init__(self) -> None:
        self.total: Tree = {}
        self.weight = 0.0
        self._like: Tree = {}

    def add(self, tree: Tree, weight: float | None = None) -> None:
        """Adds `weight * tree` for a mean, or the tree itself for a sum (no weight)."""
        _add(self.total, self._like, tree, weight)
        self.weight += 0.0 if weight is None else weight

    def merge(self, later: "Fold", maximum: bool) -> None:
        """Adds what another fold has added up; that one stays as it is.

        Args:
            maximum: whether integer tensors take the maximum, as in a mean.
        """
        _merge(self.total, self._like, later.total, later._like, maximum)
        self.weight += later.weight

    def __getstate__(self) -> Tree:
        return {**vars(self), "total": to_arrays(self.total)}       # which an object store need not copy

    def __setstate__(self, state: Tree) -> None:
        vars(self).update(state, total=from_arrays(state["total"]))

    def sum(self) -> Tree:
        """Float tensors [..] in float64, integer tensors in int64."""
        return self.total

    def mean(self) -> Tree:
        """The weighted mean, each tensor in the type it came in."""
        return _divide(self.total, self._like, self.weight)


def _add(total: Tree, like: Tree, tree: Tree, weight: float | None) -> None:
    for key, value in tree.items():
        if isinstance(value, dict):
            _add(total.setdefault(key, {}), like.setdefault(key, {}), value, weight)
        elif not isinstance(value, Tensor):
            assert isinstance(value, int | float), f"{key}: a {type(value).__name__} cannot be averaged"
            total[key] = total.get(key, 0) + (value if weight is None else weight * value)
        elif value.is_floating_point():
            if key not in total:
                total[key], like[key] = torch.zeros(value.shape, dtype=torch.float64), value.dtype
            total[key].add_(value, alpha=1.0 if weight is None else weight)
        elif key not in total:
            total[key], like[key] = value.to(torch.int64, copy=True), value.dtype
        elif weight is None:
            total[key].add_(value)
        else:
            torch.maximum(total[key], value, out=total[key])


def _merge(total: Tree, like: Tree, more: Tree, their_like: Tree, maximum: bool) -> None:
    for key, value in more.items():
        if isinstance(value, dict):
            _merge(total.setdefault(key, {}), like.setdefault(key, {}), value, their_like[key], maximum)
        elif not isinstance(value, Tensor):
            total[key] = total.get(key, 0) + value
        elif key not in total:
            total[key], like[key] = value.clone(), their_like[key]
        elif maximum and not value.is_floating_point():
            torch.maximum(total[key], value, out=total[key])
        else:
            total[key].add_(value)


def _divide(total: Tree, like: Tree, weight: float) -> Tree:
    return {key: _divide(value, like[key], weight) if isinstance(value, dict)
            else value / weight if not isinstance(value, Tensor)
            else (value / weight if value.is_floating_point() else value).to(like[key])
            for key, value in total.items()}
