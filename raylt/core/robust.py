"""Robust rules: what a mean part of the replies comes to where some clients may be hostile (`federation.robust`).

Each rule takes a part by itself, entry by entry of its tensors and numbers, and holds what all clients sent of it: K
times the part, where a mean holds it once.

- `median`: of each entry, unweighted (Yin et al., ICML 2018, Definition 1).
- `trimmed_mean`: of each entry the unweighted mean without the largest and the smallest fifth, one value at least
  (ibid., Definition 2; beta = 0.2).
- `norm_clipped_mean`: the weighted mean of what lies no further from the median than half of the clients do; what is
  further out is drawn in to that distance. Centred clipping (Karimireddy et al., ICML 2021, Eq. 3) with one step, from
  the median and not from the last momentum, so that a part needs no past.

A large client counts as much as a small one in the first two: weights would give a hostile one its samples' say. Whole
numbers (BatchNorm's counters) take their median under every rule.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from raylt.tree import Tree

Rule = Literal["median", "trimmed_mean", "norm_clipped_mean"]
TRIMMED = 0.2           # on either side: twice the share of hostile clients that is usually assumed


def combine(rule: Rule, values: Sequence[Tree], weights: Sequence[float]) -> Tree:
    """One part of all replies, put together.

    Args:
        values: the part by client, all of one form; what a client left out counts as zero.
        weights: of the replies.

    Returns:
        The tree, each tensor in the type it came in.
    """
    columns = _columns(values)
    if rule == "norm_clipped_mean":
        combined = _clipped(columns, torch.tensor(weights, dtype=torch.float64))
    else:
        combined = {path: _middle(column, 0.5 if rule == "median" else TRIMMED) for path, column in columns.items()}
    return _grown(combined, columns, values)


def _columns(values: Sequence[Tree]) -> dict[tuple[Any, ...], Tensor]:
    """Of each leaf what the clients sent, stacked [K, ...]: floats in float64, whole numbers in int64."""
    flat = [dict(_leaves(value)) for value in values]
    columns = {}
    for path, like in {path: leaf for leaves in reversed(flat) for path, leaf in leaves.items()}.items():
        whole = isinstance(like, Tensor) and not like.is_floating_point()
        kind = torch.int64 if whole else torch.float64
        zero = torch.zeros_like(torch.as_tensor(like, dtype=kind))
        columns[path] = torch.stack([torch.as_tensor(leaves.get(path, zero)).to(kind) for leaves in flat])
    return columns


def _middle(column: Tensor, trimmed: float) -> Tensor:
    """The mean of what is left of each entry [K, ...] without the smallest and the largest share `trimmed`: at least
    one value of three goes on either side, and one or two of the middle stay. Whole numbers: the lower middle one."""
    ordered, k = column.sort(0).values, len(column)
    if not column.is_floating_point():
        return ordered[(k - 1) // 2]
    cut = min(max(1, math.floor(trimmed * k + 1e-9)), (k - 1) // 2)
    return ordered[cut:k - cut].mean(0)


def _clipped(columns: dict[tuple[Any, ...], Tensor], weights: Tensor) -> dict[tuple[Any, ...], Tensor]:
    """Of the float leaves together: the median plus the weighted mean of the differences from it, cut to the median of
    their lengths."""
    middle = {path: _middle(column, 0.5) for path, column in columns.items()}
    floats = [path for path, column in columns.items() if column.is_floating_point()]
    squares = torch.zeros(len(weights), dtype=torch.float64)
    for path in floats:
        squares += (columns[path] - middle[path]).reshape(len(weights), -1).square().sum(1)
    lengths = squares.sqrt()                                                    # [K]
    radius = _middle(lengths, 0.5)
    shares = weights / weights.sum() * (radius / lengths.clamp(min=1e-300)).clamp(max=1)
    for path in floats:
        middle[path] = middle[path] + torch.tensordot(shares, columns[path] - middle[path], 1)
    return middle


def _leaves(tree: Tree, path: tuple[Any, ...] = ()) -> list[tuple[tuple[Any, ...], Any]]:
    """With the names themselves for a path: a dot in a name is not a dict in a dict."""
    return [leaf for name, value in tree.items() for leaf in (
        _leaves(value, (*path, name)) if isinstance(value, dict) else [((*path, name), value)])]


def _grown(combined: dict[tuple[Any, ...], Tensor], columns: dict[tuple[Any, ...], Tensor],
           values: Sequence[Tree]) -> Tree:
    """The leaves as a tree again, in their own types; plain numbers are numbers."""
    like = {path: leaf for value in reversed(values) for path, leaf in _leaves(value)}
    grown: Tree = {}
    for path in columns:
        here = grown
        for name in path[:-1]:
            here = here.setdefault(name, {})
        leaf = like[path]
        here[path[-1]] = combined[path].to(leaf.dtype) if isinstance(leaf, Tensor) else combined[path].item()
    return grown
