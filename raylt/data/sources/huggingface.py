"""Data sets of the Hugging Face library `datasets` (`data.source=hf:NAME@REVISION`).

`hf:PATH` is a data set on disk. The module needs the extra `hf`. Loader scripts are never executed.
"""

import importlib
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from raylt.config import DataConfig
from raylt.data.images.cache_builder import place_of
from raylt.data.images.decoding import Undecodable
from raylt.data.images.image_trees import FORMAT, How, decode_all
from raylt.data.sources.arrays import Source
from raylt.data.sources.checks import SCOPE
from raylt.data.sources.labels import CodedLabels, NameCodes, assemble_coded
from raylt.errors import ConfigError, DataError, first_names

VALIDATION = ("validation", "valid", "val", "dev")  # names of the part that replaces a missing part test


def open_hub(config: DataConfig) -> Source:
    """Open the Hugging Face data set that `config.source` names.

    The test set is `data.test_part`. By default it is the part test, or one of VALIDATION if there is no part test or
    its images have no labels.

    Raises:
        ConfigError: The library is not installed, the revision is missing, or a column is unknown.
        DataError: The data set does not exist, or has no part called train.
    """
    parts = _load(config)
    name = config.source
    if "train" not in parts:
        raise DataError(
            f"data.source: {name} has the parts {', '.join(parts)}. Use a data set with a part called train.",
            code="data.malformed",
            key="data.source",
            value=name,
        )
    image, label = _columns(config, parts["train"].features)
    test = _test_part(config, parts, label)
    chosen = [parts[part] for part in ("train", test) if part is not None]
    for column in (image, label, config.client_column):
        if any(column is not None and column not in part.features for part in chosen):
            raise ConfigError(
                f"data.source: {name} has no column {column!r}. Use one of {', '.join(chosen[0].features)}.",
                code="config.unknown-name",
                key="data.source",
                value=name,
                column=column,
            )
    x, rows, damaged = _decode(config, chosen, image)
    names = getattr(chosen[0].features[label], "names", None)
    class_names, classes = class_codes((value for part in chosen for value in part[label]), names, name)
    client_names = clients = None
    if config.client_column is not None:
        values = (value for part in chosen for value in part[config.client_column])
        client_names, clients = name_codes("data.client_column", name, values)
    labels = CodedLabels(classes, class_names, clients, client_names, len(chosen[0]), len(chosen) > 1)
    return assemble_coded(name, x, rows, labels, (*_notes_on(config, parts, test), *damaged))


def _test_part(config: DataConfig, parts: dict[str, Any], label: str) -> str | None:
    """Return the name of the part that serves as the test set; None if there is none."""
    named = config.test_part
    if named is not None:
        if named not in parts or named == "train":
            raise ConfigError(
                f"data.test_part: {config.source} has no part of test images with this name ({named}). Use one of "
                f"{', '.join(part for part in parts if part != 'train') or 'none'}.",
                code="config.unknown-name",
                key="data.test_part",
                value=named,
            )
        return named
    validation = next((part for part in VALIDATION if part in parts), None)
    if "test" not in parts:
        return validation
    return "test" if validation is None or _is_labelled(parts["test"], label) else validation


def _is_labelled(part: Any, label: str) -> bool:
    """Return whether any image of a part has a label. The library represents hidden labels by -1."""
    return label in part.features and any(value not in (None, -1) for value in part[label])


def _notes_on(config: DataConfig, parts: dict[str, Any], test: str | None) -> tuple[str, ...]:
    """Return a notice on parts that are not read, and on a test set that raylt, not the user, chose by another name."""
    notes = []
    if config.test_part is None and test not in (None, "test"):
        why = "whose part test has no labels" if "test" in parts else "which has no part test"
        notes.append(f"the test set is the part {test} of {config.source}, {why}")
    read = [part for part in ("train", test) if part is not None]
    if unread := [part for part in parts if part not in read]:
        notes.append(
            f"{config.source}: only {' and '.join(read)} {'are' if test else 'is'} read, not {first_names(unread, 5)}; "
            "data.test_part names another part of test images"
        )
    return tuple(notes)


def class_codes(labels: Iterable[Any], names: list[str] | None, source: str) -> tuple[list[str], np.ndarray]:
    """Return the names of all classes in their order, and the number of each label's class, int64 [N].

    Args:
        labels: Numbers of the classes in `names`, or names of classes.
        names: Names that the data set gives to the numbers; None if it has none.
        source: `data.source`.

    Raises:
        DataError: A label is missing or is not a class.
    """
    labels = list(labels)
    if names:
        return list(names), np.array([class_of(label, names, source) for label in labels], np.int64)
    for label in labels:
        _check_label(label, source)
    return name_codes("data.label_column", source, labels)


def name_codes(key: str, source: str, values: Iterable[Any]) -> tuple[list[str], np.ndarray]:
    """Return the distinct names of a column, sorted, and the position of each row's name among them, int64 [N].

    Whole numbers are sorted by value, other names alphabetically.

    Args:
        key: The setting that names the column.
        source: `data.source`.
        values: The values of the column.

    Raises:
        DataError: A value is missing, is neither an integer nor a string, or cannot be printed.
    """
    # True and False become names
    plain = [str(value) if isinstance(value, bool) else value for value in values]
    codes = NameCodes(key, source)
    codes.add(np.fromiter(plain, dtype=object, count=len(plain)))
    names, numbers = codes.sorted(not any(isinstance(value, str) for value in plain))
    return names, numbers.astype(np.int64)


def _check_label(label: Any, source: str) -> None:
    """Raise an error if a label belongs to a problem that raylt does not support."""
    if isinstance(label, list | tuple | dict | float):
        raise DataError(
            f"data.label_column: {source} has labels that are not classes ({label!r}). {SCOPE}: name a column with one "
            "class for each image.",
            code="data.malformed",
            key="data.label_column",
            value=source,
        )


def class_of(label: Any, names: list[str], source: str) -> int:
    """Return the number of a label's class in `names`.

    Raises:
        DataError: The label is not a class, or is missing, which the library represents by -1, as in hidden test parts.
    """
    _check_label(label, source)
    if label is None or not 0 <= label < len(names):
        raise DataError(
            f"data.source: {source} has an image whose label is not one of its {len(names)} classes ({label}). "
            "Leave out images without a label, or a part that has no labels.",
            code="data.malformed",
            key="data.source",
            value=source,
            label=label,
        )
    return label


def _decode(config: DataConfig, parts: list[Any], image: str) -> Any:
    """Decode the images of all parts, one part after the other; return the result of `decode_all`."""
    name = config.source
    how = How(config.size, config.channels, config.fit, config.bad, config.depth)
    key = [FORMAT, name, how.size, how.channels, how.fit, how.depth, image, [_stamp(part) for part in parts]]
    path = place_of("hf", key, Path(config.root).expanduser() / "cache") / "images.npy"
    columns = [part.select_columns([image]).with_format(None) for part in parts]

    def content(row: int) -> bytes | str:
        index = row
        for column in columns:
            if index < len(column):
                return _content(row, column[index][image])
            index -= len(column)
        raise IndexError(row)

    count = sum(map(len, parts))
    return decode_all(path, count, content, how, {"of": name, "images": count, "size": how.size})


def _load(config: DataConfig) -> dict[str, Any]:
    """Return the parts of the data set by name, with images in their original encoding."""
    address = config.source.partition(":")[2]
    path = Path(address).expanduser()
    saved = path.is_dir()
    try:
        datasets: Any = importlib.import_module("datasets")
    except ImportError:
        raise ConfigError(
            f"data.source: {config.source} needs the datasets library. Run pip install '.[hf]' in the clone.",
            code="config.missing-package",
            key="data.source",
            value=config.source,
            package="datasets",
        ) from None
    name, at, revision = address.rpartition("@")
    if not saved and not (at and name and revision):
        raise ConfigError(
            f"data.source: {config.source} is not a folder, and a name needs a revision, without which a run cannot be "
            "repeated. Write hf:NAME@REVISION.",
            code="config.wrong-type",
            key="data.source",
            value=config.source,
        )
    try:
        with _network(config.download):
            data = datasets.load_from_disk(str(path)) if saved else datasets.load_dataset(name, revision=revision)
    except Exception as error:  # the library raises errors of many types
        remedy = "Give a folder that datasets has saved." if saved else "Check the name and the revision."
        if not saved and not config.download:
            remedy = "Set data.download=true to fetch it."
        raise DataError(
            f"data.source: {config.source} cannot be loaded ({' '.join(str(error).split())}). {remedy}",
            code="data.not-found",
            key="data.source",
            value=config.source,
        ) from None
    parts = dict(data) if isinstance(data, datasets.DatasetDict) else {"train": data}
    return {part: _undecoded(data, datasets.Image) for part, data in parts.items()}


@contextmanager
def _network(allowed: bool) -> Iterator[None]:
    """Prevent the library from using the network inside the block, unless that is allowed.

    The library reads HF_HUB_OFFLINE only when it is imported, and checks these two constants at each request. It
    ignores `local_files_only` of its DownloadConfig.
    """
    modules: list[Any] = [importlib.import_module(name) for name in ("datasets.config", "huggingface_hub.constants")]
    earlier = [module.HF_HUB_OFFLINE for module in modules]
    try:
        for module, offline in zip(modules, earlier, strict=True):
            module.HF_HUB_OFFLINE = offline or not allowed
        yield
    finally:
        for module, offline in zip(modules, earlier, strict=True):
            module.HF_HUB_OFFLINE = offline


def _undecoded(data: Any, image: Any) -> Any:
    for column, feature in data.features.items():
        if isinstance(feature, image):
            data = data.cast_column(column, image(decode=False))
    return data


def _columns(config: DataConfig, features: Any) -> tuple[str, str]:
    """Return the names of the image column and the label column."""
    image = config.image_column or _only_column(config, features, "Image", "data.image_column")
    label = config.label_column or _only_column(config, features, "ClassLabel", "data.label_column")
    return image, label


def _only_column(config: DataConfig, features: Any, kind: str, key: str) -> str:
    matching = [column for column, feature in features.items() if type(feature).__name__ == kind]
    if not matching and kind == "Image":  # image files as bytes, as in parquet files of other tools
        matching = [column for column, feature in features.items() if _holds_bytes(feature)]
    scope = f" {SCOPE}." if not matching and kind == "Image" else ""
    if len(matching) != 1:
        raise ConfigError(
            f"{key}: {len(matching)} columns of {config.source} are of kind {kind}.{scope} Set {key} to one of "
            f"{', '.join(features)}.",
            code="config.unknown-name",
            key=key,
            value=None,
            source=config.source,
        )
    return matching[0]


def _holds_bytes(feature: Any) -> bool:
    """Return whether a column holds the bytes of files, with or without their paths."""
    feature = feature.get("bytes") if isinstance(feature, dict) else feature
    return getattr(feature, "dtype", None) in ("binary", "large_binary")


def _stamp(data: Any) -> list[Any]:
    """Return values that change whenever the data set changes."""
    stats = [os.stat(file["filename"]) for file in data.cache_files]
    return [len(data), data._fingerprint, [(stat.st_size, stat.st_mtime_ns) for stat in stats]]


def _content(row: int, value: Any) -> bytes | str:
    if isinstance(value, bytes) and value:
        return value
    if isinstance(value, dict) and value.get("bytes"):
        return value["bytes"]
    if isinstance(value, dict) and value.get("path"):
        return value["path"]
    raise Undecodable(f"row {row}", f"is {type(value).__name__} without bytes or a path")
