"""Images that the server holds itself: a privileged assumption of the methods that need them."""

from collections.abc import Collection, Sequence

import numpy as np

from raylt.config import DataConfig
from raylt.data.cache import load
from raylt.data.sources import Source
from raylt.errors import DataError
from raylt.seeds import seed_for


def auxiliary_rows(source: Source, clients: Sequence[np.ndarray], newcomers: Collection[int],
                   held: Sequence[np.ndarray], config: DataConfig) -> np.ndarray:
    """Rows of the training set for the server, `config.auxiliary` of each class, seeded by `config.seed`.

    Images that nobody holds come first: those that the long tail left out. The largest class has none of these, so
    where they are too few, copies of clients' images fill up. A class that has fewer in all gives what it has.
    Images of clients that join later, for validation or for tests are never taken; nobody loses what is taken here.

    Args:
        clients: of each client, rows of the training set.
        newcomers: the places of those that take no part in training.
        held: rows that nobody trains on: of the validation set, and of each client's test part that was split off.

    Returns:
        int64, ascending.

    Raises:
        DataError: labels are maps, in which an image shows many classes.
    """
    if source.kind == "segmentation":
        raise DataError(f"data.auxiliary = {config.auxiliary}: an image of {source.name} shows many classes, so there "
                        "are none of one class; set data.auxiliary=0")
    labels = load(source.y_train)
    free = np.ones(len(labels), dtype=bool)
    free[np.concatenate(list(clients))] = False
    usable = np.ones(len(labels), dtype=bool)
    for rows in [*(clients[k] for k in newcomers), *held]:
        free[rows] = usable[rows] = False
    rng, taken = np.random.default_rng(seed_for(config.seed, "auxiliary")), []
    for c in np.unique(labels):
        outside = rng.permutation(np.flatnonzero((labels == c) & free))
        inside = rng.permutation(np.flatnonzero((labels == c) & usable & ~free))
        taken.append(np.concatenate([outside, inside])[:config.auxiliary])
    return np.sort(np.concatenate(taken))
