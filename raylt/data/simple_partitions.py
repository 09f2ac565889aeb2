"""Partitions that draw no class mix: IID, by recorded ids, a number of classes for each client, shards, unequal sizes.

As in partition.py, every function returns one sorted int64 array of positions into `labels` per client; together they
hold each position once.
"""

import numpy as np

from raylt.data.index_lists import grouped
from raylt.errors import DataError


def iid(labels: np.ndarray, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Samples dealt at random; sizes differ by at most 1."""
    return [np.sort(part) for part in np.array_split(rng.permutation(len(labels)), clients)]


def by_id(ids: np.ndarray | None, clients: int, known: np.ndarray | None = None) -> list[np.ndarray]:
    """One client per recorded id, in sorted order of the ids.

    Raises:
        DataError: no ids, or not as many different ones as clients.
    """
    if ids is None:
        raise DataError("data.partition = by_id: the source records no ids; give a folder: source with a folder for "
                        "each client, an npz: source with id_train, or another data.partition")
    known = np.unique(ids) if known is None else known
    if len(known) != clients:
        raise DataError(f"data.clients = {clients}: the samples record {len(known)} different ids and by_id makes "
                        f"one client of each; set data.clients={len(known)}")
    return list(grouped(ids, known))


def pathological(labels: np.ndarray, clients: int, held: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Every client holds `held` classes, drawn so that as many clients hold each, up to one; a class is divided evenly
    among those that do.

    Raises:
        DataError: more classes than there are, some class would be nobody's, or has fewer samples than holders.
    """
    classes = np.unique(labels)
    if held > len(classes):
        raise DataError(f"data.per_client = {held}: there are {len(classes)} classes; give at most as many")
    if clients * held < len(classes):
        raise DataError(f"data.per_client = {held}: {clients} clients then hold {clients * held} of {len(classes)} "
                        f"classes; give at least {-(-len(classes) // clients)}, or raise data.clients")
    times = np.zeros(len(classes), dtype=np.int64)
    holders: list[list[int]] = [[] for _ in classes]
    for k in range(clients):
        drawn = rng.permutation(len(classes))
        chosen = drawn[np.argsort(times[drawn], kind="stable")[:held]]          # those that fewest hold, at random
        times[chosen] += 1
        for c in chosen:
            holders[c].append(k)
    parts: list[list[np.ndarray]] = [[] for _ in range(clients)]
    for c, whose in zip(classes, holders, strict=True):
        rows = rng.permutation(np.flatnonzero(labels == c))
        if len(rows) < len(whose):
            raise DataError(f"data.per_client = {held}: {len(whose)} clients would share the {len(rows)} samples of "
                            f"class {c}; lower data.per_client, data.clients or data.imbalance")
        for k, part in zip(rng.permutation(whose), np.array_split(rows, len(whose)), strict=True):
            parts[k].append(part)
    return [np.sort(np.concatenate(part)) for part in parts]


def shards(labels: np.ndarray, clients: int, each: int, rng: np.random.Generator) -> list[np.ndarray]:
    """McMahan et al. (AISTATS 2017): samples sorted by class are cut into shards of one size, and every client gets
    `each` of them, at random; the order within a class is random.

    Raises:
        DataError: more shards than samples.
    """
    if clients * each > len(labels):
        raise DataError(f"data.per_client = {each}: {clients * each} shards of {len(labels)} samples; lower "
                        "data.per_client or data.clients")
    shuffled = rng.permutation(len(labels))
    cut = np.array_split(shuffled[np.argsort(labels[shuffled], kind="stable")], clients * each)
    dealt = rng.permutation(len(cut)).reshape(clients, each)
    return [np.sort(np.concatenate([cut[i] for i in row])) for row in dealt]


def quantity(labels: np.ndarray, clients: int, alpha: float, min_size: int,
             rng: np.random.Generator) -> list[np.ndarray]:
    """Quantity skew (NIID-bench): sizes are shares p ~ Dir(alpha) of all samples, which are dealt at random; redrawn
    until each client has `min_size`.

    Raises:
        DataError: no draw did.
    """
    for _ in range(1000):
        ends = (np.cumsum(rng.dirichlet(np.full(clients, alpha)))[:-1] * len(labels)).astype(np.int64)
        parts = np.split(rng.permutation(len(labels)), ends)
        if min(map(len, parts)) >= min_size:
            return [np.sort(part) for part in parts]
    raise DataError(f"1000 draws at data.alpha = {alpha:g} never gave each of {clients} clients {min_size} of the "
                    f"{len(labels)} samples; raise data.alpha, or lower data.clients or data.min_size")
