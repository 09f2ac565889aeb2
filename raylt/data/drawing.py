"""A split drawn from a source as a configuration asks: what becomes the test part, what is left out, who gets what."""

import numpy as np

from raylt.config import BENCHMARKS, DataConfig
from raylt.data.cache import Stored, load
from raylt.data.index_lists import IndexLists
from raylt.data.longtail import long_tail_subset
from raylt.data.maps import class_counts, shown
from raylt.data.partition import partition
from raylt.data.source import Source
from raylt.data.split import Split, hash_labels
from raylt.data.validation import hold_out
from raylt.errors import DataError

TEST = 0.2              # of each client's images, where the data have no test part


def draw(source: Source, config: DataConfig) -> Split:
    """The split of a source that `config` asks for; what is None in it follows from the source.

    Raises:
        DataError: the data cannot be split as asked.
    """
    known = None if source.ids is None else np.unique(source.ids)
    config = _resolved(config, known)
    test, share, pool = None, None, np.arange(len(source.y_train))
    if not len(source.y_test):
        if source.ids is None or source.kind != "classification":
            raise DataError(f"{source.name}: has no test images, and nobody recorded whose its images are, so none can "
                            "be split off for each client; add a test part")
        share = config.test or TEST
        test = IndexLists.of(hold_out(source.ids, load(source.y_train), share, config.seed))
        pool = np.setdiff1d(pool, test.flat)
    elif config.test is not None:
        raise DataError(f"data.test = {config.test:g}: {source.name} has test images of its own, so none are split "
                        "off; leave data.test out")
    subset, labels = _thinned(source, pool, config)
    parts = partition(labels, config, None if source.ids is None else source.ids[subset], known)
    assert config.imbalance is not None
    assert config.partition is not None
    return Split(IndexLists.of(subset[part] for part in parts), hash_labels(source.y_train), source.name,
                 config.imbalance, config.partition, config.alpha, config.seed,
                 config.beta if config.partition == "classes" else None, test, share,
                 source.client_names if config.partition == "by_id" else None,
                 None if config.tail == "global" else config.tail,
                 config.per_client if config.partition in ("pathological", "shards") else None)


def check_judged(name: str, y_test: Stored, classes: int) -> None:
    """Raises a DataError where no test sample has a label, so that nothing could be judged."""
    if not class_counts(y_test, classes).any():
        raise DataError(f"data.source = {name}: no test image has a label, so nothing could be judged; give test "
                        "images, or clients two images of a class at least, of which one is held out")


def notes(source: Source, split: Split, y_test: np.ndarray, own: IndexLists | None) -> list[str]:
    """What a split of a source leaves out, in whole sentences.

    Args:
        y_test: labels of the test set.
        own: rows of each client's own test samples, see `own_tests`.
    """
    every = len(source.y_train) - sum(map(len, split.test or ()))
    told, used = [], sum(map(len, split.clients))
    if used < every:
        told.append(f"{every - used:,} of {every:,} training images ({(every - used) / every:.0%}) are left out: the "
                    f"split is drawn with data.imbalance = {split.imbalance:g}; data.imbalance=1 keeps all")
    missing = class_counts(y_test, len(source.class_names)) == 0
    if missing.any():
        names = [name for name, none in zip(source.class_names, missing, strict=True) if none]
        told.append(f"no test image of {len(names)} of {len(missing)} classes, which are judged nowhere: "
                    f"{', '.join(names[:10])}" + ", .." * (len(names) > 10))
    untested = [] if own is None else np.flatnonzero(own.sizes == 0).tolist()
    if untested:
        shown = [split.client_names[k] if split.client_names else str(k) for k in untested[:10]]
        told.append(f"{len(untested)} of {len(split.clients)} clients have no test image of their own: "
                    f"{', '.join(shown)}" + ", .." * (len(untested) > 10))
    return told


def _resolved(config: DataConfig, known: np.ndarray | None) -> DataConfig:
    name = config.partition or ("dirichlet" if known is None else "by_id")
    clients = config.clients or (10 if known is None or name != "by_id" else len(known))
    return config.model_copy(update={"partition": name, "clients": clients, "imbalance": config.imbalance or 1.0})


def _check_classes(source: Source, labels: np.ndarray) -> None:
    held = np.bincount(labels, minlength=len(source.class_names))
    if missing := [name for name, n in zip(source.class_names, held, strict=True) if not n]:
        raise DataError(f"{source.name}: has no training image of {', '.join(missing[:10])}; add some or remove the "
                        "class" + "".join(f"; {note}" for note in source.notes))


def _thinned(source: Source, pool: np.ndarray, config: DataConfig) -> tuple[np.ndarray, np.ndarray]:
    """Rows of the training set, out of those in `pool`, and what a partition goes by."""
    assert config.imbalance is not None
    classes = len(source.class_names)
    if source.kind == "classification":
        labels = load(source.y_train)
        _check_classes(source, labels[pool])
        by_size = config.source not in BENCHMARKS
        together = 1.0 if config.tail == "local" else config.imbalance
        subset = pool[long_tail_subset(labels[pool], together, classes, config.seed, by_size)]
        return subset, labels[subset]
    if config.imbalance != 1 and config.partition in ("iid", "by_id"):
        raise DataError(f"data.imbalance = {config.imbalance:g}: the classes of {source.name} share its images, so "
                        "none can be thinned; set data.imbalance=1")
    return pool, shown(source.y_train, classes)
