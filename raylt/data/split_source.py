"""A split and the source that it is used with: whether it can be drawn from it, and whose test samples are whose."""

from typing import Any

import numpy as np

from raylt.config import DRAWN, DataConfig
from raylt.data.index_lists import IndexLists, grouped
from raylt.data.source import Source
from raylt.data.split import Split, hash_labels
from raylt.errors import DataError


def check(split: Split, source: Source, config: DataConfig, name: str) -> None:
    """Raises a DataError where a split cannot be one of these data.

    Args:
        name: of the split, in errors.
    """
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


def own_tests(source: Source, split: Split) -> IndexLists | None:
    """Of each client, the rows of the test set that are its own test samples; None where nobody recorded that."""
    if split.partition != "by_id":
        return None
    if split.test is not None:
        ends = np.cumsum([len(rows) for rows in split.test])
        return IndexLists(np.arange(ends[-1]), ends)
    if source.test_ids is None or source.ids is None:
        return None
    return grouped(source.test_ids, np.unique(source.ids))


def complete(config: DataConfig, split: Split) -> DataConfig:
    """The configuration with what the data decided, for the record.

    Of a split that was read from a file that is all that it was drawn with, whatever the configuration says.
    """
    known = {"clients": len(split.clients), "imbalance": split.imbalance, "partition": split.partition,
             "test": split.test_share}
    told = {key: value for key, value in known.items() if getattr(config, key) is None}
    return config.model_copy(update=told | ({} if config.split is None else _drawn_with(split)))


def drawn_otherwise(split: Split, config: DataConfig) -> list[str]:
    """Says of a split that was read from a file what it was drawn with that the configuration has otherwise."""
    others = [f"data.{key} = {value} (not {here})" for key, value in _drawn_with(split).items()
              if (here := getattr(config, key)) not in (None, value)]
    return [f"{config.split} was drawn with {', '.join(others)}, and is recorded so"] if others else []


def _drawn_with(split: Split) -> dict[str, Any]:
    """Settings of the data section that decided who holds what, as far as they did; its seed decides more than that."""
    drawn = {key: getattr(split, key) for key in DRAWN if getattr(split, key) is not None}
    return drawn | {"tail": split.tail or "global"}
