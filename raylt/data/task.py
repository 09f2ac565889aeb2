"""`Task`: the data of an experiment, and who holds which part of them."""

from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import numpy as np

from raylt.config import DataConfig
from raylt.data.cache import Stored, load, take
from raylt.data.longtail import group_of, long_tail_subset
from raylt.data.maps import BACKGROUND, VOID, class_counts, class_views, relabel, shown
from raylt.data.partition import partition
from raylt.data.sources import Kind, Source, group_thresholds, open_source
from raylt.data.split import Split, hash_labels
from raylt.data.validation import carve
from raylt.errors import DataError


@dataclass(frozen=True, eq=False)
class Shard:
    """Images and labels of one client, or of the test set.

    Args:
        x: uint8 [n, H, W, channels].
        y: int64 [n], or label maps uint8 [n, H, W] (raylt/data/maps.py).
        ids: places in the source's training set, int64 [n]; None for a test set.
        view: the class that each class is to whoever holds the shard, int64 [C], or VOID; None: itself.
    """

    x: Stored
    y: Stored
    ids: np.ndarray | None = None
    view: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.y)

    @property
    def renaming(self) -> np.ndarray | None:
        """The view, where it gives every class another name; None where it is none or only takes labels away."""
        return None if self.view is None or (self.view == VOID).any() else self.view

    def labels(self) -> np.ndarray:
        """`y` in memory, as the holder sees it."""
        return load(self.y) if self.view is None else relabel(load(self.y), self.view)


@dataclass(frozen=True, eq=False)
class Facts:
    """What every party may know of a task: nothing of who holds what.

    Args:
        name: of the source.
        class_names: C names.
        shape: height, width and channels of an image.
        mean, std: per channel, of pixels in [0, 1].
        kind: what a label is: a class, or a map of them.
    """

    name: str
    class_names: tuple[str, ...]
    shape: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    kind: Kind = field(default="classification", kw_only=True)

    @property
    def classes(self) -> int:
        return len(self.class_names)


@dataclass(frozen=True, eq=False)
class Task(Facts):
    """The data of an experiment.

    Args:
        client_counts: training samples, or pixels, per client and class as the client sees it, int64 [K, C].
        groups: "many", "medium" or "few" for each class, by its global training count (with those for validation); "-"
            for a background that stands for all classes.
        shards: training samples of each client; a client may have none.
        test: the balanced test set.
        split: which training samples of the source the shards and the validation set are.
        validation: as long-tailed as the shards; None unless `data.validation` asks for it.
    """

    client_counts: np.ndarray
    groups: tuple[str, ...]
    shards: tuple[Shard, ...]
    test: Shard
    split: Split
    validation: Shard | None = None

    @property
    def counts(self) -> np.ndarray:
        """Global training samples, or pixels, per class, int64 [C]."""
        return self.client_counts.sum(0)

    @property
    def sizes(self) -> np.ndarray:
        """Images of each client, int64 [K]."""
        return np.array([len(shard) for shard in self.shards])

    @property
    def views(self) -> np.ndarray:
        """The class that each class is to each client when it is judged, int64 [K, C]."""
        itself = np.arange(self.classes)
        return np.stack([itself if shard.renaming is None else shard.renaming for shard in self.shards])

    @property
    def clients(self) -> int:
        return len(self.shards)

    def without_data(self) -> "Task":
        """What the server may know: sizes and views of the shards stay, their images and labels do not."""
        return replace(self, shards=tuple(
            Shard(np.empty((len(shard), 0, 0, 0), np.uint8), np.empty((len(shard), 0), np.uint8), None, shard.view)
            for shard in self.shards))

    @property
    def facts(self) -> Facts:
        return Facts(**{field.name: getattr(self, field.name) for field in fields(Facts)})


def build_task(config: DataConfig, split: Split | None = None) -> Task:
    """The data set that `config` names, made long-tailed and partitioned; or split as its `split` file says.

    Args:
        split: instead of what the configuration says.

    Raises:
        ConfigError: no such source.
        DataError: the data are missing or malformed, or cannot be split as asked.
    """
    source = open_source(config)
    if split is not None:
        _check(split, source, config, "the split of this run")
    elif config.split is not None:
        split = Split.load(Path(config.split).expanduser())
        _check(split, source, config, config.split)
    else:
        split = _draw(source, config)
    names, views = source.class_names, None
    everyone = class_counts(take(source.y_train, np.concatenate(split.clients)), len(names))
    groups = group_of(everyone, *group_thresholds(config, everyone.sum() if source.kind == "segmentation" else None))
    if split.beta is not None:
        views = class_views(len(split.clients), len(names), split.beta, config.erased)
        if config.erased == "background":
            names, groups = (*names, BACKGROUND), [*groups, "-"]

    def shard(rows: np.ndarray, client: int | None = None) -> Shard:
        view = None if views is None or client is None else views[client]
        return Shard(take(source.x_train, rows), take(source.y_train, rows), rows, view)

    kept, held = split.clients, None
    if config.validation:
        kept, held = carve(split.clients, source.strata, config.validation, config.seed)
    shards = tuple(shard(rows, k) for k, rows in enumerate(kept))
    client_counts = np.stack([class_counts(its.labels(), len(names)) for its in shards])
    _, height, width, channels = source.x_train.shape
    mean, std = (source.mean, source.std) if config.normalise else ((0.0,) * channels, (1.0,) * channels)
    return Task(source.name, names, (height, width, channels), mean, std, client_counts, tuple(groups),
                shards, Shard(source.x_test, source.y_test), split, None if held is None else shard(held),
                kind=source.kind)


def _draw(source: Source, config: DataConfig) -> Split:
    subset, labels = _thinned(source, config)
    parts = partition(labels, config, None if source.ids is None else source.ids[subset])
    return Split(tuple(subset[part] for part in parts), hash_labels(source.y_train), source.name, config.imbalance,
                 config.partition, config.alpha, config.seed, config.beta if config.partition == "classes" else None)


def _thinned(source: Source, config: DataConfig) -> tuple[np.ndarray, np.ndarray]:
    """Rows of the training set, and what a partition goes by."""
    classes = len(source.class_names)
    if source.kind == "classification":
        labels = load(source.y_train)
        subset = long_tail_subset(labels, config.imbalance, classes, config.seed)
        return subset, labels[subset]
    if config.imbalance != 1 and config.partition in ("iid", "by_id"):
        raise DataError(f"data.imbalance = {config.imbalance:g}: the classes of {source.name} share its images, so "
                        "none can be thinned; set data.imbalance=1")
    return np.arange(len(source.y_train)), shown(source.y_train, classes)


def _check(split: Split, source: Source, config: DataConfig, name: str) -> None:
    """Raises a DataError where a split cannot be one of these data."""
    if split.labels_sha256 != hash_labels(source.y_train):
        raise DataError(f"{name}: drawn from {split.source}, whose training labels are not those of data.source = "
                        f"{config.source}; use the source it was drawn from")
    if len(split.clients) != config.clients:
        raise DataError(f"{name}: has {len(split.clients)} clients, data.clients = {config.clients}; "
                        f"set data.clients={len(split.clients)}")
    rows = np.concatenate(split.clients)
    if not len(rows) or rows.min() < 0 or rows.max() >= len(source.y_train):
        raise DataError(f"{name}: indices must be from 0 to {len(source.y_train) - 1} and at least one; "
                        "draw the split anew")
    if len(np.unique(rows)) != len(rows):
        raise DataError(f"{name}: some sample is listed more than once; draw the split anew")
    if (split.partition == "classes") != (split.beta is not None):
        raise DataError(f"{name}: partition {split.partition} with beta {split.beta}; beta belongs to partition "
                        "classes alone; draw the split anew")
    if split.beta is not None and (source.kind != "segmentation" or split.beta > len(source.class_names)):
        raise DataError(f"{name}: beta {split.beta}: clients keep classes of label maps only, and {source.name} is a "
                        f"problem of {source.kind} with {len(source.class_names)} classes; draw the split anew")
