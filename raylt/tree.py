"""Functions on trees (nested dicts of tensors), the form of messages, replies and states.

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
    """Yield every leaf of a tree with its dotted path, in the order of the dicts."""
    for key, value in tree.items():
        place = f"{path}.{key}" if path else str(key)
        if isinstance(value, dict):
            yield from leaves(value, place)
        else:
            yield place, value


def leaf_paths(value: Any, path: LeafPath = ()) -> Iterator[tuple[LeafPath, Any]]:
    """Yield every leaf of a tree with its path as a tuple of keys.

    Unlike a dotted path, a tuple is unambiguous if a key contains a dot. A value that is not a tree is itself a leaf.
    """
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from leaf_paths(inner, (*path, key))
    else:
        yield path, value


def from_leaf_paths(leaves: Mapping[LeafPath, Any]) -> Any:
    """Build a tree from its leaves by path, the inverse of `leaf_paths`.

    If there is a leaf with an empty path, that leaf is returned.
    """
    if () in leaves:
        return leaves[()]
    tree: Tree = {}
    for path, leaf in leaves.items():
        parent = tree
        for name in path[:-1]:
            parent = parent.setdefault(name, {})
        parent[path[-1]] = leaf
    return tree


def map_tensors(fn: Callable[[Tensor], Any], tree: Tree) -> Tree:
    """Apply `fn` to all tensors of a tree; leave other leaves unchanged."""
    mapped = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            mapped[key] = map_tensors(fn, value)
        else:
            mapped[key] = fn(value) if isinstance(value, Tensor) else value
    return mapped


def to(tree: Tree, device: torch.device) -> Tree:
    """Return a tree on a device, moved in one copy (raylt.staging). Tensors already on the device are shared."""
    arrived = iter(moved([leaf for _, leaf in leaves(tree) if isinstance(leaf, Tensor)], device))
    return map_tensors(lambda _: next(arrived), tree)


def without_values(tree: Tree) -> Tree:
    """Return a tree whose tensors have types and shapes only: they lie on torch's meta device."""
    return map_tensors(lambda t: t.to("meta"), tree)


def snapshot(tree: Tree) -> Tree:
    """Return a copy of a tree on the CPU that shares no memory with the tree."""
    own = map_tensors(lambda t: t.detach().clone() if t.device.type == "cpu" else t.detach(), tree)
    return to(own, torch.device("cpu"))


def view(array: np.ndarray) -> Tensor:
    """Return a tensor that shares a NumPy array's memory.

    Do not write to the tensor: arrays from an object store are read-only.
    """
    if array.flags.writeable:  # The usual case; the warnings filter takes ten times as long as the view.
        return torch.from_numpy(array)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)


def to_arrays(tree: Tree) -> Tree:
    """Convert the tensors of a tree to NumPy arrays, which an object store shares between processes."""
    return map_tensors(lambda t: t.numpy(), tree)


def from_arrays(tree: Tree) -> Tree:
    """Convert the arrays of a tree to tensors without a copy; see `view`."""
    mapped = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            mapped[key] = from_arrays(value)
        else:
            mapped[key] = view(value) if isinstance(value, np.ndarray) else value
    return mapped


def nbytes(tree: Tree) -> int:
    """Return the size of a tree in bytes: the bytes of its tensors, 8 per number, and the bytes of strings in UTF-8."""
    total = 0
    for _, leaf in leaves(tree):
        if isinstance(leaf, Tensor):
            total += leaf.numel() * leaf.element_size()
        elif isinstance(leaf, str):
            total += len(leaf.encode())
        elif leaf is not None:
            total += 8
    return total


def zip_tensors(fn: Callable[..., Any], *trees: Tree) -> Tree:
    """Combine several trees leaf by leaf: apply `fn` to the tensors or numbers of the same name.

    Raises:
        KeyError: A tree has no value for a name of the first tree.
    """
    combined = {}
    for key, first in trees[0].items():
        values = [tree[key] for tree in trees]
        combined[key] = zip_tensors(fn, *values) if isinstance(first, dict) else fn(*values)
    return combined


def add(a: Tree, b: Tree) -> Tree:
    """Return the sum of two trees, a + b, for the names in a."""
    return zip_tensors(lambda x, y: x + y, a, b)


def sub(a: Tree, b: Tree) -> Tree:
    """Return the difference of two trees, a - b, for the names in a."""
    return zip_tensors(lambda x, y: x - y, a, b)


def scale(a: Tree, factor: float) -> Tree:
    """Return a tree multiplied by a factor."""
    return zip_tensors(lambda x: factor * x, a)


class Stamps:
    """Records tensors, and finds those that were changed in place after they were recorded.

    It makes no copy: torch counts the in-place changes of each tensor's memory, over all its views.
    """

    def __init__(self) -> None:
        self._handed_over: dict[str, tuple[Tensor, int]] = {}

    def add(self, tree: Tree, path: str) -> None:
        """Record the tensors of a tree under a path, and replace earlier records of the same names."""
        for name, leaf in leaves(tree, path):
            if isinstance(leaf, Tensor):
                self._handed_over[name] = leaf, leaf._version

    def forget(self, key: str, path: str) -> None:
        """Drop the records of one key of the tree that was recorded under a path."""
        place = f"{path}.{key}"
        for name in [name for name in self._handed_over if name == place or name.startswith(f"{place}.")]:
            del self._handed_over[name]

    def changed(self) -> str | None:
        """Return the path of the first recorded tensor that has changed, or None."""
        return next((path for path, (tensor, version) in self._handed_over.items() if tensor._version != version), None)


class RunningSum:
    """A running sum or weighted mean in float64, to which trees are added one at a time.

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
        """Add another running sum to this one. The other sum stays unchanged.

        Args:
            later: The other sum.
            maximum: Whether integer tensors take the maximum, as in a mean.
        """
        _merge(self.total, self._like, later.total, later._like, maximum)
        self.weight += later.weight

    def __getstate__(self) -> Tree:
        return {**vars(self), "total": to_arrays(self.total)}  # an object store does not copy arrays

    def __setstate__(self, state: Tree) -> None:
        vars(self).update(state, total=from_arrays(state["total"]))

    def sum(self) -> Tree:
        """Return the sum of the trees, with float tensors in float64 and integer tensors in int64."""
        return self.total

    def mean(self) -> Tree:
        """Return the weighted mean of the trees, each tensor in its original type."""
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
    divided = {}
    for key, value in total.items():
        if isinstance(value, dict):
            divided[key] = _divide(value, like[key], weight)
        elif not isinstance(value, Tensor):
            divided[key] = value / weight
        elif value.is_floating_point():
            divided[key] = (value / weight).to(like[key])
        else:  # the maximum of a counter
            divided[key] = value.to(like[key])
    return divided
