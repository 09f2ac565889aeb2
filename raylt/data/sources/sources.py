"""Opens data sets: training images, balanced test images, labels, class names and normalisation.

`digits` comes with scikit-learn. torchvision reads `cifar10`, `cifar100` and `fashion_mnist`. `cinic10`, `imagenet_lt`
and `folder:PATH` are trees of image files. `npz:PATH` is one file of arrays, see arrays.py. Data sets with label maps
are in scenes.py, data sets of the `datasets` library in huggingface.py, and sources for Ray Data in ray_data.py.
"""

import gzip
import importlib.util
from collections.abc import Callable
from pathlib import Path

import numpy as np

from raylt import store
from raylt.config import DataConfig
from raylt.data.images.image_trees import How, decode_tree
from raylt.data.sources.arrays import PUBLISHED, Arrays, ProblemKind, Source, channel_statistics, read_arrays
from raylt.data.sources.checks import SCOPE
from raylt.data.sources.folders import open_parts, read_parts
from raylt.data.sources.huggingface import open_hub
from raylt.data.sources.own import checked_source
from raylt.data.sources.ray_data import open_ray
from raylt.data.sources.scenes import camvid, cityscapes, shapes
from raylt.errors import CheckpointError, ConfigError, DataError, did_you_mean, own_function, spoken, without_remedy
from raylt.seeds import seed_for

__all__ = ["NAMES", "SOURCES", "ProblemKind", "Source", "channel_statistics", "group_thresholds", "open_source"]

MAX_LIST_BYTES = 2**28  # size limit of a published list of files
TORCHVISION = {"cifar10": "CIFAR10", "cifar100": "CIFAR100", "fashion_mnist": "FashionMNIST"}
NAMES = (
    "digits",
    *TORCHVISION,
    "cinic10",
    "imagenet_lt",
    "shapes",
    "camvid",
    "cityscapes",
    "folder",
    "npz",
    "hf",
    "ray",
)

OWN_SIZE = ("digits", *TORCHVISION, "cinic10", "shapes", "npz")  # sources that ignore data.size
SOURCES: dict[str, Callable[[DataConfig], Source]] = {}  # the user's own sources by name, see raylt/registry.py


def open_source(config: DataConfig) -> Source:
    """Open the data set that `config.source` names.

    Raises:
        ConfigError: The source is unknown.
        DataError: The source's files are missing or malformed, or the user's function returned unusable data.
    """
    if config.source in SOURCES:
        with own_function("data.source", config.source):
            source = SOURCES[config.source](config)
        return checked_source(config.source, source)
    kind, _, address = config.source.partition(":")
    root = Path(config.root).expanduser()
    path = Path(address).expanduser()
    match kind, bool(address):
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
            return _source("camvid", camvid(root, config.size, config.depth))
        case "cityscapes", False:
            return _source("cityscapes", cityscapes(root, config.size, config.depth))
        case "folder", True:
            how = How(config.size, config.channels, config.fit, config.bad, config.depth)
            return open_parts(config.source, read_parts(path, config.test_part), how, root / "cache")
        case "npz", True:
            return _source(config.source, read_arrays(path, config.depth))
        case "hf", True:
            return open_hub(config)
        case "ray", True:
            return open_ray(config)
    raise _unknown_source(config.source)


def check_size(config: DataConfig) -> None:
    """Raise an error if `data.size` is set for a source of arrays, whose images keep their size.

    Raises:
        ConfigError: The source consists of arrays, and the size is not the default.
    """
    kind = config.source.partition(":")[0]
    if config.source in SOURCES or kind not in OWN_SIZE or config.size == DataConfig.model_fields["size"].default:
        return
    raise ConfigError(
        f"data.size: images of {kind} keep their own size ({config.size}). Leave data.size out, or give image files.",
        code="config.conflict",
        key="data.size",
        value=config.size,
        source=config.source,
    )


def group_thresholds(config: DataConfig, largest: int, pixels: int | None = None) -> tuple[int, int]:
    """Return the thresholds (low, high) of `shot_groups`: the configured values, or defaults by data size.

    The defaults depend on the images alone, not on how they were loaded: `cifar10` and an npz file of the same images
    have the same groups. The literature has 200 and 1,000 for CIFAR-10-LT, whose largest class has 5,000 samples, and
    20 and 100 for CIFAR-100-LT and ImageNet-LT, whose largest classes have 500 and 1,280. The pair for smaller data and
    the sizes at which the pairs change are choices of this project.

    Args:
        config: The settings in `data`.
        largest: Number of training images of the source's largest class, without those that become test images, before
            the data are thinned.
        pixels: Number of labelled pixels of label maps; the defaults are then 1 % and 5 % of them, a choice of this
            project.

    Raises:
        ConfigError: The thresholds are not in order.
    """
    if pixels is not None:
        usual = pixels // 100, pixels // 20
    elif largest < 200:
        usual = 20, 60
    else:
        usual = (20, 100) if largest < 2000 else (200, 1000)
    low, high = config.groups or usual
    if not 0 <= low <= high:
        problem = "numbers of samples are not negative" if low < 0 else "few < first and many > second overlap"
        remedy = "Give numbers from 0" if low < 0 else "Put the smaller number first"
        raise ConfigError(
            f"data.groups: {problem} ([{low}, {high}]). {remedy}.",
            code="config.out-of-range",
            key="data.groups",
            value=[low, high],
        )
    return low, high


def _unknown_source(source: str) -> ConfigError:
    kind, colon, _ = source.partition(":")
    if kind in ("folder", "npz", "hf", "ray"):
        problem = f"the source names no path ({source}). Write {kind}:PATH."
    elif colon and kind in NAMES:
        problem = f"{kind} takes no path ({source}). Put it below data.root and write {kind}."
    else:
        problem = (
            f"unknown source ({source!r}). {did_you_mean(kind, NAMES)}{SCOPE}. "
            f"There are: {', '.join(NAMES[:-4])}, folder:PATH, npz:PATH, hf:NAME@REVISION, hf:PATH, ray:PATH; "
            f"{spoken('--plugin FILE', 'raylt.register')} adds your own."
        )
    return ConfigError(f"data.source: {problem}", code="config.unknown-name", key="data.source", value=source)


def _digits() -> Source:
    pixels, y = _load_digits()
    x = (pixels.reshape(-1, 8, 8, 1) * 15).astype(np.uint8)  # 0..16 becomes 0..240
    y = np.asarray(y, dtype=np.int64)
    rng = np.random.default_rng(seed_for(0, "digits test set"))  # not data.seed: all runs share one test set
    test = np.sort(np.concatenate([rng.choice(np.flatnonzero(y == c), 30, replace=False) for c in range(10)]))
    train = np.setdiff1d(np.arange(len(y)), test)
    return _source("digits", Arrays(x[train], y[train], x[test], y[test], tuple("0123456789")))


def _load_digits() -> tuple[np.ndarray, np.ndarray]:
    """Return scikit-learn's digits as float64 [1797, 64] in 0..16 and their labels.

    The package itself is not imported, because that takes longer than some rounds of training on its digits.
    """
    package = importlib.util.find_spec("sklearn")  # does not run the package
    for folder in (package and package.submodule_search_locations) or []:
        file = Path(folder) / "datasets" / "data" / "digits.csv.gz"
        if file.is_file():
            with gzip.open(file, "rt") as lines:
                table = np.loadtxt(lines, delimiter=",")
            return table[:, :-1], table[:, -1]
    from sklearn.datasets import load_digits  # for versions that have the file elsewhere

    pixels, y = load_digits(return_X_y=True)
    return np.asarray(pixels), np.asarray(y)


def _source(name: str, arrays: Arrays) -> Source:
    mean, std = PUBLISHED.get(name) or channel_statistics(arrays.x_train)
    return Source(name=name, mean=mean, std=std, **arrays._asdict())


def _torchvision(name: str, root: Path, download: bool) -> Source:
    from torchvision import datasets

    loader = getattr(datasets, TORCHVISION[name])
    try:
        train = loader(root, train=True, download=download)
        test = loader(root, train=False, download=download)
    except (RuntimeError, OSError, ValueError, AssertionError) as error:  # torchvision asserts the length of a file
        if download:
            reason = " ".join(str(error).split())
            remedy = f"The download failed: {reason}. Try again, or set data.root to a folder with a copy."
        else:
            remedy = "Set data.download=true, or set data.root to the folder with the data set."
        raise DataError(
            f"data.source: no intact copy under {root.resolve()} ({name}). {remedy}",
            code="data.not-found",
            key="data.source",
            value=name,
            path=str(root),
        ) from None
    x_train = np.asarray(train.data)
    x_test = np.asarray(test.data)
    if x_train.ndim == 3:
        x_train = x_train[..., None]
        x_test = x_test[..., None]
    y_train = np.asarray(train.targets, dtype=np.int64)
    y_test = np.asarray(test.targets, dtype=np.int64)
    classes = tuple(train.classes)
    for part, x, y in (("training", x_train, y_train), ("test", x_test, y_test)):
        problem = _mismatch(x, y, len(classes))
        if problem is not None:
            raise DataError(
                f"data.source: the copy of {name} under {root.resolve()} is damaged ({part} part: {problem}). Remove "
                "it, and set data.download=true.",
                code="data.malformed",
                key="data.source",
                value=name,
                path=str(root),
            )
    return _source(name, Arrays(x_train, y_train, x_test, y_test, classes))


def _mismatch(x: np.ndarray, y: np.ndarray, classes: int) -> str | None:
    """Return why labels are not those of the images; None if they may be.

    torchvision checks the length of each file, but does not compare files with each other.
    """
    if len(y) != len(x):
        return f"{len(y)} labels for {len(x)} images"
    if not len(y):
        return "no image"
    if y.min() < 0 or y.max() >= classes:
        return f"labels from {y.min()} to {y.max()} for {classes} classes"
    return None


def _cinic10(folder: Path, config: DataConfig, cache: Path) -> Source:
    parts = read_parts(folder)
    if parts.test is None or parts.train.clients is not None:
        raise DataError(
            f"{folder}: this is not cinic10. Put its images at train/<class>/ and test/<class>/.",
            code="data.wrong-layout",
            path=str(folder),
        )
    return open_parts("cinic10", parts, How(32, fit=config.fit, depth=config.depth), cache)


def _imagenet_lt(folder: Path, config: DataConfig) -> Source:
    if config.imbalance not in (None, 1):
        raise DataError(
            f"data.imbalance: imagenet_lt is long-tailed as published, so raylt does not subsample it "
            f"({config.imbalance:g}). Set data.imbalance=1.",
            code="config.conflict",
            key="data.imbalance",
            value=config.imbalance,
        )
    train, y_train = _read_list(folder / "ImageNet_LT_train.txt")
    test, y_test = _read_list(folder / "ImageNet_LT_test.txt")
    names = {label: Path(file).parent.name for label, file in zip(y_train.tolist(), train, strict=True)}
    classes = max(names) + 1
    if len(names) != classes or y_test.max() >= classes:
        raise DataError(
            f"{folder}: the labels of ImageNet_LT_train.txt must be 0..C-1 and cover the labels of "
            "ImageNet_LT_test.txt. Use the published lists.",
            code="data.malformed",
            path=str(folder),
        )
    how = How(config.size, fit=config.fit, depth=config.depth)
    cache = Path(config.root).expanduser() / "cache"
    x_train, _, _ = decode_tree("imagenet_lt-train", folder, train, how, cache)
    x_test, _, _ = decode_tree("imagenet_lt-test", folder, test, how, cache)
    class_names = tuple(names[c] for c in range(classes))
    return _source("imagenet_lt", Arrays(x_train, y_train, x_test, y_test, class_names))


def _read_list(path: Path) -> tuple[list[str], np.ndarray]:
    """Read image file names and their labels from a published list, which has one image per line."""
    try:
        lines = store.read(path, MAX_LIST_BYTES).decode().splitlines()
    except (CheckpointError, UnicodeDecodeError) as error:
        raise DataError(
            f"{path.absolute()}: the list cannot be read ({without_remedy(error)}). Put the published list there.",
            code="data.not-found",
            path=str(path),
        ) from None
    files = []
    labels = []
    for number, line in enumerate(lines, 1):
        file, _, label = line.rpartition(" ")
        if not file or not label.isdecimal():
            raise DataError(
                f"{path}: line {number} is not 'relative/path.JPEG label' ({line!r}). Use the published list.",
                code="data.malformed",
                path=str(path),
                line=number,
            )
        files.append(file)
        labels.append(int(label))
    if not files:
        raise DataError(
            f"{path}: the list is empty. Put the published list there.", code="data.malformed", path=str(path)
        )
    return files, np.array(labels, dtype=np.int64)
