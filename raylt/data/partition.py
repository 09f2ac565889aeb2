"""Who gets which sample: CReFF's partition, Dirichlet partitions with and without a smallest size, that of Hsu et al.,
and, of images with label maps, classes; simpler ones are in simple_partitions.py.

Every function returns one sorted int64 array of positions into `labels` per client; together they hold each position
once, unless `data.tail` thins what a client has. Clients may be empty unless a smallest size is asked for.
"""

from collections.abc import Callable

import numpy as np

from raylt.config import DataConfig
from raylt.data.longtail import own_tail
from raylt.data.simple_partitions import by_id, iid, pathological, quantity, shards
from raylt.errors import DataError
from raylt.seeds import seed_for

RETRIES = 1000
CREFF_GROUP = 10        # CReFF deals to this many clients at a time

Cut = Callable[[np.ndarray, int], np.ndarray]


def partition(labels: np.ndarray, config: DataConfig, ids: np.ndarray | None,
              known: np.ndarray | None = None) -> list[np.ndarray]:
    """The partition that `config` asks for, seeded by `config.seed`.

    Args:
        labels: of the (long-tailed) training samples, int64 [n]; where they are maps, the classes that each image
            shows, bool [n, C].
        config: its `partition`, `clients`, `alpha`, `beta`, `imbalance`, `min_size` and `seed` matter; none of the
            first two and imbalance is None.
        ids: recorded id of each sample, [n], or None where the source has none.
        known: the different ids, sorted, also of samples that a long tail left out; by default those in `ids`.

    Raises:
        DataError: the data cannot be split like that.
    """
    clients, imbalance = config.clients, config.imbalance
    assert clients is not None
    assert imbalance is not None
    assert config.partition is not None
    if clients > len(labels):
        raise DataError(f"data.clients = {clients} is more than the {len(labels)} training samples; "
                        "lower data.clients or data.imbalance")
    if labels.ndim == 2 and config.partition not in ("classes", "iid", "by_id"):
        raise DataError(f"data.partition = {config.partition}: deals samples by their one class, and an image of "
                        f"{config.source} shows many; set data.partition=classes, iid or by_id")
    if labels.ndim == 2 and config.tail != "global":
        raise DataError(f"data.tail = {config.tail}: thins the classes of each client, and an image of {config.source} "
                        "shows many; set data.tail=global")
    if labels.ndim == 1 and config.partition == "classes":
        raise DataError(f"data.partition = classes: relabels pixels, and {config.source} has one label per image; set "
                        "data.partition=dirichlet, creff, iid or by_id")
    rng = np.random.default_rng(seed_for(config.seed, "partition"))
    match config.partition:
        case "creff":
            parts = creff(labels, clients, config.alpha, rng)
        case "dirichlet":
            parts = dirichlet(labels, clients, config.alpha, config.min_size or 0, rng)
        case "dirichlet_min":
            min_size = 10 if config.min_size is None else config.min_size
            parts = dirichlet_min(labels, clients, config.alpha, min_size, rng)
        case "hsu":
            parts = hsu(labels, clients, config.alpha, rng)
        case "iid":
            parts = iid(labels, clients, rng)
        case "by_id":
            parts = by_id(ids, clients, known)
        case "classes":
            parts = by_class(labels, clients, config.beta, imbalance, rng)
        case "pathological":
            parts = pathological(labels, clients, config.per_client, rng)
        case "shards":
            parts = shards(labels, clients, config.per_client, rng)
        case "quantity":
            parts = quantity(labels, clients, config.alpha, config.min_size or 0, rng)
    if config.tail != "global":
        thinner = np.random.default_rng(seed_for(config.seed, "tail"))
        parts = [part[own_tail(labels[part], imbalance, thinner)] for part in parts]
    smallest = min(len(part) for part in parts)
    if smallest < (config.min_size or 0):
        raise DataError(f"data.min_size = {config.min_size}, but the smallest client of partition {config.partition} "
                        f"has {smallest} samples; lower data.min_size or data.clients")
    return parts


def creff(labels: np.ndarray, clients: int, alpha: float, rng: np.random.Generator) -> list[np.ndarray]:
    """CReFF's partition (Shang et al., IJCAI 2022): Dirichlet draws in groups of ten clients, then cut evenly.

    The groups' clients are laid end to end and cut again into K parts whose sizes differ by at most 1, so a client
    holds samples of two neighbouring draws.

    Raises:
        DataError: fewer than 10 clients, or no draw gave each client half of its even share.
    """
    if clients < CREFF_GROUP:
        raise DataError(f"data.clients = {clients}: partition creff deals to groups of {CREFF_GROUP} clients; "
                        f"give at least {CREFF_GROUP}, or data.partition=dirichlet")
    shuffled = rng.permutation(len(labels))
    starts = [int(CREFF_GROUP / clients * len(labels)) * g for g in range(1, -(-clients // CREFF_GROUP))]
    dealt = []
    for g, rows in enumerate(np.split(shuffled, starts)):
        size = min(CREFF_GROUP, clients - g * CREFF_GROUP)
        share = len(rows) / size
        owner = _deal_until(labels[rows], size, alpha, rng, share, _cut_down, int(0.5 * share))
        dealt.append(rows[np.lexsort((labels[rows], owner))])   # client by client, each class by class
    return [np.sort(part) for part in np.array_split(np.concatenate(dealt), clients)]


def dirichlet(labels: np.ndarray, clients: int, alpha: float, min_size: int,
              rng: np.random.Generator) -> list[np.ndarray]:
    """Each class is divided by p ~ Dir(alpha), redrawn until each client has `min_size` samples.

    Raises:
        DataError: no draw did.
    """
    return _by_owner(_deal_until(labels, clients, alpha, rng, np.inf, _cut_exact, min_size), clients)


def dirichlet_min(labels: np.ndarray, clients: int, alpha: float, min_size: int,
                  rng: np.random.Generator) -> list[np.ndarray]:
    """Like `dirichlet`, but a client that holds its even share n/K gets nothing of later classes (NIID-bench).

    Raises:
        DataError: no draw gave each client `min_size` samples.
    """
    share = len(labels) / clients
    return _by_owner(_deal_until(labels, clients, alpha, rng, share, _cut_exact, min_size), clients)


def hsu(labels: np.ndarray, clients: int, alpha: float, rng: np.random.Generator) -> list[np.ndarray]:
    """Hsu, Qi and Brown (2019): each client draws its class mix q ~ Dir(alpha p), p the class frequencies of all
    samples, and then its samples one by one by q, without replacement; sizes differ by at most 1.

    Where a class runs out, the mix of whoever still draws is that of the other classes; where a client's mix holds none
    that is left, it draws a new one from what is left.
    """
    rows = [rng.permutation(np.flatnonzero(labels == c)) for c in np.unique(labels)]
    left = np.array([len(members) for members in rows])
    prior = left / left.sum()
    owner = np.empty(len(labels), dtype=np.int64)
    for k, part in enumerate(np.array_split(np.arange(len(labels)), clients)):
        mix, wanted = _draw_mix(alpha * prior, left, rng), len(part)
        while wanted:
            if not (mix[left > 0] > 0).any():
                mix = _draw_mix(alpha * prior, left, rng)
            open_mix = np.where(left > 0, mix, 0)
            counts = np.minimum(rng.multinomial(wanted, open_mix / open_mix.sum()), left)
            for members, taken, n in zip(rows, left, counts, strict=True):
                owner[members[taken - n:taken]] = k
            left, wanted = left - counts, wanted - counts.sum()
    return _by_owner(owner, clients)


def by_class(shows: np.ndarray, clients: int, beta: int, imbalance: float,
             rng: np.random.Generator) -> list[np.ndarray]:
    """MuPFL's class-heterogeneous partition (4.1): disjoint images for clients that keep `beta` classes each.

    Sizes fall exponentially, the first client has `imbalance` times as many images as the last. The paper does not say
    which images a client gets: here those that show one of its classes, at random, the clients with the rarest classes
    first, and others only where these run out.

    Args:
        shows: the classes that each image shows, bool [n, C].
        beta: see `raylt.data.maps.class_views`.

    Raises:
        DataError: more classes to keep than there are, or a client without an image.
    """
    n, classes = shows.shape
    if beta > classes:
        raise DataError(f"data.beta = {beta}: there are {classes} classes; give at most as many")
    shares = (1 / imbalance) ** (np.arange(clients) / max(clients - 1, 1))
    sizes = np.diff(_cut_exact(shares / shares.sum(), n), prepend=0, append=n)
    if not sizes.all():
        raise DataError(f"data.imbalance = {imbalance:g} leaves the last of {clients} clients without one of {n} "
                        "images; lower data.imbalance or data.clients")
    suits = np.stack([shows[:, (np.arange(k, k + beta)) % classes].any(1) for k in range(clients)])      # [K, n]
    owner = np.full(n, -1)
    for k in np.argsort(suits.sum(1), kind="stable"):
        free = rng.permutation(np.flatnonzero(owner < 0))
        owner[free[np.argsort(~suits[k, free], kind="stable")][:sizes[k]]] = k
    return _by_owner(owner, clients)


def _deal_until(labels: np.ndarray, clients: int, alpha: float, rng: np.random.Generator, cap: float, cut: Cut,
                min_size: int) -> np.ndarray:
    rows = [np.flatnonzero(labels == c) for c in np.unique(labels)]
    for _ in range(RETRIES):
        owner = _deal(rows, clients, alpha, rng, cap, cut)
        if owner is not None and np.bincount(owner, minlength=clients).min() >= min_size:
            return owner
    raise DataError(f"{RETRIES} draws at data.alpha = {alpha:g} never gave each of {clients} clients {min_size} of the "
                    f"{len(labels)} samples; raise data.alpha, or lower data.clients or data.min_size")


def _deal(rows: list[np.ndarray], clients: int, alpha: float, rng: np.random.Generator, cap: float,
          cut: Cut) -> np.ndarray | None:
    """The client of every sample, int64 [n]; None when every client with a share of some class is full."""
    owner = np.empty(sum(map(len, rows)), dtype=np.int64)
    sizes = np.zeros(clients, dtype=np.int64)
    for members in rows:
        p = rng.dirichlet(np.full(clients, alpha)) * (sizes < cap)
        if not p.sum() > 0:
            return None
        counts = np.diff(cut(p / p.sum(), len(members)), prepend=0, append=len(members))
        owner[rng.permutation(members)] = np.repeat(np.arange(clients), counts)
        sizes += counts
    return owner


def _draw_mix(concentration: np.ndarray, left: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A class mix over the classes of which samples are left; one class where all shares would be rounded to 0."""
    mix = np.zeros(len(left))
    held = left > 0
    drawn = rng.dirichlet(concentration[held])
    if not drawn.sum() > 0:
        drawn = rng.multinomial(1, concentration[held] / concentration[held].sum())
    mix[held] = drawn
    return mix


def _cut_down(p: np.ndarray, n: int) -> np.ndarray:
    """CReFF's cut positions."""
    return (np.cumsum(p)[:-1] * n).astype(np.int64)


def _cut_exact(p: np.ndarray, n: int) -> np.ndarray:
    """Cut positions after which each client has n * p rounded down, the rest going to the largest fractions."""
    counts = np.floor(n * p).astype(np.int64)
    counts[np.argsort(counts - n * p, kind="stable")[:n - counts.sum()]] += 1
    return np.cumsum(counts)[:-1]


def _by_owner(owner: np.ndarray, clients: int) -> list[np.ndarray]:
    ends = np.cumsum(np.bincount(owner, minlength=clients))
    return np.split(np.argsort(owner, kind="stable"), ends[:-1])
