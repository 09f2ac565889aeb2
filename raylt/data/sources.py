"""Data sets as they are on disk: training and balanced test images, labels, class names, normalisation.

`digits` comes with scikit-learn; `cifar10`, `cifar100` and `fashion_mnist` are read by torchvision; `cinic10`,
`imagenet_lt` and `folder:PATH` are trees of image files; `npz:PATH` is one file of arrays, see arrays.py. Those with
label maps are in scenes.py.
"""

import difflib
from collections.abc import Callable
from pathlib import Path

import numpy as np

from raylt.config import DataConfig
from raylt.data.arrays import Arrays, arrays
from raylt.data.folders import open_parts, read_parts
from raylt.data.hub import open_hub
from raylt.data.scenes import camvid, cityscapes, shapes
from raylt.data.source import PUBLISHED, Kind, Source, channel_statistics
from raylt.data.trees import How, decode_tree
from raylt.errors import ConfigError, DataError
from raylt.seeds import seed_for

__all__ = ["NAMES", "SOURCES", "Kind", "Source", "channel_statistics", "group_thresholds", "open_source"]

TORCHVISION = {"cifar10": "CIFAR10", "cifar100": "CIFAR100", "fashion_mnist": "FashionMNIST"}
NAMES = ("digits", *TORCHVISION, "cinic10", "imagenet_lt", "shapes", "camvid", "cityscapes", "folder", "npz", "hf")
GROUPS = {"cifar10": (200, 1000), "fashion_mnist": (200, 1000), "cinic10": (200, 1000), "digits": (20, 60)}

SOURCES: dict[str, Callable[[DataConfig], Source]] = {}        # of one's own, by name: see raylt/registry.py


def open_source(config: DataConfig) -> Source:
    """The data set named by `config.source`.

    Raises:
        ConfigError: no such source.
        DataError: its files are missing or malformed.
    """
    if config.source in SOURCES:
        return SOURCES[config.source](config)
    kind, colon, place = config.source.partition(":")
    root, path = Path(config.root).expanduser(), Path(place).expanduser()
    match kind, bool(place):
        case "digits", False:
            return _digits()
        case "cifar10" | "cifar100" | "fashion_mnist", False:
            return _torchvision(kind, root, config.download)
        case "cinic10", False:
            return _cinic10(root / "cinic10", config, root / "cache")
        case "imagenet_lt", False:
            return _imagenet_lt(root / "imagenet_lt", config)
        case "shapes", False:
            return _source("shapes", shapes())
        case "camvid", False:
            return _source("camvid", camvid(root, config.size))
        case "cityscapes", False:
            return _source("cityscapes", cityscapes(root, config.size))
        case "folder", True:
            how = How(config.size, config.channels, config.fit, config.bad)
            return open_parts(config.source, read_parts(path), how, root / "cache")
        case "npz", True:
            return _source(config.source, arrays(path))
        case "hf", True:
            return open_hub(config)
    if kind in ("folder", "npz", "hf"):
        raise ConfigError(f"data.source = {config.source!r} names no path; write {kind}:PATH")
    if colon and kind in NAMES:
        raise ConfigError(f"data.source = {config.source!r}: {kind} takes no path, it lies under data.root")
    nearest = difflib.get_close_matches(kind, NAMES, 1)
    hint = f"did you mean {nearest[0]}? " if nearest else ""
    raise ConfigError(f"data.source = {config.source!r}: no such source; {hint}There are: {', '.join(NAMES[:-3])}, "
                      "folder:PATH, npz:PATH, hf:NAME@REVISION; one's own comes by --plugin FILE.")


def group_thresholds(config: DataConfig, pixels: int | None = None) -> tuple[int, int]:
    """(low, high) for `group_of`: what is configured, or the literature's for the source.

    Args:
        pixels: labelled ones, where labels are maps: then 1 % and 5 % of them, which are ours.
    """
    usual = GROUPS.get(config.source, (20, 100)) if pixels is None else (pixels // 100, pixels // 20)
    low, high = config.groups or usual
    if not 0 <= low <= high:
        raise ConfigError(f"data.groups = [{low}, {high}]: few < first and many > second overlap; order them")
    return low, high


def _digits() -> Source:
    from sklearn.datasets import load_digits

    pixels, y = load_digits(return_X_y=True)
    x = (pixels.reshape(-1, 8, 8, 1) * 15).astype(np.uint8)        # 0..16 becomes 0..240
    y = np.asarray(y, dtype=np.int64)
    rng = np.random.default_rng(seed_for(0, "digits test set"))    # not data.seed: all runs share one test set
    test = np.sort(np.concatenate([rng.choice(np.flatnonzero(y == c), 30, replace=False) for c in range(10)]))
    train = np.setdiff1d(np.arange(len(y)), test)
    return Source("digits", x[train], y[train], x[test], y[test], tuple("0123456789"), *channel_statistics(x[train]))


def _source(name: str, stored: Arrays) -> Source:
    x_train, y_train, x_test, y_test, names, ids, test_ids, clients = stored
    mean, std = PUBLISHED.get(name) or channel_statistics(x_train)
    return Source(name, x_train, y_train, x_test, y_test, names, mean, std, ids, test_ids, clients)


def _torchvision(name: str, root: Path, download: bool) -> Source:
    from torchvision import datasets

    kind = getattr(datasets, TORCHVISION[name])
    try:
        train, test = kind(root, train=True, download=download), kind(root, train=False, download=download)
    except (RuntimeError, OSError, ValueError, AssertionError) as error:    # torchvision asserts the length of a file
        cause = " ".join(str(error).split())
        remedy = f"the download failed: {cause}" if download else "set data.download=true, or data.root to where it is"
        raise DataError(f"data.source = {name}: no intact copy under {root.resolve()}; {remedy}") from None
    x_train, x_test = (np.asarray(part.data) for part in (train, test))
    if x_train.ndim == 3:
        x_train, x_test = x_train[..., None], x_test[..., None]
    y_train, y_test = (np.asarray(part.targets, dtype=np.int64) for part in (train, test))
    return Source(name, x_train, y_train, x_test, y_test, tuple(train.classes), *PUBLISHED[name])


def _cinic10(folder: Path, config: DataConfig, cache: Path) -> Source:
    parts = read_parts(folder)
    if parts.test is None or parts.train.clients is not None:
        raise DataError(f"{folder}: holds no cinic10; its images are expected at train/<class>/ and test/<class>/")
    return open_parts("cinic10", parts, How(32, fit=config.fit), cache)


def _imagenet_lt(folder: Path, config: DataConfig) -> Source:
    if config.imbalance not in (None, 1):
        raise DataError(f"data.imbalance = {config.imbalance:g}: imagenet_lt is long-tailed as published and is never "
                        "thinned again; set data.imbalance=1")
    (train, y_train), (test, y_test) = (_read_list(folder / f"ImageNet_LT_{part}.txt") for part in ("train", "test"))
    names = dict(zip(y_train.tolist(), (Path(file).parent.name for file in train), strict=True))
    classes = max(names) + 1
    if len(names) != classes or y_test.max() >= classes:
        raise DataError(f"{folder}: the labels of ImageNet_LT_train.txt must be 0..C-1 and cover those of "
                        "ImageNet_LT_test.txt; use the published lists")
    cache = Path(config.root).expanduser() / "cache"
    x_train, x_test = (decode_tree(f"imagenet_lt-{part}", folder, files, How(config.size, fit=config.fit), cache)[0]
                       for part, files in (("train", train), ("test", test)))
    return Source("imagenet_lt", x_train, y_train, x_test, y_test, tuple(names[c] for c in range(classes)),
                  *PUBLISHED["imagenet_lt"])


def _read_list(path: Path) -> tuple[list[str], np.ndarray]:
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path.resolve()}: cannot be read ({error}); put the published list there") from None
    pairs = [line.rpartition(" ") for line in lines]
    for number, (file, _, label) in enumerate(pairs, 1):
        if not file or not label.isdecimal():
            raise DataError(f"{path}, line {number}: {lines[number - 1]!r} is not 'relative/path.JPEG label'")
    if not pairs:
        raise DataError(f"{path}: empty; put the published list there")
    return [file for file, _, _ in pairs], np.array([int(label) for _, _, label in pairs], dtype=np.int64)
