"""Nested dicts of tensors: messages, replies and states consist of them.

Leaves are tensors, numbers, strings and None. Keys are strings; in messages and replies they may also be whole
numbers, such as class indices.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raylt.staging import moved

#: A nested dict whose leaves are tensors, numbers, strings or None. Messages, replies and states are trees.
Tree = dict[Any, Any]
LeafPath = tuple[Any, ...]


def leaves(tree: Tree, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every leaf with its dotted path, in the order of the dicts."""
    for key, value in tree.items():
        place = f"{path}.{key}" if path else str(key)
        if isinstance(value, dict):
            yield from leaves(value, place)
        else:
            yield place, value


def leaf_paths(value: Any, path: LeafPath = ()) -> Iterator[tuple[LeafPath, Any]]:
    """Yield every leaf with its path, a tuple of keys, so that a dot in a key does not look like nesting.

    A value that is no tree is a leaf itself.
    """
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from leaf_paths(inner, (*path, key))
    else:
        yield path, value


def map_tensors(fn: Callable[[Tensor], Any], tree: Tree) -> Tree:
    """Return the tree with `fn` applied to its tensors; other leaves stay."""
    return {
        key: map_tensors(fn, value) if isinstance(value, dict) else fn(value) if isinstance(value, Tensor) else value
        for key, value in tree.items()
    }


def to(tree: Tree, device: torch.device) -> Tree:
    """Return the tree on a device, moved in one copy (raylt.staging); tensors already on it are shared."""
    arrived = iter(moved([leaf for _, leaf in leaves(tree) if isinstance(leaf, Tensor)], device))
    return map_tensors(lambda _: next(arrived), tree)


def snapshot(tree: Tree) -> Tree:
    """Return a CPU copy of a tree, which later changes to the tree do not reach."""
    own = map_tensors(lambda t: t.detach().clone() if t.device.type == "cpu" else t.detach(), tree)
    return to(own, torch.device("cpu"))


def view(array: np.ndarray) -> Tensor:
    """Return a tensor that shares an array's memory; do not write to it, as an object store's arrays are read-only."""
    if array.flags.writeable:  # the usual case; a filter of warnings would take ten times as long as the view
        return torch.from_numpy(array)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)


def to_arrays(tree: Tree) -> Tree:
    """Return the tree with NumPy arrays for tensors; an object store shares arrays between processes without a copy."""
    return map_tensors(lambda t: t.numpy(), tree)


def from_arrays(tree: Tree) -> Tree:
    """Return the tree with tensors for arrays, without a copy; see `view`."""
    return {
        key: from_arrays(value) if isinstance(value, dict) else view(value) if isinstance(value, np.ndarray) else value
        for key, value in tree.items()
    }


def nbytes(tree: Tree) -> int:
    """Return the size of a plain encoding in bytes: tensors' bytes, 8 for each number, the length of each string."""
    total = 0
    for _, leaf in leaves(tree):
        if isinstance(leaf, Tensor):
            total += leaf.numel() * leaf.element_size()
        else:
            total += len(leaf.encode()) if isinstance(leaf, str) else 0 if leaf is None else 8
    return total


def zip_tensors(fn: Callable[..., Any], *trees: Tree) -> Tree:
    """Return a tree whose leaves are `fn` of the tensors or numbers under the same name in several trees.

    Raises:
        KeyError: A tree lacks a name of the first tree.
    """
    first = trees[0]
    return {
        key: zip_tensors(fn, *(other[key] for other in trees))
        if isinstance(value, dict)
        else fn(*(other[key] for other in trees))
        for key, value in first.items()
    }


def add(a: Tree, b: Tree) -> Tree:
    """Return a + b for the names in a."""
    return zip_tensors(lambda x, y: x + y, a, b)


def sub(a: Tree, b: Tree) -> Tree:
    """Return a - b for the names in a."""
    return zip_tensors(lambda x, y: x - y, a, b)


def scale(a: Tree, factor: float) -> Tree:
    """Return factor * a."""
    return zip_tensors(lambda x: factor * x, a)


class Stamps:
    """A record of tensors that were handed over; it finds tensors that were changed in place afterwards.

    It makes no copy: torch counts the in-place changes of each tensor's memory, over all its views.
    """

    def __init__(self) -> None:
        self._handed_over: dict[str, tuple[Tensor, int]] = {}

    def add(self, tree: Tree, path: str) -> None:
        """Record the tensors of a tree; they replace tensors recorded under the same names."""
        for name, leaf in leaves(tree, path):
            if isinstance(leaf, Tensor):
                self._handed_over[name] = leaf, leaf._version

    def changed(self) -> str | None:
        """Return the path of the first tensor that was changed, or None."""
        return next((path for path, (tensor, version) in self._handed_over.items() if tensor._version != version), None)


class RunningSum:
    """A sum or weighted mean of trees in float64; it adds one tree at a time and keeps none of them.

    Float tensors and numbers are summed, times the weight. Integer and boolean tensors are summed in a sum; in a mean
    they take the maximum, as BatchNorm's batch counters need. A missing key counts as zero in a sum.
    """

    def __init__(self) -> None:
        self.total: Tree = {}
        self.weight = 0.0
        self._like: Tree = {}

    def add(self, tree: Tree, weight: float | None = None) -> None:
        """Add `weight * tree` for a mean, or the tree itself for a sum (no weight)."""
        _add(self.total, self._like, tree, weight)
        self.weight += 0.0 if weight is None else weight

    def merge(self, later: "RunningSum", maximum: bool) -> None:
        """Add another running sum; the other sum stays unchanged.

        Args:
            later: The other sum.
            maximum: If true, integer tensors take the maximum, as in a mean.
        """
        _merge(self.total, self._like, later.total, later._like, maximum)
        self.weight += later.weight

    def __getstate__(self) -> Tree:
        return {**vars(self), "total": to_arrays(self.total)}  # an object store does not copy arrays

    def __setstate__(self, state: Tree) -> None:
        vars(self).update(state, total=from_arrays(state["total"]))

    def sum(self) -> Tree:
        """Return the sum, float tensors in float64 and integer tensors in int64."""
        return self.total

    def mean(self) -> Tree:
        """Return the weighted mean, each tensor in its original type."""
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


def _merge(total: Tree, like: Tree, more: Tree, more_like: Tree, maximum: bool) -> None:
    for key, value in more.items():
        if isinstance(value, dict):
            _merge(total.setdefault(key, {}), like.setdefault(key, {}), value, more_like[key], maximum)
        elif not isinstance(value, Tensor):
            total[key] = total.get(key, 0) + value
        elif key not in total:
            total[key], like[key] = value.clone(), more_like[key]
        elif maximum and not value.is_floating_point():
            torch.maximum(total[key], value, out=total[key])
        else:
            total[key].add_(value)


def _divide(total: Tree, like: Tree, weight: float) -> Tree:
    return {
        key: _divide(value, like[key], weight)
        if isinstance(value, dict)
        else value / weight
        if not isinstance(value, Tensor)
        else (value / weight if value.is_floating_point() else value).to(like[key])
        for key, value in total.items()
    }
