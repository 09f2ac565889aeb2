"""Robust rules for means (`federation.robust` on a `mean`), for rounds in which some clients may be malicious.

Each rule takes a mean part by itself, entry by entry of its tensors and numbers. It keeps the part of all K replies, so
it needs K times the memory of a mean. Sums have rules of their own, in robust_sums.py. Rules that keep whole replies,
such as Krum, are not offered.

- `median`: of each entry, unweighted (Yin et al., ICML 2018, Definition 1).
- `trimmed_mean`: of each entry the unweighted mean without the largest and the smallest fifth, one value at least
  (ibid., Definition 2; beta = 0.2).
- `norm_clipped_mean`: the weighted mean, where a value further from the median than half of the clients are is drawn in
  to that distance. Centred clipping (Karimireddy et al., ICML 2021, Eq. 3) with one step, from the median and not from
  the last momentum, so that a part needs no past.

A large client counts as much as a small one in the first two: weights would give a hostile client the influence of its
samples. Whole numbers (BatchNorm's counters) take their median under every rule.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from raylt.core.fleet.robust_sums import Rule
from raylt.tree import LeafPath, Tree, from_leaf_paths, leaf_paths

CUT_PER_SIDE = 0.2  # twice the share of hostile clients that is usually assumed


def robust_mean(rule: Rule, values: Sequence[Tree], weights: Sequence[float]) -> Tree:
    """Combine the clients' values of one reply part by a robust rule.

    Args:
        values: the part by client, all of one layout; an entry that a client left out counts as zero.
        weights: of the replies.

    Returns:
        The tree, each tensor in the type it came in.
    """
    columns = _columns(values)
    if rule == "norm_clipped_mean":
        combined = _clipped(columns, torch.tensor(weights, dtype=torch.float64))
    else:
        cut = 0.5 if rule == "median" else CUT_PER_SIDE
        combined = {path: _middle(column, cut) for path, column in columns.items()}
    return _as_tree(combined, columns, values)


def _columns(values: Sequence[Tree]) -> dict[LeafPath, Tensor]:
    """Stack the clients' values of each leaf, [K, ...]: floats in float64, integers in int64."""
    flat = [dict(leaf_paths(value)) for value in values]
    columns = {}
    for path, like in {path: leaf for leaves in reversed(flat) for path, leaf in leaves.items()}.items():
        whole = isinstance(like, Tensor) and not like.is_floating_point()
        dtype = torch.int64 if whole else torch.float64
        zero = torch.zeros_like(torch.as_tensor(like, dtype=dtype))
        columns[path] = torch.stack([torch.as_tensor(leaves.get(path, zero)).to(dtype) for leaves in flat])
    return columns


def _middle(column: Tensor, trimmed: float) -> Tensor:
    """Return the trimmed mean of each entry [K, ...], which leaves out the share `trimmed` at either end.

    Of three values or more at least one is cut at either end, and one or two values in the middle stay. Of whole
    numbers the lower middle one is returned.
    """
    ordered = column.sort(0).values
    k = len(column)
    if not column.is_floating_point():
        return ordered[(k - 1) // 2]
    cut = min(max(1, math.floor(trimmed * k + 1e-9)), (k - 1) // 2)
    return ordered[cut : k - cut].mean(0)


def _clipped(columns: dict[LeafPath, Tensor], weights: Tensor) -> dict[LeafPath, Tensor]:
    """Return the median plus a weighted mean of the clients' differences from the median.

    Each difference is clipped to the median length of all differences.

    A length is that of all float leaves together.
    """
    middle = {path: _middle(column, 0.5) for path, column in columns.items()}
    floats = [path for path, column in columns.items() if column.is_floating_point()]
    squares = torch.zeros(len(weights), dtype=torch.float64)
    for path in floats:
        squares += (columns[path] - middle[path]).reshape(len(weights), -1).square().sum(1)
    lengths = squares.sqrt()  # [K]
    radius = _middle(lengths, 0.5)
    shares = weights / weights.sum() * (radius / lengths.clamp(min=1e-300)).clamp(max=1)
    for path in floats:
        middle[path] = middle[path] + torch.tensordot(shares, columns[path] - middle[path], 1)
    return middle


def _as_tree(combined: dict[LeafPath, Tensor], columns: dict[LeafPath, Tensor], values: Sequence[Tree]) -> Tree:
    """Return the combined leaves as a tree, converted back to the types that the clients sent."""
    like = {path: leaf for value in reversed(values) for path, leaf in leaf_paths(value)}
    restored: Tree = {}
    for path in columns:
        leaf = like[path]
        restored[path] = combined[path].to(leaf.dtype) if isinstance(leaf, Tensor) else combined[path].item()
    return from_leaf_paths(restored)
