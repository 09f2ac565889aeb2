"""Long-tailed class sizes n_c = int(n_max * (1/IF)^(c/(C-1))), as in LDAM (Cao et al., NeurIPS 2019) and CReFF."""

from bisect import bisect_left

import numpy as np

from raylt.errors import DataError
from raylt.seeds import seed_for


def long_tail_counts(available: np.ndarray, imbalance: float) -> np.ndarray:
    """Return the number of samples per class in a long-tailed subset, from class 0 (largest) to C-1 (smallest).

    n_max is the largest number for which no class needs more samples than it has. So data that are already thinned can
    be thinned further.

    Args:
        available: Samples per class, int [C].
        imbalance: IF, the ratio of the first class to the last, at least 1; 1 keeps all data.

    Returns:
        Samples per class, int64 [C], each at least 1 and at most `available`.

    Raises:
        DataError: IF is below 1, or a class would be left without samples.
    """
    available = np.asarray(available, dtype=np.int64)
    if not imbalance >= 1:
        raise DataError(
            f"data.imbalance: the first class cannot be smaller than the last ({imbalance}). "
            "Give 1, which keeps all data, or more.",
            code="config.out-of-range",
            key="data.imbalance",
            value=imbalance,
        )
    if not available.all():
        empty = int(available.argmin())
        raise DataError(
            f"data.source: class {empty} has no training sample. Add some, or remove the class.",
            code="data.too-few",
            key="data.source",
            class_index=empty,
        )
    if imbalance == 1 or len(available) == 1:
        return available
    counts = _thin(available, imbalance)
    if not counts.all():
        limits = range(1, int(available[0]) + 1)
        largest = limits[bisect_left(limits, True, key=lambda limit: not _thin(available, limit).all()) - 1]
        raise DataError(
            f"data.imbalance: class {int(counts.argmin())} would be left without samples ({imbalance:g}). "
            f"Set data.imbalance to {largest} or less.",
            code="data.too-few",
            key="data.imbalance",
            value=imbalance,
            largest=largest,
        )
    return counts


def long_tail_subset(
    labels: np.ndarray, imbalance: float, classes: int, seed: int, by_size: bool = False
) -> np.ndarray:
    """Draw a seeded random long-tailed subset of samples; return its sorted indices.

    Args:
        labels: Labels of the samples, int64 [n], in [0, classes).
        imbalance: IF, see `long_tail_counts`.
        classes: The number of classes, C.
        seed: `data.seed`.
        by_size: Whether the largest class stays the largest; otherwise class 0 becomes the largest, as in benchmarks.
    """
    available = np.bincount(labels, minlength=classes)
    order = np.argsort(-available, kind="stable") if by_size else np.arange(classes)
    counts = np.empty(classes, dtype=np.int64)
    counts[order] = long_tail_counts(available[order], imbalance)
    rng = np.random.default_rng(seed_for(seed, "longtail"))
    chosen = [rng.choice(np.flatnonzero(labels == c), n, replace=False) for c, n in enumerate(counts)]
    return np.sort(np.concatenate(chosen))


def own_tail(labels: np.ndarray, imbalance: float, rng: np.random.Generator) -> np.ndarray:
    """Draw a long-tailed subset of one client's samples; return its sorted indices.

    The classes are put into a random order. The class at position i keeps at most n_max * (1/IF)^(i/(C-1)) samples and
    at least one, where n_max is the size of the client's largest class.

    Args:
        labels: Labels of the client's samples, int64 [n]; C is the number of classes among them.
        imbalance: IF, at least 1.
        rng: Random generator.
    """
    classes, counts = np.unique(labels, return_counts=True)
    last = max(len(classes) - 1, 1)
    limits = [max(1, int(counts.max(initial=0) * (1 / imbalance) ** (i / last))) for i in range(len(classes))]
    chosen = [np.empty(0, np.int64)]
    for c, limit in zip(classes[rng.permutation(len(classes))], limits, strict=True):
        chosen.append(rng.permutation(np.flatnonzero(labels == c))[:limit])
    return np.sort(np.concatenate(chosen))


def shot_groups(counts: np.ndarray, low: int, high: int) -> list[str]:
    """Return each class's group: "many" above `high` training samples, "few" below `low`, otherwise "medium"."""
    return ["many" if n > high else "few" if n < low else "medium" for n in counts]


def _thin(available: np.ndarray, imbalance: float) -> np.ndarray:
    last = len(available) - 1
    # Python's pow, not numpy's: if a product is nearly whole, the published counts depend on its last bit
    ratios = [(1 / imbalance) ** (c / last) for c in range(last + 1)]

    def counts(n_max: int) -> np.ndarray:
        return np.array([int(n_max * ratio) for ratio in ratios], dtype=np.int64)

    sizes = range(int(available[0]) + 1)
    return counts(bisect_left(sizes, True, key=lambda n_max: bool((counts(n_max) > available).any())) - 1)
