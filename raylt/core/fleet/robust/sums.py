"""Robust rules for sums over samples (a `total` under `federation.robust`).

A sum is the number of samples times their mean. The number is the sum of the clients' counts, which the schema checks
against their known samples. The rule computes the mean. If the part has classes, as its entries (`within`) or as its
columns (`by_column`), each class is summed separately, over the clients that have samples of it.

- `median`: the entrywise median of the means of blocks of clients (median of means; Nemirovski and Yudin, 1983; Lerasle
  and Oliveira, 2011). A block has two neighbouring clients if ten or more have the class, otherwise one client.
- `trimmed_mean`: the mean over the samples of the clients that remain without the quarter, rounded up, whose means are
  furthest from the median. The result is a sum that samples can have.
- `norm_clipped_mean`: the mean over the samples after clipping: a client's mean that is further from the median than
  half of the clients' means is moved towards the median, to the distance of that half.

One or two clients have no median, so the plain sum is used unless a third client has the class. In a part without
classes, such as a matrix of second moments, clients differ by their class mix. Entries taken from several clients would
form a matrix that no features have, so every rule trims such a part.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from raylt.core.fleet.reductions import Reduction
from raylt.tree import from_leaf_paths, leaf_paths

Rule = Literal["median", "trimmed_mean", "norm_clipped_mean"]
DROPPED_CLIENTS = 0.25  # fraction, rounded up: one client of three or four, two of five to eight
MIN_CLIENTS_FOR_PAIRS = 10  # with fewer clients, each block is a single client
COUNT = "n"  # name of the entry that counts samples


def robust_sum(rule: Rule, part: Reduction, values: Sequence[Any], samples: Sequence[float]) -> Any:
    """Sum the clients' values of one reply part by a robust rule.

    Args:
        rule: The rule.
        part: The reduction of the part.
        values: The part of each client, all with the same layout; a client may omit entries.
        samples: Number of samples of each client.

    Returns:
        The sum; float tensors are float64. If the reduction is `bounded`, the sum is mended like a sum with noise.
    """
    if part.by_columns:
        summed = _columns_summed(rule, values)
    elif part.partial and all(isinstance(value, dict) for value in values):
        names = {name: None for value in values for name in value}
        summed = {name: _entry_sum(rule, [value[name] for value in values if name in value]) for name in names}
    else:
        summed = _unit_sum("trimmed_mean", values, samples)
    return summed if part.mend is None else part.mend(summed)


def _entry_sum(rule: Rule, entries: Sequence[Any]) -> Any:
    """Sum one class's entries over the clients that have the class.

    An entry without a count counts as a sum over one sample.
    """
    counted = all(isinstance(entry, dict) and COUNT in entry for entry in entries)
    return _unit_sum(rule, entries, [entry[COUNT] if counted else 1 for entry in entries])


def _columns_summed(rule: Rule, values: Sequence[Tensor]) -> Tensor:
    """Sum the clients' tensors [D + 1, C] column by column. Each column ends with a number of samples."""
    summed = torch.zeros_like(values[0], dtype=torch.float64)
    for c in range(summed.shape[1]):
        columns = [value[:, c] for value in values if value[-1, c] > 0]
        if columns:
            counts = [column[-1].item() for column in columns]
            summed[:-1, c] = _unit_sum(rule, [column[:-1] for column in columns], counts)
            summed[-1, c] = sum(counts)
    return summed


def _unit_sum(rule: Rule, values: Sequence[Any], counts: Sequence[float]) -> Any:
    """Sum trees, tensors or numbers of the same layout: add integers as usual, and floats by the robust rule."""
    leaves = [dict(leaf_paths(value, ())) for value in values]
    floats = [path for path, leaf in leaves[0].items() if not _is_whole(leaf)]
    whole = [path for path in leaves[0] if path not in floats]
    summed: dict[tuple[Any, ...], Any] = {path: sum(of_client[path] for of_client in leaves) for path in whole}
    if floats:
        weights = torch.tensor(counts, dtype=torch.float64)
        means = torch.stack(
            [torch.cat([_flat(of_client[path]) for path in floats]) for of_client in leaves]
        ) / weights.clamp(min=1).unsqueeze(1)
        numbers = weights.sum() * _robust_mean(rule, means, weights)
        for path in floats:
            like = leaves[0][path]
            size = like.numel() if isinstance(like, Tensor) else 1
            own, numbers = numbers[:size], numbers[size:]
            summed[path] = own.reshape(like.shape) if isinstance(like, Tensor) else own.item()
    return from_leaf_paths(summed)


def _robust_mean(rule: Rule, means: Tensor, weights: Tensor) -> Tensor:
    """Combine the clients' means [K, m] by a robust rule, weighted by the numbers of samples [K]."""
    if len(means) < 3:
        return _weighted(means, weights)
    if rule == "median":
        size = 2 if len(means) >= MIN_CLIENTS_FOR_PAIRS else 1
        blocks = zip(means.split(size), weights.split(size), strict=True)
        return _median(torch.stack([_weighted(block, own) for block, own in blocks]))
    middle = _median(means)
    distances = (means - middle).norm(dim=1)  # [K]
    if rule == "trimmed_mean":
        kept = distances.argsort(stable=True)[: len(means) - math.ceil(DROPPED_CLIENTS * len(means))]
        return _weighted(means[kept], weights[kept])
    radius = _median(distances[:, None])[0]
    shares = (radius / distances.clamp(min=1e-300)).clamp(max=1)
    return middle + _weighted(shares[:, None] * (means - middle), weights)


def _weighted(means: Tensor, weights: Tensor) -> Tensor:
    return weights @ means / weights.sum()


def _median(values: Tensor) -> Tensor:
    """Return the median of each column of [K, m]; for an even K, the mean of the two middle values."""
    ordered = values.sort(0).values
    k = len(values)
    return (ordered[(k - 1) // 2] + ordered[k // 2]) / 2


def _is_whole(leaf: Any) -> bool:
    return not leaf.is_floating_point() if isinstance(leaf, Tensor) else type(leaf) is int


def _flat(leaf: Any) -> Tensor:
    return torch.as_tensor(leaf, dtype=torch.float64).reshape(-1)
