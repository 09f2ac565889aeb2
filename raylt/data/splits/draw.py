"""Draws a split from a source: test part, long tail, clients' samples and validation set."""

from collections.abc import Sequence

import numpy as np

from raylt.config import BENCHMARKS, DataConfig
from raylt.data.images.cache import Stored, load
from raylt.data.label_maps import class_counts, present_classes
from raylt.data.sources.arrays import Source
from raylt.data.splits.long_tail import long_tail_subset
from raylt.data.splits.partitions import partition
from raylt.data.splits.split import IndexLists, Split, grouped, hash_labels
from raylt.errors import DataError, first_names
from raylt.seeds import seed_for

TEST = 0.2  # default fraction of each client's (or class's) images that become test images without a test part


def draw(source: Source, config: DataConfig) -> Split:
    """Draw a split of a source by the configuration. Unset settings take the source's defaults.

    Raises:
        DataError: The data cannot be split as configured.
    """
    unique_ids = None if source.ids is None else np.unique(source.ids)
    config = _resolved(config, unique_ids)
    assert config.imbalance is not None
    assert config.partition is not None
    test, test_share = test_part(source, config)
    pool = np.arange(len(source.y_train))
    if test is not None:
        pool = np.setdiff1d(pool, test.flat)
    subset, labels = _thinned(source, pool, config)
    parts = partition(labels, config, None if source.ids is None else source.ids[subset], unique_ids)
    return Split(
        clients=IndexLists.of(subset[part] for part in parts),
        labels_sha256=hash_labels(source.y_train),
        source=source.name,
        imbalance=config.imbalance,
        partition=config.partition,
        alpha=config.alpha,
        seed=config.seed,
        beta=config.beta if config.partition == "classes" else None,
        test=test,
        test_share=test_share,
        client_names=source.client_names if config.partition == "by_id" else None,
        tail=None if config.tail == "global" else config.tail,
        per_client=config.per_client if config.partition in ("exdir", "pathological", "shards") else None,
        test_pooled=True if test is not None and source.ids is None else None,
    )


def hold_out_validation(
    clients: Sequence[np.ndarray], labels: np.ndarray, share: float, seed: int
) -> tuple[IndexLists, np.ndarray]:
    """Move a seeded random share of each class from the clients to the validation set.

    Of a class with n samples, share * n are taken, rounded to the nearest whole number (half to even), at least one and
    at most n - 1: a class with one sample stays in training. A client's last sample is never taken, so the clients stay
    the same. If too few samples remain to choose from, fewer are taken.

    Args:
        clients: For each client, rows of the training set, int64 [n], ascending.
        labels: Labels of the whole training set, int64 [N].
        share: Fraction of each class, in (0, 1).
        seed: `data.seed`.

    Returns:
        The rows that each client keeps, and the rows of the validation set; all ascending.

    Raises:
        DataError: No sample can be taken.
    """
    rows = np.concatenate(list(clients))
    owner = np.repeat(np.arange(len(clients)), [len(client) for client in clients])
    left = np.bincount(owner, minlength=len(clients))
    taken = np.zeros(len(rows), dtype=bool)
    rng = np.random.default_rng(seed_for(seed, "validation"))
    for c in np.unique(labels[rows]):
        members = rng.permutation(np.flatnonzero(labels[rows] == c))
        missing = min(max(1, round(share * len(members))), len(members) - 1)
        for position in members:
            if missing and left[owner[position]] > 1:
                taken[position] = True
                left[owner[position]] -= 1
                missing -= 1
    if not taken.any():
        raise DataError(
            f"data.validation: no client has two samples of a class, one to hold out and one to keep ({share:g}). "
            "Set data.validation=0, or add samples.",
            code="data.too-few",
            key="data.validation",
            value=share,
        )
    kept = IndexLists(rows[~taken], np.cumsum(np.bincount(owner[~taken], minlength=len(clients))))
    return kept, np.sort(rows[taken])


def hold_out(ids: np.ndarray, labels: np.ndarray, share: float, seed: int) -> list[np.ndarray]:
    """Choose a seeded random share of each client's samples of each class as the client's test part.

    Of n samples of a class, share * n are taken, rounded to the nearest whole number (half up), but never the last one.
    If a client would get no test sample but has two samples of a class, one sample of its largest class is taken.

    Args:
        ids: Client id of each sample, [N].
        labels: Labels of the samples, int64 [N].
        share: Fraction of the samples, in (0, 1).
        seed: `data.seed`.

    Returns:
        For each distinct id, in sorted order, the rows of its test samples, int64 [n], ascending.
    """
    parts = []
    for position, rows in enumerate(grouped(ids, np.unique(ids))):
        rng = np.random.default_rng(seed_for(seed, "test part", position))
        members = [rng.permutation(rows[labels[rows] == c]) for c in np.unique(labels[rows])]
        counts = [min(int(share * len(each) + 0.5), len(each) - 1) for each in members]
        largest = max(range(len(members)), key=lambda c: len(members[c]))
        if not any(counts) and len(members[largest]) > 1:
            counts[largest] = 1
        parts.append(np.sort(np.concatenate([each[:n] for each, n in zip(members, counts, strict=True)])))
    return parts


def check_judged(name: str, y_test: Stored, classes: int) -> None:
    """Raise an error if no test sample has a label.

    Args:
        name: Name of the source.
        y_test: Labels of the test set.
        classes: Number of classes.

    Raises:
        DataError: No test sample has a label, so no model could be evaluated.
    """
    if not class_counts(y_test, classes).any():
        raise DataError(
            f"data.source: no test image has a label, so no model could be evaluated ({name}). "
            "Add test images, or give clients at least two images of a class, one of which is held out.",
            code="data.no-test-images",
            key="data.source",
            value=name,
        )


def notes(source: Source, split: Split, y_test: np.ndarray, own: IndexLists | None) -> list[str]:
    """Return sentences about the samples, classes and clients that a split leaves out.

    Args:
        source: The data set.
        split: The split.
        y_test: Labels of the test set.
        own: Rows of each client's own test samples, see `own_tests`.
    """
    sentences = []
    every = len(source.y_train) - sum(map(len, split.test or ()))
    used = sum(map(len, split.clients))
    if used < every and split.partition == "imported":
        sentences.append(f"{every - used:,} of {every:,} training images are in no client's list and are left out")
    elif used < every:
        sentences.append(
            f"{every - used:,} of {every:,} training images ({(every - used) / every:.0%}) are left out: the "
            f"split is drawn with data.imbalance = {split.imbalance:g}; data.imbalance=1 keeps all"
        )
    if len(source.class_names) == 1:
        sentences.append(f"all labels are of one class ({source.class_names[0]}), so every accuracy is 100 %")
    missing = class_counts(y_test, len(source.class_names)) == 0
    if missing.any():
        names = [name for name, absent in zip(source.class_names, missing, strict=True) if absent]
        sentences.append(
            f"no test image shows {len(names)} of {len(missing)} classes, which are never evaluated: "
            f"{first_names(names)}"
        )
    untested = [] if own is None else np.flatnonzero(own.sizes == 0).tolist()
    if untested:
        clients = [split.client_names[k] if split.client_names else str(k) for k in untested]
        lack = "has no test image of its own" if len(untested) == 1 else "have no test image of their own"
        sentences.append(f"{len(untested)} of {len(split.clients)} clients {lack}: {first_names(clients)}")
    return sentences


def _resolved(config: DataConfig, unique_ids: np.ndarray | None) -> DataConfig:
    """Return the configuration with defaults for unset partition, clients and imbalance."""
    name = config.partition or ("dirichlet" if unique_ids is None else "by_id")
    clients = config.clients or (10 if unique_ids is None or name != "by_id" else len(unique_ids))
    return config.model_copy(update={"partition": name, "clients": clients, "imbalance": config.imbalance or 1.0})


def test_part(source: Source, config: DataConfig) -> tuple[IndexLists | None, float | None]:
    """Choose the training rows that become test samples; return these rows, and their share of the samples.

    Both are None if the source has a test set. There is one list of rows for each id, or one list if the source records
    no ids.

    Raises:
        DataError: There is no test set and none can be split off, or a share is set that does not apply.
    """
    if len(source.y_test):
        for key in ("test", "test_share"):
            _check_unset(config, key, f"{source.name} has test images of its own, so none are split off")
        return None, None
    if source.kind != "classification":
        raise DataError(
            f"data.source: {source.name} has no test images, and none can be split off from label maps. Add a test "
            "part.",
            code="data.no-test-images",
            key="data.source",
            value=source.name,
        )
    labels = load(source.y_train)
    if source.ids is None:
        _check_unset(config, "test", f"{source.name} names no clients; data.test_share is the share of its test set")
        share = config.test_share or TEST
        return IndexLists.of(hold_out(np.zeros(len(labels)), labels, share, config.seed)), share
    _check_unset(config, "test_share", f"{source.name} names clients; data.test is the share of each client's images")
    share = config.test or TEST
    return IndexLists.of(hold_out(source.ids, labels, share, config.seed)), share


def _check_unset(config: DataConfig, key: str, problem: str) -> None:
    value = getattr(config, key)
    if value is not None:
        raise DataError(
            f"data.{key}: {problem} ({value:g}). Leave data.{key} out.",
            code="config.conflict",
            key=f"data.{key}",
            value=value,
        )


def _thinned(source: Source, pool: np.ndarray, config: DataConfig) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows of `pool` that remain after long-tail sampling, and their labels.

    For label maps, the labels are the classes that each map shows.
    """
    assert config.imbalance is not None
    classes = len(source.class_names)
    if source.kind == "classification":
        labels = load(source.y_train)
        _check_classes(source, labels[pool])
        by_size = config.source not in BENCHMARKS
        imbalance = 1.0 if config.tail == "local" else config.imbalance
        subset = pool[long_tail_subset(labels[pool], imbalance, classes, config.seed, by_size)]
        return subset, labels[subset]
    if config.imbalance != 1 and config.partition in ("iid", "by_id"):
        raise DataError(
            f"data.imbalance: an image of {source.name} shows many classes, so none can be subsampled "
            f"({config.imbalance:g}). Set data.imbalance=1.",
            code="data.wrong-kind",
            key="data.imbalance",
            value=config.imbalance,
        )
    return pool, present_classes(source.y_train, classes)


def _check_classes(source: Source, labels: np.ndarray) -> None:
    counts = np.bincount(labels, minlength=len(source.class_names))
    missing = [name for name, n in zip(source.class_names, counts, strict=True) if not n]
    if missing:
        reasons = f" ({'; '.join(source.notes)})" if source.notes else ""
        raise DataError(
            f"data.source: {source.name} has no training image of {', '.join(missing[:10])}{reasons}. "
            "Add some, or remove the class.",
            code="data.too-few",
            key="data.source",
            value=source.name,
            classes=missing,
        )
