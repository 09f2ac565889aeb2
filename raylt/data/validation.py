"""The validation set: a stratified part of the training samples that no client gets, to choose configurations by."""

from collections.abc import Sequence

import numpy as np

from raylt.seeds import seed_for

Rows = Sequence[np.ndarray]


def carve(clients: Rows, labels: np.ndarray, share: float, seed: int) -> tuple[list[np.ndarray], np.ndarray]:
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
    kept = [its[~taken[owner == k]] for k, its in enumerate(clients)]
    return kept, np.sort(rows[taken])
