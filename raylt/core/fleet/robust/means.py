"""Robust rules for means (`federation.robust` on a `mean`), for rounds in which some clients may be malicious.

Each rule treats every mean part separately. It keeps the part of all K replies, so it needs K times the memory of a
mean. sums.py has the rules for sums. There are no rules that select whole replies, such as Krum.

- `median`: the unweighted median of each entry (Yin et al., ICML 2018, Definition 1).
- `trimmed_mean`: the unweighted mean of each entry without the largest and the smallest fifth, at least one value each
  (ibid., Definition 2; beta = 0.2).
- `norm_clipped_mean`: the weighted mean after clipping: a client's value that is further from the median than half of
  the clients' values is moved towards the median, to the distance of that half. This is centred clipping (Karimireddy
  et al., ICML 2021, Eq. 3) with one step, which starts from the median instead of the last momentum, so that no earlier
  round is needed.

The first two rules ignore the clients' sizes: weights would give a hostile client the influence of its samples. Whole
numbers (BatchNorm's counters) take their median under every rule.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from raylt.core.fleet.robust.sums import Rule
from raylt.tree import LeafPath, Tree, from_leaf_paths, leaf_paths

CUT_PER_SIDE = 0.2  # twice the share of hostile clients that is usually assumed


def robust_mean(rule: Rule, values: Sequence[Tree], weights: Sequence[float]) -> Tree:
    """Combine the clients' values of one reply part by a robust rule.

    Args:
        rule: The rule.
        values: The part of each client, all with the same layout; an omitted entry counts as zero.
        weights: Weights of the replies.

    Returns:
        The tree; each tensor has the type that the clients sent.
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
    """Return the mean of each entry over [K, ...] without the fraction `trimmed` of the values at either end.

    Of three or more values, at least one is cut at either end, and at least one or two in the middle are kept. For
    whole numbers the lower median is returned.
    """
    ordered = column.sort(0).values
    k = len(column)
    if not column.is_floating_point():
        return ordered[(k - 1) // 2]
    cut = min(max(1, math.floor(trimmed * k + 1e-9)), (k - 1) // 2)
    return ordered[cut : k - cut].mean(0)


def _clipped(columns: dict[LeafPath, Tensor], weights: Tensor) -> dict[LeafPath, Tensor]:
    """Return the median plus a weighted mean of the clients' differences from the median.

    Each difference is clipped to the median length of all differences. The length is computed over all float leaves
    together.
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
