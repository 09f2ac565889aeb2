"""`Task` is the data of an experiment, by client. `TaskOutline` is its description in a run folder."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, TypeAdapter
from typing_extensions import TypedDict

from raylt.config import DataConfig, located_data
from raylt.data.doubles import doubles_note, without_doubles
from raylt.data.images.cache import Stored, cut, load, take
from raylt.data.label_maps import BACKGROUND, VOID, class_counts, class_views, relabel
from raylt.data.sources.arrays import ProblemKind, Source, channel_statistics
from raylt.data.sources.sources import group_thresholds, open_source
from raylt.data.splits.auxiliary import auxiliary_rows
from raylt.data.splits.check import check, overridden, own_tests
from raylt.data.splits.draw import draw, hold_out_validation, notes
from raylt.data.splits.imported import open_split
from raylt.data.splits.long_tail import shot_groups
from raylt.data.splits.new_clients import draw_new_clients
from raylt.data.splits.partitions import check_partition_exists
from raylt.data.splits.split import IndexLists, PerClient, Split
from raylt.errors import DataError
from raylt.metrics import GROUPS
from raylt.typed_json import closed

MAX_NAME = 255  # maximum length of a class or client name, the same as of a folder's name


@dataclass(frozen=True, eq=False)
class Shard:
    """Images and labels of one client or of the test set.

    Args:
        x: Images uint8 [n, H, W, channels].
        y: Labels int64 [n], or label maps uint8 [n, H, W] (raylt/data/label_maps.py).
        ids: Rows of the source's training set, int64 [n]; None for a test set.
        view: The class that the holder sees in place of each class, int64 [C], or VOID; None if the holder sees the
            classes themselves.
    """

    x: Stored
    y: Stored
    ids: np.ndarray | None = None
    view: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.y)

    @property
    def renaming(self) -> np.ndarray | None:
        """Return the client's class mapping if the mapping renames classes, otherwise None.

        A mapping that only removes labels renames no class.
        """
        return None if self.view is None or (self.view == VOID).any() else self.view

    def labels(self) -> np.ndarray:
        """Load the labels into memory and apply the client's class mapping to them."""
        return load(self.y) if self.view is None else relabel(load(self.y), self.view)


class Holdings(PerClient[Shard]):
    """The images and labels of all clients, each made on access as a view of one array.

    Args:
        whole: The samples of all clients, one client after the other, without a view.
        ends: For each client, the row at which its samples end, int64 [K].
        views: The view of each client; None if all clients see the classes themselves.
    """

    def __init__(self, whole: Shard, ends: np.ndarray, views: Sequence[np.ndarray | None] | None = None):
        super().__init__(ends)
        self.whole = whole
        self.views = views

    def _part(self, client: int, start: int, end: int) -> Shard:
        ids = self.whole.ids
        return Shard(
            x=cut(self.whole.x, start, end),
            y=cut(self.whole.y, start, end),
            ids=None if ids is None else ids[start:end],
            view=None if self.views is None else self.views[client],
        )


@dataclass(frozen=True, eq=False)
class TaskSpec:
    """The part of a task that every party may know, without samples.

    Of clients' samples it has statistics over all training images: the thresholds and, unless the data set publishes
    them, `mean` and `std`.

    Args:
        name: Name of the source.
        class_names: C names.
        shape: Height, width and channels of an image.
        mean, std: Mean and standard deviation per channel, for pixels in [0, 1].
        kind: Whether a label is a class or a map of classes.
        thresholds: Numbers of training samples, or pixels: classes with fewer than the first are few-shot, classes with
            more than the second many-shot.
    """

    name: str
    class_names: tuple[str, ...]
    shape: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    kind: ProblemKind = field(default="classification", kw_only=True)
    thresholds: tuple[int, int] = field(default=(20, 100), kw_only=True)

    @property
    def classes(self) -> int:
        """Return C, the number of classes."""
        return len(self.class_names)


@dataclass(frozen=True, eq=False)
class Task(TaskSpec):
    """The data of an experiment: training samples of each client, test set and class statistics.

    Args:
        client_counts: Training samples, or pixels, per client and class as the client sees it, int64 [K, C].
        groups: "many", "medium" or "few" for each class, by its global training count including validation samples;
            "-" for a background class that replaces erased classes.
        shards: Training samples of each client; a client may have none.
        test: The balanced test set, or the clients' own test samples, one client after the other.
        split: The training samples of the source in the shards and the validation set.
        validation_clients: The client from which each validation sample was taken, int64 [n]; None without a set.
        validation: A set that is as long-tailed as the shards; None unless `data.validation` is set.
        client_names: K names; by default the clients' numbers.
        own_tests: For each client, the rows of `test` that are its own test samples, int64 [n]; None if the data do not
            record them, or the clients are not the recorded ones.
        notes: Remarks on the data for the user, in whole sentences.
        auxiliary: Balanced samples of the server itself; None unless `data.auxiliary` is set.
        new_clients: Ids of the clients that join only after training, ascending.
        image_notes: The part of `notes` that follows from the images, and not from the settings and the split.
    """

    client_counts: np.ndarray
    groups: tuple[str, ...]
    shards: Sequence[Shard]
    test: Shard
    split: Split
    validation: Shard | None = None
    validation_clients: np.ndarray | None = None
    client_names: tuple[str, ...] = ()
    own_tests: Sequence[np.ndarray] | None = None
    notes: tuple[str, ...] = ()
    auxiliary: Shard | None = None
    new_clients: tuple[int, ...] = ()
    image_notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.client_names:
            object.__setattr__(self, "client_names", tuple(map(str, range(self.clients))))

    @property
    def clients(self) -> int:
        """Return K, the number of clients."""
        return len(self.shards)

    @property
    def counts(self) -> np.ndarray:
        """Return the number of training samples, or labelled pixels, of each class over all clients, int64 [C]."""
        return self.client_counts.sum(0)

    @cached_property
    def sizes(self) -> np.ndarray:
        """Return the number of images of each client, int64 [K]."""
        return self.shards.sizes if isinstance(self.shards, PerClient) else np.array(list(map(len, self.shards)))

    @cached_property
    def views(self) -> np.ndarray | None:
        """Return each client's class mapping for evaluation, int64 [K, C]; None if no client's mapping renames classes.

        Entry c of a client is the class that replaces class c.
        """
        if isinstance(self.shards, Holdings) and self.shards.views is None:
            return None
        renamings = [shard.renaming for shard in self.shards]
        if all(renaming is None for renaming in renamings):
            return None
        classes = np.arange(self.classes)
        return np.stack([classes if renaming is None else renaming for renaming in renamings])

    @property
    def spec(self) -> TaskSpec:
        """Return the part of the task that every party may know."""
        return TaskSpec(**{field.name: getattr(self, field.name) for field in fields(TaskSpec)})

    def without_data(self) -> "Task":
        """Return a copy of the task that the server may know: shard sizes and class views, no images or labels."""
        ends = np.cumsum(self.sizes)
        empty = Shard(np.empty((ends[-1], 0, 0, 0), np.uint8), np.empty((ends[-1], 0), np.uint8))
        views = self.shards.views if isinstance(self.shards, Holdings) else [shard.view for shard in self.shards]
        return replace(self, shards=Holdings(empty, ends, views))


def build_task(config: DataConfig, split: Split | None = None, start: Path | None = None) -> Task:
    """Open the configured data set, make it long-tailed and partition it over clients.

    Args:
        config: The settings in `data`.
        split: A split to use instead of the one that the configuration describes.
        start: The base folder of relative paths; by default the working directory.

    Raises:
        ConfigError: The source or the partition is unknown.
        DataError: The data are missing or malformed, or cannot be split as configured.
    """
    check_partition_exists(config.partition)  # fail before a large source is read
    source = _open(config, start)
    if config.doubles == "drop":
        source = without_doubles(source)
    split, deviations = _split_of(source, config, split)
    class_names, groups, thresholds, views = _classes(source, split, config)
    _check_lengths("class", class_names)
    _check_lengths("client", split.client_names or ())
    kept, validation_rows = _hold_out(source, split, config)
    shards = Holdings(_shard(source, kept.flat), kept.ends, views)
    new_clients = split.judged or draw_new_clients(kept, config)
    _check_training(kept, new_clients, config)
    auxiliary = None
    if config.auxiliary:
        reserved = [rows for rows in (validation_rows, *(split.test or ())) if rows is not None]
        auxiliary = _shard(source, auxiliary_rows(source, kept, new_clients, reserved, config))
    test = _test_set(source, split)
    trained_on = take(source.x_train, np.concatenate(split.clients))
    doubles = doubles_note(trained_on, test.x, source.name, config.doubles == "refuse")
    own = own_tests(source, split)
    mean, std = _normalisation(source, split, config)
    _, height, width, channels = source.x_train.shape
    return Task(
        name=source.name,
        kind=source.kind,
        class_names=class_names,
        shape=(height, width, channels),
        mean=mean,
        std=std,
        thresholds=thresholds,
        client_counts=_client_counts(shards, len(class_names)),
        groups=groups,
        shards=shards,
        test=test,
        split=split,
        validation=None if validation_rows is None else _shard(source, validation_rows),
        validation_clients=None if validation_rows is None else _clients_of(validation_rows, split.clients),
        client_names=split.client_names or (),
        own_tests=own,
        notes=(*source.notes, *deviations, *doubles, *notes(source, split, load(test.y), own)),
        auxiliary=auxiliary,
        new_clients=new_clients,
        image_notes=(*source.notes, *doubles),
    )


def _open(config: DataConfig, start: Path | None) -> Source:
    """Open the source, with relative paths from `start`. The source keeps its configured name."""
    located = located_data(config, start)
    source = open_source(located)
    return replace(source, name=config.source) if source.name == located.source else source


def _check_lengths(owner: str, names: Sequence[str]) -> None:
    """Raise an error if a class or client name is too long for tables, plots and model cards.

    Args:
        owner: "class" or "client".
        names: The names.
    """
    longest = max(names, key=len, default="")
    if len(longest) > MAX_NAME:
        raise DataError(
            f"data.source: a {owner} has a name of {len(longest):,} characters ({longest[:40]!a}...). Give names of at "
            f"most {MAX_NAME} characters.",
            code="data.bad-name",
            key="data.source",
            value=len(longest),
        )


def _split_of(source: Source, config: DataConfig, split: Split | None) -> tuple[Split, list[str]]:
    """Return the split of a task (given, read from a file, or drawn), and notices if it contradicts `config`."""
    if split is not None:
        check(split, source, config, "the split of this run")
        return split, []
    if config.split is not None:
        split = open_split(Path(config.split).expanduser(), source, config)
        check(split, source, config, config.split)
        return split, overridden(split, config)
    return draw(source, config), []


def _classes(
    source: Source, split: Split, config: DataConfig
) -> tuple[tuple[str, ...], tuple[str, ...], tuple[int, int], list[np.ndarray] | None]:
    """Return the names and groups of classes, the groups' thresholds, and the clients' views of the classes.

    The views are None if all clients see the classes themselves.
    """
    names = source.class_names
    counts = class_counts(take(source.y_train, np.concatenate(split.clients)), len(names))
    if source.kind == "segmentation":
        thresholds = group_thresholds(config, 0, int(counts.sum()))
    else:
        y = load(source.y_train)
        training = y if split.test is None else np.delete(y, np.concatenate(split.test))
        thresholds = group_thresholds(config, int(class_counts(training, len(names)).max()))
    groups = tuple(shot_groups(counts, *thresholds))
    if split.beta is None:
        return names, groups, thresholds, None
    views = class_views(len(split.clients), len(names), split.beta, config.erased)
    if config.erased == "background":
        names = (*names, BACKGROUND)
        groups = (*groups, "-")
    return names, groups, thresholds, list(views)


def _hold_out(source: Source, split: Split, config: DataConfig) -> tuple[IndexLists, np.ndarray | None]:
    """Return the clients' training rows, and the rows of the validation set (None without a validation set)."""
    if config.validation:
        return hold_out_validation(split.clients, source.strata, config.validation, config.seed)
    clients = split.clients
    return clients if isinstance(clients, IndexLists) else IndexLists.of(clients), None


def _check_training(kept: IndexLists, new_clients: Sequence[int], config: DataConfig) -> None:
    """Raise an error if no client that trains has a sample."""
    if np.delete(kept.sizes, new_clients).any():
        return
    key = "data.partition" if config.split is None else "data.split"
    raise DataError(
        f"{key}: no client that trains has a training image ({len(kept) - len(new_clients)} clients). Give such a "
        "client images.",
        code="data.too-few",
        key=key,
        value=len(kept) - len(new_clients),
    )


def _clients_of(rows: np.ndarray, clients: Sequence[np.ndarray]) -> np.ndarray:
    """Return the client that holds each given row of the training set, int64 [n]."""
    owners = np.repeat(np.arange(len(clients)), [len(part) for part in clients])
    every = np.concatenate(list(clients))
    order = np.argsort(every)
    return owners[order[np.searchsorted(every, rows, sorter=order)]]


def _shard(source: Source, rows: np.ndarray) -> Shard:
    return Shard(take(source.x_train, rows), take(source.y_train, rows), rows)


def _test_set(source: Source, split: Split) -> Shard:
    if split.test is None:
        return Shard(source.x_test, source.y_test)
    return replace(_shard(source, np.concatenate(split.test)), ids=None)


def _normalisation(source: Source, split: Split, config: DataConfig) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation per channel, computed without test samples that were split off."""
    if not config.normalise:
        channels = source.x_train.shape[3]
        return (0.0,) * channels, (1.0,) * channels
    if split.test is not None:
        return channel_statistics(take(source.x_train, np.sort(np.concatenate(split.clients))))
    return source.mean, source.std


def _client_counts(shards: Holdings, classes: int) -> np.ndarray:
    """Count the training samples, or labelled pixels, of each client and class, int64 [K, C].

    The class mapping of each client is applied first.
    """
    y = shards.whole.y
    if len(y.shape) > 1 or shards.views is not None:
        return np.stack([class_counts(shard.labels(), classes) for shard in shards])
    owners = np.repeat(np.arange(len(shards)), shards.sizes)
    return np.bincount(owners * classes + load(y), minlength=len(shards) * classes).reshape(-1, classes)


Count = Annotated[int, Field(ge=0)]


@closed
class JudgedImages(TypedDict):
    """Counts of the test images on which a run is evaluated, and the thresholds that define the class groups.

    `groups` has the test images, or labelled pixels, of the many-, medium- and few-shot classes. `own` has each
    client's own test images, by id, and 0 for a client that joins after training; None if the data do not record them.
    `one_class` names the clients whose metrics are meaningless, because all images on which they are evaluated belong
    to one class.
    """

    images: Count
    groups: dict[str, Count]
    thresholds: Annotated[list[Count], Field(min_length=2, max_length=2)]
    own: list[Count] | None
    one_class: list[str]


def judged_images_of(task: Task) -> JudgedImages:
    """Count the test images of a task by class group and by client."""
    labels = load(task.test.y)
    tested = class_counts(labels, task.classes)
    own = None
    if task.own_tests is not None:
        own = [0 if id in task.new_clients else len(rows) for id, rows in enumerate(task.own_tests)]
    alone = []
    if task.kind == "classification":
        classes = (task.client_counts > 0).sum(1)
        if task.own_tests is not None:
            owners = np.repeat(np.arange(task.clients), [len(rows) for rows in task.own_tests])
            rows = np.concatenate(list(task.own_tests))
            pairs = np.unique(owners * task.classes + labels[rows])
            tested_classes = np.bincount(pairs // task.classes, minlength=task.clients)
            classes = np.where(tested_classes > 0, tested_classes, classes)
        alone = [task.client_names[id] for id in np.flatnonzero(classes == 1)]
    return JudgedImages(
        images=len(task.test),
        groups={
            group: int(sum(n for n, of in zip(tested, task.groups, strict=True) if of == group)) for group in GROUPS
        },
        thresholds=list(task.thresholds),
        own=own,
        one_class=alone,
    )


@closed
class TaskOutline(TypedDict):
    """Description of a task without images and labels, sufficient to open a run's models without the data.

    The fields are those of `Task`; `sizes` holds the images of each client, `newcomers` the new clients.
    """

    name: str
    kind: Literal["classification", "segmentation"]
    class_names: list[str]
    shape: Annotated[list[Count], Field(min_length=3, max_length=3)]
    mean: list[float]
    std: list[float]
    client_names: list[str]
    client_counts: list[list[Count]]
    sizes: list[Count]
    newcomers: list[Count]


OUTLINES = TypeAdapter(TaskOutline)


def outline_of(task: Task) -> TaskOutline:
    """Return the description of a task that a run folder stores."""
    return TaskOutline(
        name=task.name,
        kind=task.kind,
        class_names=list(task.class_names),
        shape=list(task.shape),
        mean=list(task.mean),
        std=list(task.std),
        client_names=list(task.client_names),
        client_counts=task.client_counts.tolist(),
        sizes=task.sizes.tolist(),
        newcomers=list(task.new_clients),
    )


def task_from(outline: TaskOutline, split: Split) -> Task:
    """Make a task from an outline and a split, with label counts but without images.

    Functions that read images fail with it. A client's model that depends only on its state and its class counts is the
    same as with the data.
    """
    height, width, channels = outline["shape"]
    counts = np.array(outline["client_counts"], dtype=np.int64)
    shards = tuple(
        _shard_without_pixels(outline["kind"], size, client_counts)
        for size, client_counts in zip(outline["sizes"], counts, strict=True)
    )
    return Task(
        name=outline["name"],
        kind=outline["kind"],
        class_names=tuple(outline["class_names"]),
        shape=(height, width, channels),
        mean=tuple(outline["mean"]),
        std=tuple(outline["std"]),
        client_counts=counts,
        groups=(),
        shards=shards,
        test=Shard(np.empty((0, 0, 0, 0), np.uint8), np.empty(0, np.int64)),
        split=split,
        client_names=tuple(outline["client_names"]),
        new_clients=tuple(outline["newcomers"]),
    )


def _shard_without_pixels(kind: str, size: int, counts: np.ndarray) -> Shard:
    labels = np.repeat(np.arange(len(counts)), counts)
    if kind == "segmentation":  # these maps have as many pixels of each class as the client's maps
        pixels = np.full(size * -(-len(labels) // max(size, 1)), VOID, np.uint8)
        pixels[: len(labels)] = labels
        labels = pixels.reshape(size, -1, 1) if size else np.empty((0, 0, 0), np.uint8)
    return Shard(np.empty((size, 0, 0, 0), np.uint8), labels)
