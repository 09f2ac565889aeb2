"""Partitions of training samples over clients.

Every partition returns one sorted int64 array of positions into `labels` per client. Together the arrays hold each
position once, unless `data.tail` thins the clients' samples. A client may be empty unless a smallest size is set.
"""

from collections.abc import Callable, Sequence

import numpy as np

from raylt.config import DataConfig
from raylt.data.splits.long_tail import own_tail
from raylt.data.splits.split import grouped
from raylt.errors import ConfigError, DataError, did_you_mean, own_function, spoken
from raylt.seeds import seed_for

RETRIES = 1000
CREFF_GROUP = 10  # number of clients that CReFF deals to at a time

Cut = Callable[[np.ndarray, int], np.ndarray]
Partition = Callable[[np.ndarray, int, np.random.Generator, DataConfig], Sequence[np.ndarray]]
BUILT_IN = (
    "creff",
    "dirichlet",
    "dirichlet_min",
    "exdir",
    "hsu",
    "iid",
    "by_id",
    "classes",
    "pathological",
    "shards",
    "quantity",
    "imported",
)
PARTITIONS: dict[str, Partition | str] = {name: name for name in BUILT_IN}  # with the user's own: see registry.py


def check_partition_exists(name: str | None) -> None:
    """Raise an error if a partition is named and there is none of this name.

    Raises:
        ConfigError: Names the partitions that there are.
    """
    if name is not None and name not in PARTITIONS:
        raise ConfigError(
            f"data.partition: unknown partition ({name!r}). {did_you_mean(name, BUILT_IN)}"
            f"There are: {', '.join(PARTITIONS)}; {spoken('--plugin FILE', 'raylt.register')} adds your own.",
            code="config.unknown-name",
            key="data.partition",
            value=name,
        )


def partition(
    labels: np.ndarray, config: DataConfig, ids: np.ndarray | None, unique_ids: np.ndarray | None = None
) -> list[np.ndarray]:
    """Partition samples over clients as configured, seeded by `config.seed`.

    Args:
        labels: Labels of the (long-tailed) training samples, int64 [n]; for label maps the classes that each image
            shows, bool [n, C].
        config: Its `partition`, `clients`, `alpha`, `beta`, `imbalance`, `min_size`, `per_client`, `tail` and `seed`
            matter; `partition`, `clients` and `imbalance` are not None.
        ids: Recorded id of each sample, [n]; None where the source records none.
        unique_ids: The different ids, sorted, with ids that a long tail left out; by default the ids in `ids`.

    Raises:
        DataError: The data cannot be partitioned like that.
    """
    clients = config.clients
    imbalance = config.imbalance
    assert clients is not None
    assert imbalance is not None
    assert config.partition is not None
    _check_fits(labels, clients, config)
    if config.partition == "imported":
        raise DataError(
            "data.partition: this partition is read from a file of index lists (imported). Set data.split=FILE, or "
            "choose another partition.",
            code="config.conflict",
            key="data.partition",
            value="imported",
        )
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
            parts = by_id(ids, clients, unique_ids)
        case "classes":
            parts = by_class(labels, clients, config.beta, imbalance, rng)
        case "pathological":
            parts = pathological(labels, clients, config.per_client, rng)
        case "shards":
            parts = shards(labels, clients, config.per_client, rng)
        case "exdir":
            min_size = 10 if config.min_size is None else config.min_size
            parts = extended_dirichlet(labels, clients, config.per_client, config.alpha, min_size, rng)
        case "quantity":
            parts = quantity(labels, clients, config.alpha, config.min_size or 0, rng)
        case name:
            parts = _own_partition(name, labels, config, rng)
    if config.tail != "global":
        tail_rng = np.random.default_rng(seed_for(config.seed, "tail"))
        parts = [part[own_tail(labels[part], imbalance, tail_rng)] for part in parts]
    smallest = min(len(part) for part in parts)
    if smallest < (config.min_size or 0):
        raise DataError(
            f"data.min_size: the smallest client of partition {config.partition} has {smallest} samples "
            f"({config.min_size}). Lower data.min_size or data.clients.",
            code="data.too-few",
            key="data.min_size",
            value=config.min_size,
            smallest=smallest,
        )
    return parts


def _check_fits(labels: np.ndarray, clients: int, config: DataConfig) -> None:
    """Raise an error if the settings do not fit the number of samples or the kind of labels."""
    if clients > len(labels):
        raise DataError(
            f"data.clients: there are more clients than the {len(labels)} training samples ({clients}). "
            "Lower data.clients or data.imbalance.",
            code="data.too-few",
            key="data.clients",
            value=clients,
        )
    maps = labels.ndim == 2
    if maps and config.partition in BUILT_IN and config.partition not in ("classes", "iid", "by_id"):
        raise DataError(
            f"data.partition: it needs one class for each image, and an image of {config.source} shows many classes "
            f"({config.partition}). Set data.partition=classes, iid or by_id.",
            code="data.wrong-kind",
            key="data.partition",
            value=config.partition,
        )
    if maps and config.tail != "global":
        raise DataError(
            f"data.tail: it subsamples the classes of each client, and an image of {config.source} shows many "
            f"({config.tail}). Set data.tail=global.",
            code="data.wrong-kind",
            key="data.tail",
            value=config.tail,
        )
    if not maps and config.partition == "classes":
        raise DataError(
            f"data.partition: it relabels pixels, but {config.source} has one label per image (classes). "
            "Set data.partition=dirichlet, creff, iid or by_id.",
            code="data.wrong-kind",
            key="data.partition",
            value="classes",
        )


def _own_partition(name: str, labels: np.ndarray, config: DataConfig, rng: np.random.Generator) -> list[np.ndarray]:
    """Call a user's own partition function and return its checked result.

    Raises:
        DataError: The parts are not as many as clients, or do not hold rows at most once.
    """
    deal = PARTITIONS[name]
    assert not isinstance(deal, str)
    assert config.clients is not None
    with own_function("data.partition", name):
        parts = [np.sort(np.asarray(part, dtype=np.int64)) for part in deal(labels, config.clients, rng, config)]
    rows = np.concatenate([np.empty(0, np.int64), *parts])
    problem = None
    if len(parts) != config.clients:
        problem = f"it deals to {len(parts)} clients and not to {config.clients}"
    elif len(rows) and not 0 <= rows.min() <= rows.max() < len(labels):
        problem = f"it deals rows from {rows.min()} to {rows.max()}, and there are {len(labels)}"
    elif len(np.unique(rows)) != len(rows):
        problem = "it deals a row twice"
    if problem is not None:
        raise DataError(
            f"data.partition: {problem} ({name}). Return one array of row numbers for each client.",
            code="data.malformed",
            key="data.partition",
            value=name,
        )
    return parts


def creff(labels: np.ndarray, clients: int, alpha: float, rng: np.random.Generator) -> list[np.ndarray]:
    """Divide samples among clients by Dirichlet draws within groups of ten clients, then even out the sizes (CReFF).

    Source: Shang et al., IJCAI 2022.

    The groups' clients are laid end to end and cut again into K parts whose sizes differ by at most 1, so a client
    holds samples of two neighbouring draws.

    Raises:
        DataError: There are fewer than 10 clients, or no draw gave each client half of its even share.
    """
    if clients < CREFF_GROUP:
        raise DataError(
            f"data.clients: partition creff divides samples among groups of {CREFF_GROUP} clients ({clients}). "
            f"Give at least {CREFF_GROUP}, or set data.partition=dirichlet.",
            code="config.out-of-range",
            key="data.clients",
            value=clients,
        )
    shuffled = rng.permutation(len(labels))
    starts = [int(CREFF_GROUP / clients * len(labels)) * g for g in range(1, -(-clients // CREFF_GROUP))]
    dealt = []
    for g, rows in enumerate(np.split(shuffled, starts)):
        size = min(CREFF_GROUP, clients - g * CREFF_GROUP)
        share = len(rows) / size
        owner = _deal_until(labels[rows], size, alpha, rng, share, _cut_down, int(0.5 * share))
        dealt.append(rows[np.lexsort((labels[rows], owner))])  # client by client, each class by class
    return [np.sort(part) for part in np.array_split(np.concatenate(dealt), clients)]


def dirichlet(
    labels: np.ndarray, clients: int, alpha: float, min_size: int, rng: np.random.Generator
) -> list[np.ndarray]:
    """Divide each class over clients by p ~ Dir(alpha); draw again until each client has `min_size` samples.

    Raises:
        DataError: No draw gave each client `min_size` samples.
    """
    return _by_owner(_deal_until(labels, clients, alpha, rng, np.inf, _cut_exact, min_size), clients)


def dirichlet_min(
    labels: np.ndarray, clients: int, alpha: float, min_size: int, rng: np.random.Generator
) -> list[np.ndarray]:
    """Divide like `dirichlet`, but add no samples to a client that already has n/K samples (NIID-bench).

    Raises:
        DataError: No draw gave each client `min_size` samples.
    """
    share = len(labels) / clients
    return _by_owner(_deal_until(labels, clients, alpha, rng, share, _cut_exact, min_size), clients)


def hsu(labels: np.ndarray, clients: int, alpha: float, rng: np.random.Generator) -> list[np.ndarray]:
    """Draw a class distribution for each client, then draw its samples accordingly (Hsu, Qi and Brown, 2019).

    The mix is q ~ Dir(alpha p), where p holds the class frequencies of all samples. Samples are drawn one by one
    without replacement; sizes differ by at most 1. Where a class runs out, the mix of the clients that still draw is
    restricted to the other classes. A client whose mix holds no remaining class draws a new mix from what is left.
    """
    rows = [rng.permutation(np.flatnonzero(labels == c)) for c in np.unique(labels)]
    left = np.array([len(members) for members in rows])
    prior = left / left.sum()
    concentration = alpha * prior
    owner = np.empty(len(labels), dtype=np.int64)
    for k, part in enumerate(np.array_split(np.arange(len(labels)), clients)):
        mix = _draw_mix(concentration, left, rng)
        missing = len(part)
        while missing:
            if not (mix[left > 0] > 0).any():
                mix = _draw_mix(concentration, left, rng)
            open_mix = np.where(left > 0, mix, 0)
            counts = np.minimum(rng.multinomial(missing, open_mix / open_mix.sum()), left)
            for members, remaining, n in zip(rows, left, counts, strict=True):
                owner[members[remaining - n : remaining]] = k
            left = left - counts
            missing = missing - counts.sum()
    return _by_owner(owner, clients)


def by_class(
    shows: np.ndarray, clients: int, beta: int, imbalance: float, rng: np.random.Generator
) -> list[np.ndarray]:
    """Divide images among clients that keep `beta` classes each: MuPFL's class-heterogeneous partition (4.1).

    Sizes fall exponentially: the first client has `imbalance` times as many images as the last. The paper does not say
    which images a client gets. Here a client gets random images that show one of its classes, and other images only
    where these run out; the clients with the rarest classes come first.

    Args:
        shows: The classes that each image shows, bool [n, C].
        beta: See `raylt.data.label_maps.class_views`.

    Raises:
        DataError: `beta` exceeds the number of classes, or a client would get no image.
    """
    n, classes = shows.shape
    if beta > classes:
        raise DataError(
            f"data.beta: there are {classes} classes ({beta}). Give at most as many.",
            code="config.out-of-range",
            key="data.beta",
            value=beta,
        )
    shares = (1 / imbalance) ** (np.arange(clients) / max(clients - 1, 1))
    sizes = np.diff(_cut_exact(shares / shares.sum(), n), prepend=0, append=n)
    if not sizes.all():
        raise DataError(
            f"data.imbalance: the last of {clients} clients would get none of the {n} images ({imbalance:g}). "
            "Lower data.imbalance or data.clients.",
            code="data.too-few",
            key="data.imbalance",
            value=imbalance,
        )
    suits = np.stack([shows[:, (np.arange(k, k + beta)) % classes].any(1) for k in range(clients)])  # [K, n]
    owner = np.full(n, -1)
    for k in np.argsort(suits.sum(1), kind="stable"):
        free = rng.permutation(np.flatnonzero(owner < 0))
        owner[free[np.argsort(~suits[k, free], kind="stable")][: sizes[k]]] = k
    return _by_owner(owner, clients)


def iid(labels: np.ndarray, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Divide samples at random into parts whose sizes differ by at most 1."""
    return [np.sort(part) for part in np.array_split(rng.permutation(len(labels)), clients)]


def by_id(ids: np.ndarray | None, clients: int, unique_ids: np.ndarray | None = None) -> list[np.ndarray]:
    """Make one client for each recorded id, in the sorted order of ids.

    Raises:
        DataError: There are no ids, or not as many different ones as clients.
    """
    if ids is None:
        raise DataError(
            "data.partition: the source records no ids (by_id). Give a folder: source with a folder for each client, "
            "an npz: source with id_train, or another data.partition.",
            code="data.no-ids",
            key="data.partition",
            value="by_id",
        )
    unique_ids = np.unique(ids) if unique_ids is None else unique_ids
    if len(unique_ids) != clients:
        raise DataError(
            f"data.clients: the samples record {len(unique_ids)} different ids, and by_id makes one client of each "
            f"({clients}). Set data.clients={len(unique_ids)}.",
            code="config.conflict",
            key="data.clients",
            value=clients,
            ids=len(unique_ids),
        )
    return list(grouped(ids, unique_ids))


def extended_dirichlet(
    labels: np.ndarray, clients: int, per_client: int, alpha: float, min_size: int, rng: np.random.Generator
) -> list[np.ndarray]:
    """Give every client `per_client` classes, and divide each class among its clients by p ~ Dir(alpha).

    The extended Dirichlet strategy of Li and Lyu (NeurIPS 2023), as FedLTLib's and PFLlib's `exdir` compute it: the
    classes of a client are drawn without replacement, again until each class has half of its even number of holders; a
    client with its even share n / K gets nothing more; all is drawn again until each client has `min_size` samples.
    Departure: what PFLlib's cut leaves over goes to the holders by p, and not all to the last.

    Raises:
        DataError: There are fewer classes than that, or no draw met the conditions.
    """
    rows = [np.flatnonzero(labels == c) for c in np.unique(labels)]
    if per_client > len(rows):
        raise _per_client_error(f"there are {len(rows)} classes", per_client, "Give at most as many.")
    share = len(labels) / clients
    fewest = max(per_client * clients // len(rows) // 2, 1)
    for _ in range(RETRIES):
        chosen = [rng.permutation(len(rows))[:per_client] for _ in range(clients)]
        holds = np.zeros((len(rows), clients), dtype=bool)
        for k, classes in enumerate(chosen):
            holds[classes, k] = True
        if holds.sum(1).min() < fewest:
            continue
        owner = _deal(rows, clients, alpha, rng, share, _cut_exact, holds)
        if owner is not None and np.bincount(owner, minlength=clients).min() >= min_size:
            return _by_owner(owner, clients)
    raise _retries_error(len(labels), clients, alpha, min_size)


def pathological(labels: np.ndarray, clients: int, per_client: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Give every client `per_client` classes, and divide each class evenly among its clients.

    The classes are drawn so that the numbers of clients that hold them differ by at most one.

    Raises:
        DataError: There are fewer classes than that, some class would have no client, or has fewer samples than
            clients that hold it.
    """
    classes = np.unique(labels)
    if per_client > len(classes):
        raise _per_client_error(f"there are {len(classes)} classes", per_client, "Give at most as many.")
    if clients * per_client < len(classes):
        raise _per_client_error(
            f"{clients} clients hold {clients * per_client} of {len(classes)} classes",
            per_client,
            f"Give at least {-(-len(classes) // clients)}, or raise data.clients.",
        )
    times = np.zeros(len(classes), dtype=np.int64)
    holders: list[list[int]] = [[] for _ in classes]
    for k in range(clients):
        drawn = rng.permutation(len(classes))
        chosen = drawn[np.argsort(times[drawn], kind="stable")[:per_client]]  # the least often held, at random
        times[chosen] += 1
        for c in chosen:
            holders[c].append(k)
    parts: list[list[np.ndarray]] = [[] for _ in range(clients)]
    for c, owners in zip(classes, holders, strict=True):
        rows = rng.permutation(np.flatnonzero(labels == c))
        if len(rows) < len(owners):
            raise _per_client_error(
                f"{len(owners)} clients would share the {len(rows)} samples of class {c}",
                per_client,
                "Lower data.per_client, data.clients or data.imbalance.",
            )
        for k, part in zip(rng.permutation(owners), np.array_split(rows, len(owners)), strict=True):
            parts[k].append(part)
    return [np.sort(np.concatenate(part)) for part in parts]


def shards(labels: np.ndarray, clients: int, per_client: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Sort samples by class, cut them into equal shards and deal `per_client` shards to each client.

    The partition of McMahan et al. (AISTATS 2017). The order within a class is random, and so are a client's shards.

    Raises:
        DataError: There are more shards than samples.
    """
    if clients * per_client > len(labels):
        raise _per_client_error(
            f"{clients * per_client} shards are more than the {len(labels)} samples",
            per_client,
            "Lower data.per_client or data.clients.",
        )
    shuffled = rng.permutation(len(labels))
    cut = np.array_split(shuffled[np.argsort(labels[shuffled], kind="stable")], clients * per_client)
    dealt = rng.permutation(len(cut)).reshape(clients, per_client)
    return [np.sort(np.concatenate([cut[i] for i in row])) for row in dealt]


def quantity(
    labels: np.ndarray, clients: int, alpha: float, min_size: int, rng: np.random.Generator
) -> list[np.ndarray]:
    """Divide samples randomly into parts of unequal size, with shares p ~ Dir(alpha): quantity skew (NIID-bench).

    Shares are drawn again until each client has `min_size` samples.

    Raises:
        DataError: No draw gave each client `min_size` samples.
    """
    for _ in range(RETRIES):
        ends = (np.cumsum(rng.dirichlet(np.full(clients, alpha)))[:-1] * len(labels)).astype(np.int64)
        parts = np.split(rng.permutation(len(labels)), ends)
        if min(map(len, parts)) >= min_size:
            return [np.sort(part) for part in parts]
    raise _retries_error(len(labels), clients, alpha, min_size)


def _per_client_error(problem: str, per_client: int, remedy: str) -> DataError:
    return DataError(
        f"data.per_client: {problem} ({per_client}). {remedy}",
        code="data.too-few",
        key="data.per_client",
        value=per_client,
    )


def _retries_error(samples: int, clients: int, alpha: float, min_size: int) -> DataError:
    return DataError(
        f"data.alpha: {RETRIES} draws never gave each of {clients} clients {min_size} of the {samples} samples "
        f"({alpha:g}). Raise data.alpha, or lower data.clients or data.min_size.",
        code="data.too-few",
        key="data.alpha",
        value=alpha,
        clients=clients,
        min_size=min_size,
    )


def _deal_until(
    labels: np.ndarray, clients: int, alpha: float, rng: np.random.Generator, cap: float, cut: Cut, min_size: int
) -> np.ndarray:
    """Assign each sample to a client, int64 [n]; draw again until each client has `min_size` samples."""
    rows = [np.flatnonzero(labels == c) for c in np.unique(labels)]
    for _ in range(RETRIES):
        owner = _deal(rows, clients, alpha, rng, cap, cut)
        if owner is not None and np.bincount(owner, minlength=clients).min() >= min_size:
            return owner
    raise _retries_error(len(labels), clients, alpha, min_size)


def _deal(
    rows: list[np.ndarray],
    clients: int,
    alpha: float,
    rng: np.random.Generator,
    cap: float,
    cut: Cut,
    holds: np.ndarray | None = None,
) -> np.ndarray | None:
    """Assign each sample to a client, int64 [n]; return None if no client has room for some class.

    Args:
        holds: The clients that may get samples of each class, bool [C, K]; by default all.
    """
    owner = np.empty(sum(map(len, rows)), dtype=np.int64)
    sizes = np.zeros(clients, dtype=np.int64)
    for c, members in enumerate(rows):
        p = rng.dirichlet(np.full(clients, alpha)) * (sizes < cap)
        if holds is not None:
            p = p * holds[c]
        if not p.sum() > 0:
            return None
        counts = np.diff(cut(p / p.sum(), len(members)), prepend=0, append=len(members))
        owner[rng.permutation(members)] = np.repeat(np.arange(clients), counts)
        sizes += counts
    return owner


def _draw_mix(concentration: np.ndarray, left: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Draw a class distribution over the classes with samples left.

    It has a single class if all shares would round to 0.
    """
    mix = np.zeros(len(left))
    available = left > 0
    drawn = rng.dirichlet(concentration[available])
    if not drawn.sum() > 0:
        drawn = rng.multinomial(1, concentration[available] / concentration[available].sum())
    mix[available] = drawn
    return mix


def _cut_down(p: np.ndarray, n: int) -> np.ndarray:
    """Return the positions at which n samples are cut into the shares `p`, rounded down as in CReFF's code."""
    return (np.cumsum(p)[:-1] * n).astype(np.int64)


def _cut_exact(p: np.ndarray, n: int) -> np.ndarray:
    """Return the positions at which n samples are cut into the shares `p`.

    Sizes are rounded down, and the largest fractions get the remaining samples.
    """
    counts = np.floor(n * p).astype(np.int64)
    counts[np.argsort(counts - n * p, kind="stable")[: n - counts.sum()]] += 1
    return np.cumsum(counts)[:-1]


def _by_owner(owner: np.ndarray, clients: int) -> list[np.ndarray]:
    """Return the indices of each client's samples, ascending."""
    ends = np.cumsum(np.bincount(owner, minlength=clients))
    return np.split(np.argsort(owner, kind="stable"), ends[:-1])
