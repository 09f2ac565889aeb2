"""Long-tailed class sizes n_c = int(n_max * (1/IF)^(c/(C-1))), of LDAM (Cao et al., NeurIPS 2019) and CReFF."""

from bisect import bisect_left

import numpy as np

from raylt.errors import DataError
from raylt.seeds import seed_for


def long_tail_counts(available: np.ndarray, imbalance: float) -> np.ndarray:
    """Samples per class of a long-tailed subset; class 0 is the largest, class C-1 the smallest.

    n_max is the largest number for which no class is asked for more than it has, so data that are already thinned
    can be thinned further.

    Args:
        available: samples per class, int [C].
        imbalance: IF, the ratio of the first class to the last, at least 1; 1 keeps the data as they are.

    Returns:
        int64 [C], each at least 1 and at most `available`.

    Raises:
        DataError: IF below 1, or a class would be left without samples.
    """
    available = np.asarray(available, dtype=np.int64)
    if not imbalance >= 1:
        raise DataError(f"data.imbalance = {imbalance}: the first class cannot be smaller than the last; "
                        "give 1 (keeps the data as they are) or more")
    if not available.all():
        raise DataError(f"class {int(available.argmin())} has no training sample at all; add some or remove the class")
    if imbalance == 1 or len(available) == 1:
        return available
    counts = _thin(available, imbalance)
    if not counts.all():
        limits = range(1, int(available[0]) + 1)
        largest = limits[bisect_left(limits, True, key=lambda limit: not _thin(available, limit).all()) - 1]
        raise DataError(f"data.imbalance = {imbalance:g} leaves class {int(counts.argmin())} without samples; "
                        f"the largest that works is {largest}")
    return counts


def long_tail_subset(labels: np.ndarray, imbalance: float, classes: int, seed: int,
                     by_size: bool = False) -> np.ndarray:
    """Positions of a random long-tailed subset, sorted; a function of its arguments alone.

    Args:
        labels: int64 [n], in [0, classes).
        imbalance: IF, see `long_tail_counts`.
        classes: C.
        seed: `data.seed`.
        by_size: whether the largest class stays the largest one; otherwise the first becomes it, as with benchmarks.
    """
    available = np.bincount(labels, minlength=classes)
    order = np.argsort(-available, kind="stable") if by_size else np.arange(classes)
    counts = np.empty(classes, dtype=np.int64)
    counts[order] = long_tail_counts(available[order], imbalance)
    rng = np.random.default_rng(seed_for(seed, "longtail"))
    chosen = [rng.choice(np.flatnonzero(labels == c), n, replace=False) for c, n in enumerate(counts)]
    return np.sort(np.concatenate(chosen))


def own_tail(labels: np.ndarray, imbalance: float, rng: np.random.Generator) -> np.ndarray:
    """Positions of one client's own long-tailed subset, sorted: its classes in an order that is drawn, each with at
    most n_max * (1/IF)^(i/(C-1)) samples for its place i, n_max the size of its largest class, and at least one.

    Args:
        labels: of the client's samples, int64 [n]; C is how many classes they have.
        imbalance: IF.
    """
    classes, counts = np.unique(labels, return_counts=True)
    last = max(len(classes) - 1, 1)
    most = [max(1, int(counts.max(initial=0) * (1 / imbalance) ** (place / last))) for place in range(len(classes))]
    chosen = [rng.permutation(np.flatnonzero(labels == c))[:n] for c, n in zip(
        classes[rng.permutation(len(classes))], most, strict=True)]
    return np.sort(np.concatenate([np.empty(0, np.int64), *chosen]))


def group_of(counts: np.ndarray, low: int, high: int) -> list[str]:
    """The group of each class: "many" above `high` training samples, "few" below `low`, else "medium"."""
    return ["many" if n > high else "few" if n < low else "medium" for n in counts]


def _thin(available: np.ndarray, imbalance: float) -> np.ndarray:
    last = len(available) - 1
    # Python's pow, not numpy's: the published counts hang on the last bit where a product is nearly whole
    ratios = [(1 / imbalance) ** (c / last) for c in range(last + 1)]

    def counts(n_max: int) -> np.ndarray:
        return np.array([int(n_max * ratio) for ratio in ratios], dtype=np.int64)

    sizes = range(int(available[0]) + 1)
    return counts(bisect_left(sizes, True, key=lambda n_max: bool((counts(n_max) > available).any())) - 1)
