"""Data sets as they are on disk: training and balanced test images, labels, class names, normalisation.

`digits` comes with scikit-learn; `cifar10`, `cifar100` and `fashion_mnist` are read by torchvision; `cinic10`,
`imagenet_lt` and `folder:PATH` are trees of image files; `npz:PATH` is one file of arrays, see arrays.py. Those with
label maps are in scenes.py.
"""

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from raylt.config import DataConfig
from raylt.data.arrays import Arrays, arrays
from raylt.data.cache import Stored, decode_tree, load, take
from raylt.data.scenes import camvid, cityscapes, shapes
from raylt.errors import ConfigError, DataError
from raylt.seeds import seed_for

Channels = tuple[float, ...]
Kind = Literal["classification", "segmentation"]

TORCHVISION = {"cifar10": "CIFAR10", "cifar100": "CIFAR100", "fashion_mnist": "FashionMNIST"}
NAMES = ("digits", *TORCHVISION, "cinic10", "imagenet_lt", "shapes", "camvid", "cityscapes", "folder", "npz")
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CIFAR = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)      # CReFF's code uses them for CIFAR-100 too
PUBLISHED = {
    "cifar10": CIFAR,
    "cifar100": CIFAR,
    "fashion_mnist": ((0.2860,), (0.3530,)),
    "cinic10": ((0.47889522, 0.47227842, 0.43047404), (0.24205776, 0.23828046, 0.25874835)),
    "imagenet_lt": IMAGENET,
    "camvid": IMAGENET,             # so that weights from ImageNet see what they saw there
    "cityscapes": IMAGENET,
}
GROUPS = {"cifar10": (200, 1000), "fashion_mnist": (200, 1000), "cinic10": (200, 1000), "digits": (20, 60)}


@dataclass(frozen=True, eq=False)
class Source:
    """A data set before it is thinned and partitioned.

    Args:
        x_train, x_test: uint8 [N, H, W, channels].
        y_train, y_test: int64 [N], in [0, C); or label maps uint8 [N, H, W], in [0, C) or VOID.
        class_names: C names.
        ids: recorded id of each training sample, [N], where there is one.
        mean, std: per channel, of pixels in [0, 1].
    """

    name: str
    x_train: Stored
    y_train: Stored
    x_test: Stored
    y_test: Stored
    class_names: tuple[str, ...]
    mean: Channels
    std: Channels
    ids: np.ndarray | None = None

    @property
    def kind(self) -> Kind:
        return "classification" if len(self.y_train.shape) == 1 else "segmentation"

    @property
    def strata(self) -> np.ndarray:
        """What a validation part is to be representative of: the labels; images with maps are all of one kind."""
        return load(self.y_train) if self.kind == "classification" else np.zeros(len(self.y_train), dtype=np.int64)


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
            return _tree("cinic10", root / "cinic10", 32, root / "cache")
        case "imagenet_lt", False:
            return _imagenet_lt(root / "imagenet_lt", config)
        case "shapes", False:
            return _source("shapes", shapes())
        case "camvid", False:
            return _source("camvid", camvid(root, config.size))
        case "cityscapes", False:
            return _source("cityscapes", cityscapes(root, config.size))
        case "folder", True:
            return _tree(config.source, path, config.size, root / "cache")
        case "npz", True:
            return _source(config.source, arrays(path))
    if kind in ("folder", "npz"):
        raise ConfigError(f"data.source = {config.source!r} names no path; write {kind}:PATH")
    if colon and kind in NAMES:
        raise ConfigError(f"data.source = {config.source!r}: {kind} takes no path, it lies under data.root")
    nearest = difflib.get_close_matches(kind, NAMES, 1)
    hint = f"did you mean {nearest[0]}? " if nearest else ""
    raise ConfigError(f"data.source = {config.source!r}: no such source; {hint}There are: {', '.join(NAMES[:-2])}, "
                      "folder:PATH, npz:PATH; one's own comes by --plugin FILE.")


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


def channel_statistics(x: Stored) -> tuple[Channels, Channels]:
    """Mean and standard deviation per channel of pixels in [0, 1], of at most 2,000 evenly spaced images if `x` is
    mapped. A constant channel gets the deviation of one grey level, so that dividing by it is safe."""
    if not isinstance(x, np.ndarray):
        x = load(take(x, np.linspace(0, len(x) - 1, min(len(x), 2000)).astype(np.int64)))
    levels = np.arange(256) / 255
    mean, std = [], []
    for channel in range(x.shape[3]):
        # a histogram is exact and needs no float copy of the images
        share = sum(np.bincount(part[..., channel].ravel(), minlength=256)
                    for part in np.array_split(x, 1 + len(x) // 4096)) / x[..., 0].size
        mean.append(float(levels @ share))
        std.append(max(float(np.sqrt((levels - mean[-1]) ** 2 @ share)), 1 / 255))
    return tuple(mean), tuple(std)


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
    x_train, y_train, x_test, y_test, names, ids = stored
    mean, std = PUBLISHED.get(name) or channel_statistics(x_train)
    return Source(name, x_train, y_train, x_test, y_test, names, mean, std, ids)


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


def _tree(name: str, folder: Path, size: int, cache: Path) -> Source:
    kind = name.partition(":")[0]
    names = _subfolders(folder / "train")
    if _subfolders(folder / "test") != names:
        raise DataError(f"{folder}: train and test must hold the same class folders; "
                        f"they differ in {sorted(set(names) ^ set(_subfolders(folder / 'test')))}")
    parts = []
    for part in ("train", "test"):
        files = [sorted(f"{c}/{file.name}" for file in (folder / part / c).iterdir() if file.name[0] != ".")
                 for c in names]
        if not any(files):
            raise DataError(f"{folder / part}: no images in its class folders; put them at {part}/<class>/<image>")
        x = decode_tree(f"{kind}-{part}", folder / part, [file for of_class in files for file in of_class], size, cache)
        parts += [x, np.repeat(np.arange(len(names)), [len(of_class) for of_class in files])]
    x_train, y_train, x_test, y_test = parts
    mean, std = PUBLISHED.get(name) or channel_statistics(x_train)
    return Source(name, x_train, y_train, x_test, y_test, names, mean, std)


def _subfolders(folder: Path) -> tuple[str, ...]:
    if not folder.is_dir():
        raise DataError(f"{folder.resolve()}: no such folder; images are expected at {folder.name}/<class>/<image>")
    names = tuple(sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and entry.name[0] != "."))
    if not names:
        raise DataError(f"{folder.resolve()}: no class folders; images are expected at {folder.name}/<class>/<image>")
    return names


def _imagenet_lt(folder: Path, config: DataConfig) -> Source:
    if config.imbalance != 1:
        raise DataError(f"data.imbalance = {config.imbalance:g}: imagenet_lt is long-tailed as published and is never "
                        "thinned again; set data.imbalance=1")
    (train, y_train), (test, y_test) = (_read_list(folder / f"ImageNet_LT_{part}.txt") for part in ("train", "test"))
    names = dict(zip(y_train.tolist(), (Path(file).parent.name for file in train), strict=True))
    classes = max(names) + 1
    if len(names) != classes or y_test.max() >= classes:
        raise DataError(f"{folder}: the labels of ImageNet_LT_train.txt must be 0..C-1 and cover those of "
                        "ImageNet_LT_test.txt; use the published lists")
    x_train, x_test = (decode_tree(f"imagenet_lt-{part}", folder, files, config.size, Path(config.root).expanduser()
                                   / "cache") for part, files in (("train", train), ("test", test)))
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
