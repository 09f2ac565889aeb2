"""Training images of the server itself.

Only some methods require them, and these have an advantage over other methods.
"""

from collections.abc import Collection, Sequence

import numpy as np

from raylt.config import DataConfig
from raylt.data.images.cache import load
from raylt.data.sources.sources import Source
from raylt.errors import DataError
from raylt.seeds import seed_for


def auxiliary_rows(
    source: Source,
    clients: Sequence[np.ndarray],
    new_clients: Collection[int],
    reserved: Sequence[np.ndarray],
    config: DataConfig,
) -> np.ndarray:
    """Draw `config.auxiliary` training images of each class for the server, seeded by `config.seed`.

    Images that the long tail left out are drawn first. If there are too few of these, as in the largest class, copies
    of clients' images are added. If a class has fewer images, all of them are drawn. Images of new clients, of the
    validation set and of clients' test parts are never drawn. No client loses an image.

    Args:
        source: The data set.
        clients: For each client, rows of the training set.
        new_clients: Ids of the clients that join only after training.
        reserved: Rows on which no client trains: the validation set, and each client's test part that was split off.
        config: The settings in `data`.

    Returns:
        Rows of the training set, int64, ascending.

    Raises:
        DataError: Labels are maps, in which an image shows many classes.
    """
    if source.kind == "segmentation":
        raise DataError(
            f"data.auxiliary: an image of {source.name} shows many classes, so there are no images of one class "
            f"({config.auxiliary}). Set data.auxiliary=0.",
            code="data.wrong-kind",
            key="data.auxiliary",
            value=config.auxiliary,
        )
    labels = load(source.y_train)
    free = np.ones(len(labels), dtype=bool)
    free[np.concatenate(list(clients))] = False
    usable = np.ones(len(labels), dtype=bool)
    for rows in [*(clients[k] for k in new_clients), *reserved]:
        free[rows] = usable[rows] = False
    rng = np.random.default_rng(seed_for(config.seed, "auxiliary"))
    drawn = []
    for c in np.unique(labels):
        outside = rng.permutation(np.flatnonzero((labels == c) & free))
        inside = rng.permutation(np.flatnonzero((labels == c) & usable & ~free))
        drawn.append(np.concatenate([outside, inside])[: config.auxiliary])
    return np.sort(np.concatenate(drawn))
