"""Stratified parts of the training samples: the validation set, which no client gets, to choose configurations by; and
the test samples of clients whose data have none."""

from collections.abc import Sequence

import numpy as np

from raylt.data.index_lists import IndexLists, grouped
from raylt.errors import DataError
from raylt.seeds import seed_for

Rows = Sequence[np.ndarray]


def carve(clients: Rows, labels: np.ndarray, share: float, seed: int) -> tuple[IndexLists, np.ndarray]:
    """Takes `share` of each class's samples away from the clients; a function of its arguments alone.

    Of a class with n samples round(share * n) are taken, at least one, at most n - 1: a class with one sample stays in
    training. A client's last sample is never taken, so the clients stay the same ones; where that leaves too few to
    choose from, fewer are taken.

    Args:
        clients: of each client, rows of the training set, int64 [n], ascending.
        labels: of the whole training set, int64 [N].
        share: in (0, 1).
        seed: `data.seed`.

    Returns:
        The rows that each client keeps and the rows taken, all ascending.

    Raises:
        DataError: none can be taken.
    """
    rows = np.concatenate(list(clients))
    owner = np.repeat(np.arange(len(clients)), [len(its) for its in clients])
    left = np.bincount(owner, minlength=len(clients))
    taken = np.zeros(len(rows), dtype=bool)
    rng = np.random.default_rng(seed_for(seed, "validation"))
    for c in np.unique(labels[rows]):
        members = rng.permutation(np.flatnonzero(labels[rows] == c))
        wanted = min(max(1, round(share * len(members))), len(members) - 1)
        for place in members:
            if wanted and left[owner[place]] > 1:
                taken[place] = True
                left[owner[place]] -= 1
                wanted -= 1
    if not taken.any():
        raise DataError(f"data.validation = {share:g}: no client can give a sample and keep one of the class; set "
                        "data.validation=0, or give more samples")
    kept = IndexLists(rows[~taken], np.cumsum(np.bincount(owner[~taken], minlength=len(clients))))
    return kept, np.sort(rows[taken])


def hold_out(ids: np.ndarray, labels: np.ndarray, share: float, seed: int) -> list[np.ndarray]:
    """Takes `share` of each client's samples of each class as its test samples; a function of its arguments alone.

    Of n samples of a class round(share * n) are taken and never the last one; a client that would be left without any,
    and has two samples of a class, gives one of its largest class.

    Args:
        ids: whose each sample is, [N].
        labels: int64 [N].
        share: in (0, 1).
        seed: `data.seed`.

    Returns:
        Of each different id, in sorted order, rows of its test samples, int64 [n], ascending.
    """
    parts = []
    for place, rows in enumerate(grouped(ids, np.unique(ids))):
        rng = np.random.default_rng(seed_for(seed, "test part", place))
        members = [rng.permutation(rows[labels[rows] == c]) for c in np.unique(labels[rows])]
        counts = [min(int(share * len(each) + 0.5), len(each) - 1) for each in members]
        largest = max(range(len(members)), key=lambda c: len(members[c]))
        if not any(counts) and len(members[largest]) > 1:
            counts[largest] = 1
        parts.append(np.sort(np.concatenate([each[:n] for each, n in zip(members, counts, strict=True)])))
    return parts
