"""`Task`: the data of an experiment, and who holds which part of them."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import overload

import numpy as np

from raylt.config import DataConfig
from raylt.data.auxiliary import auxiliary_rows
from raylt.data.cache import Stored, cut, load, take
from raylt.data.drawing import draw, notes
from raylt.data.index_lists import IndexLists, bounds
from raylt.data.longtail import group_of
from raylt.data.maps import BACKGROUND, VOID, class_counts, class_views, relabel
from raylt.data.newcomers import draw_newcomers
from raylt.data.source import Kind, channel_statistics
from raylt.data.sources import group_thresholds, open_source
from raylt.data.split import Split
from raylt.data.split_source import check, drawn_otherwise, own_tests
from raylt.data.validation import carve


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
class Holdings(Sequence[Shard]):
    """The shards of clients as one value: each is made when it is asked for, a view of what all hold together.

    Args:
        whole: the clients' samples, one client after the other; its view is None.
        ends: of each client, where its samples end, int64 [K].
        views: of each client; None where each class is itself to everybody.
    """

    whole: Shard
    ends: np.ndarray
    views: Sequence[np.ndarray | None] | None = None

    @property
    def sizes(self) -> np.ndarray:
        """Images of each client, int64 [K]."""
        return np.diff(self.ends, prepend=0)

    def __len__(self) -> int:
        return len(self.ends)

    @overload
    def __getitem__(self, client: int) -> Shard: ...

    @overload
    def __getitem__(self, client: slice) -> tuple[Shard, ...]: ...

    def __getitem__(self, client: int | slice) -> Shard | tuple[Shard, ...]:
        if isinstance(client, slice):
            return tuple(self[k] for k in range(len(self))[client])
        start, end = bounds(self.ends, client)
        ids = self.whole.ids
        return Shard(cut(self.whole.x, start, end), cut(self.whole.y, start, end),
                     None if ids is None else ids[start:end], None if self.views is None else self.views[client])


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
    shards: Sequence[Shard]
    test: Shard
    split: Split
    validation: Shard | None = None
    client_names: tuple[str, ...] = ()
    own_tests: Sequence[np.ndarray] | None = None
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

    @cached_property
    def sizes(self) -> np.ndarray:
        """Images of each client, int64 [K]."""
        return self.shards.sizes if isinstance(self.shards, Holdings) else np.array(list(map(len, self.shards)))

    @property
    def views(self) -> np.ndarray:
        """The class that each class is to each client when it is judged, int64 [K, C]."""
        itself = np.arange(self.classes)
        if isinstance(self.shards, Holdings) and self.shards.views is None:
            return np.tile(itself, (self.clients, 1))
        return np.stack([itself if shard.renaming is None else shard.renaming for shard in self.shards])

    @property
    def clients(self) -> int:
        return len(self.shards)

    def without_data(self) -> "Task":
        """What the server may know: sizes and views of the shards stay, their images and labels do not."""
        ends = np.cumsum(self.sizes)
        nothing = Shard(np.empty((ends[-1], 0, 0, 0), np.uint8), np.empty((ends[-1], 0), np.uint8))
        views = self.shards.views if isinstance(self.shards, Holdings) else [shard.view for shard in self.shards]
        return replace(self, shards=Holdings(nothing, ends, views))

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
    source, otherwise = open_source(config), list[str]()
    if split is not None:
        check(split, source, config, "the split of this run")
    elif config.split is not None:
        split = Split.load(Path(config.split).expanduser())
        check(split, source, config, config.split)
        otherwise = drawn_otherwise(split, config)
    else:
        split = draw(source, config)
    names, views = source.class_names, None
    everyone = class_counts(take(source.y_train, np.concatenate(split.clients)), len(names))
    groups = group_of(everyone, *group_thresholds(config, everyone.sum() if source.kind == "segmentation" else None))
    if split.beta is not None:
        views = class_views(len(split.clients), len(names), split.beta, config.erased)
        if config.erased == "background":
            names, groups = (*names, BACKGROUND), [*groups, "-"]

    def shard(rows: np.ndarray) -> Shard:
        return Shard(take(source.x_train, rows), take(source.y_train, rows), rows)

    kept, held = (carve(split.clients, source.strata, config.validation, config.seed) if config.validation else
                  (split.clients, None))
    rows = kept if isinstance(kept, IndexLists) else IndexLists.of(kept)
    shards = Holdings(shard(rows.flat), rows.ends, None if views is None else list(views))
    late = draw_newcomers(kept, config)
    judged = [rows for rows in (held, *(split.test or ())) if rows is not None]
    extra = shard(auxiliary_rows(source, kept, late, judged, config)) if config.auxiliary else None
    client_counts = _counts(shards, len(names))
    mean, std, test = source.mean, source.std, Shard(source.x_test, source.y_test)
    if split.test is not None:
        mean, std = channel_statistics(take(source.x_train, np.sort(np.concatenate(split.clients))))
        test = replace(shard(np.concatenate(split.test)), ids=None)
    _, height, width, channels = source.x_train.shape
    if not config.normalise:
        mean, std = (0.0,) * channels, (1.0,) * channels
    own = own_tests(source, split)
    return Task(source.name, names, (height, width, channels), mean, std, client_counts, tuple(groups),
                shards, test, split, None if held is None else shard(held), split.client_names or (),
                own, (*source.notes, *otherwise, *notes(source, split, load(test.y), own)), extra, late,
                kind=source.kind)


def _counts(shards: Holdings, classes: int) -> np.ndarray:
    """Training samples, or pixels, per client and class as the client sees it, int64 [K, C]."""
    y = shards.whole.y
    if len(y.shape) > 1 or shards.views is not None:
        return np.stack([class_counts(shard.labels(), classes) for shard in shards])
    owners = np.repeat(np.arange(len(shards)), shards.sizes)
    return np.bincount(owners * classes + load(y), minlength=len(shards) * classes).reshape(-1, classes)
