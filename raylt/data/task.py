"""`Task`: the data of an experiment, and who holds which part of them."""

from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import numpy as np

from raylt.config import DataConfig
from raylt.data.auxiliary import auxiliary_rows
from raylt.data.cache import Stored, load, take
from raylt.data.drawing import draw, notes
from raylt.data.longtail import group_of
from raylt.data.maps import BACKGROUND, VOID, class_counts, class_views, relabel
from raylt.data.newcomers import draw_newcomers
from raylt.data.source import Kind, Source, channel_statistics
from raylt.data.sources import group_thresholds, open_source
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
        test: the balanced test set; or the clients' own test samples, one client after the other.
        split: which training samples of the source the shards and the validation set are.
        validation: as long-tailed as the shards; None unless `data.validation` asks for it.
        client_names: of each client, K of them; without names their numbers.
        own_tests: of each client, the rows of `test` that are its own test samples, int64 [n]; None where nobody
            recorded whose they are, or the clients are not those that it was recorded of.
        notes: what a user should hear of the data, in whole sentences.
        auxiliary: what the server holds itself, balanced; None unless `data.auxiliary` asks for it.
        newcomers: ids of the clients that join only after training, ascending.
    """

    client_counts: np.ndarray
    groups: tuple[str, ...]
    shards: tuple[Shard, ...]
    test: Shard
    split: Split
    validation: Shard | None = None
    client_names: tuple[str, ...] = ()
    own_tests: tuple[np.ndarray, ...] | None = None
    notes: tuple[str, ...] = ()
    auxiliary: Shard | None = None
    newcomers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.client_names:
            object.__setattr__(self, "client_names", tuple(map(str, range(self.clients))))

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
        # one pair of arrays for all clients of a size: a hundred thousand of them travel in a second
        empty = {n: (np.empty((n, 0, 0, 0), np.uint8), np.empty((n, 0), np.uint8)) for n in set(map(len, self.shards))}
        return replace(self, shards=tuple(Shard(*empty[len(shard)], None, shard.view) for shard in self.shards))

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
        split = draw(source, config)
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
    late = draw_newcomers(kept, config)
    extra = shard(auxiliary_rows(source, kept, late, held, config)) if config.auxiliary else None
    client_counts = np.stack([class_counts(its.labels(), len(names)) for its in shards])
    mean, std, test = source.mean, source.std, Shard(source.x_test, source.y_test)
    if split.test is not None:
        mean, std = channel_statistics(take(source.x_train, np.sort(np.concatenate(split.clients))))
        test = replace(shard(np.concatenate(split.test)), ids=None)
    _, height, width, channels = source.x_train.shape
    if not config.normalise:
        mean, std = (0.0,) * channels, (1.0,) * channels
    return Task(source.name, names, (height, width, channels), mean, std, client_counts, tuple(groups),
                shards, test, split, None if held is None else shard(held), split.client_names or (),
                _own_tests(source, split), (*source.notes, *notes(source, split, load(test.y))), extra, late,
                kind=source.kind)


def complete(config: DataConfig, split: Split) -> DataConfig:
    """The configuration with what the data decided, for the record."""
    known = {"clients": len(split.clients), "imbalance": split.imbalance, "partition": split.partition,
             "test": split.test_share}
    return config.model_copy(update={key: value for key, value in known.items() if getattr(config, key) is None})


def _own_tests(source: Source, split: Split) -> tuple[np.ndarray, ...] | None:
    if split.partition != "by_id":
        return None
    if split.test is not None:
        return tuple(np.split(np.arange(sum(map(len, split.test))), np.cumsum([len(rows) for rows in split.test])[:-1]))
    if source.test_ids is None or source.ids is None:
        return None
    return tuple(np.flatnonzero(source.test_ids == known) for known in np.unique(source.ids))


def _check(split: Split, source: Source, config: DataConfig, name: str) -> None:
    """Raises a DataError where a split cannot be one of these data."""
    if split.labels_sha256 != hash_labels(source.y_train):
        raise DataError(f"{name}: drawn from {split.source}, whose training labels are not those of data.source = "
                        f"{config.source}; use the source it was drawn from")
    if config.clients is not None and len(split.clients) != config.clients:
        raise DataError(f"{name}: has {len(split.clients)} clients, data.clients = {config.clients}; "
                        f"set data.clients={len(split.clients)}")
    if (split.test is not None) != (not len(source.y_test)):
        raise DataError(f"{name}: was drawn where {source.name} had {'no' if split.test is not None else 'a'} test "
                        "part, which is otherwise now; draw the split anew")
    rows = np.concatenate([*split.clients, *(split.test or ())])
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
