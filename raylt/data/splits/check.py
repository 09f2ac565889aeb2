"""Checks that a split fits its source, and completes a configuration with the settings of the split."""

from typing import Any

import numpy as np

from raylt.config import DRAWN, DataConfig
from raylt.data.sources.arrays import Source
from raylt.data.splits.split import IndexLists, Split, grouped, hash_labels
from raylt.errors import DataError


def check(split: Split, source: Source, config: DataConfig, name: str) -> None:
    """Raise an error if a split does not fit a source.

    Args:
        split: The split.
        source: The data set.
        config: The settings in `data`.
        name: Name of the split in error messages.

    Raises:
        DataError: The split belongs to other data or other clients, or lists wrong rows.
    """
    fault = _fault(split, source, config)
    if fault is not None:
        raise DataError(f"{name}: {fault}", code="data.split-mismatch", split=name, source=config.source)


def _fault(split: Split, source: Source, config: DataConfig) -> str | None:
    """Return the reason why a split does not fit a source, with a remedy; None if the split fits."""
    if split.labels_sha256 != hash_labels(source.y_train):
        return (
            f"the split was drawn from {split.source}, which has other training labels than data.source = "
            f"{config.source}. Use the source that it was drawn from."
        )
    if config.clients is not None and len(split.clients) != config.clients:
        count = len(split.clients)
        return f"the split has {count} clients, data.clients = {config.clients}. Set data.clients={count}."
    if (split.test is not None) != (not len(source.y_test)):
        before = "no" if split.test is not None else "a"
        now = "a" if split.test is not None else "no"
        return f"{source.name} had {before} test part when the split was drawn and has {now} test part now. {_AGAIN}"
    rows = np.concatenate([np.empty(0, np.int64), *split.clients, *(split.test or ())])
    if not len(rows):
        return f"the split lists no sample; it must list at least one. {_AGAIN}"
    if rows.min() < 0 or rows.max() >= len(source.y_train):
        return f"indices must be from 0 to {len(source.y_train) - 1} ({rows.min()} to {rows.max()}). {_AGAIN}"
    if len(np.unique(rows)) != len(rows):
        return f"the split lists a sample more than once. {_AGAIN}"
    if split.client_names is not None and len(split.client_names) != len(split.clients):
        return f"it has {len(split.client_names)} client names for {len(split.clients)} clients. {_AGAIN}"
    if split.test is not None and _has_own_tests(split) and len(split.test) != len(split.clients):
        return f"it has {len(split.test)} lists of test samples for {len(split.clients)} clients. {_AGAIN}"
    if split.judged is not None and max(split.judged) >= len(split.clients):
        return f"judged names a client that the split does not have ({max(split.judged)}). {_AGAIN}"
    if split.judged is not None and config.new_clients not in (0, len(split.judged)):
        return (
            f"{len(split.judged)} clients are only judged, data.new_clients = {config.new_clients}. Leave "
            "data.new_clients out."
        )
    if (split.partition == "classes") != (split.beta is not None):
        return f"beta is only for partition classes (partition {split.partition}, beta {split.beta}). {_AGAIN}"
    if split.beta is not None and (source.kind != "segmentation" or split.beta > len(source.class_names)):
        return (
            f"beta needs label maps with at least as many classes ({split.beta}), and {source.name} is a problem of "
            f"{source.kind} with {len(source.class_names)} classes. {_AGAIN}"
        )
    return None


_AGAIN = "Draw the split again."


def _has_own_tests(split: Split) -> bool:
    """Return whether the lists in `split.test`, if there are any, belong to the clients."""
    return split.partition in ("by_id", "imported") and not split.test_pooled


def own_tests(source: Source, split: Split) -> IndexLists | None:
    """Return the rows of each client's own test images; None if the data do not record them."""
    if not _has_own_tests(split):
        return None
    if split.test is not None:
        ends = np.cumsum([len(rows) for rows in split.test])
        return IndexLists(np.arange(ends[-1]), ends)
    if source.test_ids is None or source.ids is None or split.partition == "imported":
        return None
    return grouped(source.test_ids, np.unique(source.ids))


def complete(config: DataConfig, split: Split) -> DataConfig:
    """Return the configuration with the settings that the split determines, for the record of a run.

    For a split from a file, these are all settings with which it was drawn; they replace those of the configuration.
    """
    decided = {
        "clients": len(split.clients),
        "imbalance": split.imbalance,
        "partition": split.partition,
        _share_key(split): split.test_share,
    }
    filled = {key: value for key, value in decided.items() if getattr(config, key) is None}
    return config.model_copy(update=filled | ({} if config.split is None else _drawn_with(split)))


def overridden(split: Split, config: DataConfig) -> list[str]:
    """Return notices about settings of the configuration that a split from a file overrides; empty if none do."""
    notices = []
    drawn = {} if split.partition == "imported" else _drawn_with(split)
    differences = []
    for key, value in drawn.items():
        configured = getattr(config, key)
        if configured not in (None, value):
            differences.append(f"data.{key} = {value} (not {configured})")
    if differences:
        notices.append(f"{config.split} was drawn with {', '.join(differences)}, and is recorded so")
    unused = [f"data.{key} = {getattr(config, key)}" for key in _unused(split, config)]
    if unused:
        have = "has" if len(unused) == 1 else "have"
        notices.append(f"{', '.join(unused)} {have} no effect, since {config.split} lists the samples of each client")
    return notices


def _unused(split: Split, config: DataConfig) -> list[str]:
    """Return the settings that differ from their defaults, but that nothing uses with a split from a file."""
    keys = ["min_size", "test", "test_share"]
    if split.test_share is not None and split.partition != "imported":  # otherwise raylt drew no test samples
        keys.remove(_share_key(split))
    if split.partition == "imported":  # raylt did not draw it
        keys += DRAWN
    usual = DataConfig(source=config.source, split=config.split)
    recorded = {"imbalance": split.imbalance, "partition": split.partition}
    return [key for key in keys if getattr(config, key) not in (None, getattr(usual, key), recorded.get(key))]


def _drawn_with(split: Split) -> dict[str, Any]:
    """Return the settings by which a split's samples were drawn, without the seed, which also affects other draws."""
    drawn = {key: getattr(split, key) for key in DRAWN if getattr(split, key) is not None}
    tested = {} if split.test_share is None else {_share_key(split): split.test_share}
    judged = {} if split.judged is None else {"new_clients": len(split.judged)}
    return drawn | tested | judged | {"tail": split.tail or "global"}


def _share_key(split: Split) -> str:
    """Return the setting under `data` that is the share of the test samples."""
    return "test_share" if split.test_pooled else "test"
