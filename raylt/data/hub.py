"""Data sets of the `datasets` library (`data.source=hf:NAME@REVISION`, or `hf:PATH` of one that was saved): the extra
raylt[hf]. A loader script is never run."""

import importlib
import os
from pathlib import Path
from typing import Any

from raylt.config import DataConfig
from raylt.data.assembly import Known, assemble
from raylt.data.packing import place_of
from raylt.data.source import Source
from raylt.data.trees import FORMAT, How, decode_all
from raylt.errors import ConfigError, DataError


def open_hub(config: DataConfig) -> Source:
    """The data set that `config.source` names, with the columns that it names.

    Raises:
        ConfigError: the library is not installed, no revision, or no such column.
        DataError: the data set is not there, or has no part called train.
    """
    parts = _load(config)
    name = config.source
    if "train" not in parts:
        raise DataError(f"data.source = {name}: has the parts {', '.join(parts)}; one called train is expected")
    chosen = [parts[part] for part in ("train", "test") if part in parts]
    image, label = _columns(config, chosen[0].features)
    for column in (image, label, config.client_column):
        if any(column is not None and column not in part.features for part in chosen):
            raise ConfigError(f"data.source = {name}: has no column {column!r}; there are "
                              f"{', '.join(chosen[0].features)}")
    how = How(config.size, config.channels, config.fit, config.bad)
    key = [FORMAT, name, how.size, how.channels, how.fit, image, [_stamp(part) for part in chosen]]
    path = place_of("hf", key, Path(config.root).expanduser() / "cache") / "images.npy"
    packed = [part.select_columns([image]).with_format(None) for part in chosen]

    def content(row: int) -> bytes | str:
        part, place = (packed[0], row) if row < len(packed[0]) else (packed[1], row - len(packed[0]))
        return _content(part[place][image])

    count = sum(map(len, chosen))
    x, rows, damaged = decode_all(path, count, content, how, {"of": name, "images": count, "size": how.size})
    names = getattr(chosen[0].features[label], "names", None)
    classes = [class_of(c, names, name) for part in chosen for c in part[label]]
    clients = None if config.client_column is None else [str(k) for part in chosen for k in part[config.client_column]]
    known = Known(classes, clients, len(chosen[0]), len(chosen) > 1, names)
    return assemble(name, x, rows, known, damaged)


def class_of(label: Any, names: list[str] | None, source: str) -> str:
    """The name of a label; the library writes -1 where there is none, as of a hidden test part."""
    if label is None or (names and not 0 <= label < len(names)):
        raise DataError(f"data.source = {source}: an image has the label {label}, which is none of its "
                        f"{len(names or ())} classes; leave out images without a label, or a part that has none")
    return names[label] if names else str(label)


def _load(config: DataConfig) -> dict[str, Any]:
    """Parts of the data set by name, with images as they were written."""
    place = config.source.partition(":")[2]
    path = Path(place).expanduser()
    if not config.download:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")        # read when the library is imported
    try:
        datasets: Any = importlib.import_module("datasets")
    except ImportError:
        raise ConfigError(f"data.source = {config.source}: needs the datasets library; pip install raylt[hf]"
                          ) from None
    name, at, revision = place.rpartition("@")
    if not path.is_dir() and not (at and name and revision):
        raise ConfigError(f"data.source = {config.source}: is no folder, and as a name it lacks a revision, without "
                          "which a run cannot be repeated; write hf:NAME@REVISION")
    try:
        found = datasets.load_from_disk(str(path)) if path.is_dir() else datasets.load_dataset(name, revision=revision)
    except Exception as error:                              # the library raises whatever it trips over
        remedy = "" if config.download or path.is_dir() else "; data.download=true fetches it"
        raise DataError(f"data.source = {config.source}: cannot be loaded ({' '.join(str(error).split())}){remedy}"
                        ) from None
    parts = dict(found) if isinstance(found, datasets.DatasetDict) else {"train": found}
    return {part: _undecoded(data, datasets.Image) for part, data in parts.items()}


def _undecoded(data: Any, image: Any) -> Any:
    for column, feature in data.features.items():
        if isinstance(feature, image):
            data = data.cast_column(column, image(decode=False))
    return data


def _columns(config: DataConfig, features: Any) -> tuple[str, str]:
    kinds = {column: type(feature).__name__ for column, feature in features.items()}
    chosen = []
    for given, kind, setting in ((config.image_column, "Image", "image_column"),
                                 (config.label_column, "ClassLabel", "label_column")):
        matching = [column for column, of in kinds.items() if of == kind]
        if given is None and len(matching) != 1:
            raise ConfigError(f"data.source = {config.source}: {len(matching)} columns are of kind {kind}; set "
                              f"data.{setting} to one of {', '.join(kinds)}")
        chosen.append(given or matching[0])
    return chosen[0], chosen[1]


def _stamp(data: Any) -> list[Any]:
    """What changes where a data set does."""
    stats = [os.stat(file["filename"]) for file in data.cache_files]
    return [len(data), data._fingerprint, [(stat.st_size, stat.st_mtime_ns) for stat in stats]]


def _content(value: Any) -> bytes | str:
    if isinstance(value, dict) and value.get("bytes"):
        return value["bytes"]
    if isinstance(value, dict) and value.get("path"):
        return value["path"]
    raise DataError(f"an image in a pack: is {type(value).__name__} without bytes or a path; replace or remove it")
