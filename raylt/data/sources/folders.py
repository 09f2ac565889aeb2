"""Images in folders (`data.source=folder:PATH`): detects the layout, and the class and client of each image.

    <client>/<class>/<image>                a part of each client's images becomes its test images
    train/<client>/<class>/<image>          with test/<client>/<class>/<image>; without it, as above
    train/<class>/<image>                   with test/<class>/<image>; without it, a part of each class is the test set
    <class>/<image>                         the same, with test/<class>/<image> or without

The layouts are distinguished by a folder `train` and by the depth of the images, which must be the same everywhere.
`data.test_part` names another folder than `test`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from raylt.data.images.image_files import Listing, list_images, notes_of, plain_name, shown_name
from raylt.data.images.image_trees import How, decode_tree
from raylt.data.sources.arrays import Source
from raylt.data.sources.labels import ImageLabels, assemble
from raylt.disk import exists
from raylt.errors import ConfigError, DataError, count_of, did_you_mean, first_names

LAYOUTS = (
    "Use <client>/<class>/<image>, train/<client>/<class>/<image>, train/<class>/<image> or <class>/<image>; the "
    "latter three may have a folder test next to them."
)
PARTS = {"train", "test"}
NOT_READ = {"val", "valid", "validation"}  # folders next to train that other tools use


@dataclass(frozen=True)
class Part:
    """The training or the test images of a folder, ordered by client, class and file name.

    Args:
        below: The part's own folder, with a slash; files are relative to it.
        files: Paths of the images.
        classes: Class name of each image.
        clients: Client name of each image; None if there are no clients.
    """

    below: str
    files: tuple[str, ...]
    classes: tuple[str, ...]
    clients: tuple[str, ...] | None


@dataclass(frozen=True)
class Parts:
    """The training and test images in a folder, and notices about all other files there."""

    folder: Path
    train: Part
    test: Part | None
    notes: tuple[str, ...]


def read_parts(folder: Path, test_part: str | None = None) -> Parts:
    """Find the images in a folder and detect their layout, without decoding any image.

    Args:
        folder: The folder of the data set.
        test_part: Name of the folder with the test images. None: `test`; without it, next to a `train` without clients,
            the folder in NOT_READ if there is exactly one.

    Raises:
        ConfigError: The folder `test_part` does not exist.
        DataError: The folder does not exist, or its layout is not one of the four, or a mixture.
    """
    top = _top(folder)
    test = _test_folder(folder, top, test_part)
    _check_names(folder, top, test)
    if "train" not in top:
        return _read_top(folder, test)
    train_listing = list_images(folder / "train")
    train = part_of(folder, "train/", train_listing, {1, 2})
    candidates = sorted(top & NOT_READ)
    notes = []
    if test is None and train.clients is None and len(candidates) == 1:
        test = candidates[0]
        notes.append(f"{folder}: has no folder test; its folder {test} is the test set")
    notes += [
        f"{folder / name}: is not read; data.test_part={name} makes it the test set"
        for name in sorted(top & {*NOT_READ, "test"} - {test})
    ]
    listings = {"train": train_listing}
    tested = None
    if test is not None:
        listings[test] = list_images(folder / test)
        tested = part_of(folder, f"{test}/", listings[test], {1} if train.clients is None else {2})
        check_same_names(folder, "class", train.classes, tested.classes)
        check_same_names(folder, "client", train.clients or (), tested.clients or ())
    notes += notes_of([(folder / name, listing) for name, listing in listings.items()])
    return Parts(folder, train, tested, tuple(notes))


def _test_folder(folder: Path, top: set[str], test_part: str | None) -> str | None:
    """Return the name of the folder of test images, or None."""
    if test_part is None:
        return "test" if "test" in top else None
    parts = sorted(top - {"train"})
    if test_part not in parts:
        raise ConfigError(
            f"data.test_part: {folder} has no folder of test images with this name ({test_part}). "
            f"{did_you_mean(test_part, parts)}Use one of {', '.join(parts)}.",
            code="config.unknown-name",
            key="data.test_part",
            value=test_part,
        )
    return test_part


def _read_top(folder: Path, test: str | None) -> Parts:
    """Find the images of a folder that has no subfolder `train`."""
    listing = list_images(folder)
    notes = tuple(notes_of([(folder, listing)]))
    inside = [file for file in listing.files if file.parts[0] == test]
    outside = replace(listing, files=tuple(file for file in listing.files if file.parts[0] != test))
    if test is not None and not outside.files:
        raise _wrong_layout(folder, f"it has a folder {test} and no folder train")
    train = part_of(folder, "", outside, {1, 2} if test is None else {1})
    if test is None:
        return Parts(folder, train, None, notes)
    files = tuple(PurePosixPath(*file.parts[1:]) for file in inside)
    tested = part_of(folder, f"{test}/", replace(listing, files=files), {1})
    check_same_names(folder, "class", train.classes, tested.classes)
    return Parts(folder, train, tested, notes)


def open_parts(name: str, parts: Parts, how: How, cache: Path) -> Source:
    """Make a data set from the images of a folder.

    It has test images only if the folder has some.

    Args:
        name: Name of the data set.
        parts: The images and their labels.
        how, cache: See `decode_tree`.
    """
    chosen = [parts.train] if parts.test is None else [parts.train, parts.test]
    # use one cache, because the images are grey only if all parts are
    files = [f"{part.below}{file}" for part in chosen for file in part.files]
    x, rows, damaged = decode_tree(name.partition(":")[0], parts.folder, files, how, cache)
    clients = None
    if parts.train.clients is not None:
        clients = [client for part in chosen for client in part.clients or ()]
    labels = ImageLabels(
        classes=[class_name for part in chosen for class_name in part.classes],
        clients=clients,
        train=len(parts.train.files),
        tested=parts.test is not None,
    )
    return assemble(name, x, rows, labels, (*parts.notes, *damaged))


def _wrong_layout(folder: Path, problem: str) -> DataError:
    return DataError(f"{folder}: {problem}. {LAYOUTS}", code="data.wrong-layout", path=str(folder))


def _top(folder: Path) -> set[str]:
    """Return the names of the visible folders directly below a folder."""
    if not exists(folder):
        raise DataError(f"{folder.absolute()}: no such folder. {LAYOUTS}", code="data.not-found", path=str(folder))
    if not folder.is_dir():
        raise _wrong_layout(folder.absolute(), "this is not a folder")
    return {entry.name for entry in folder.iterdir() if entry.is_dir() and entry.name[0] != "."}


def _check_names(folder: Path, top: set[str], test: str | None) -> None:
    """Raise an error if the top folders' names do not distinguish parts (train, test) from clients or classes."""
    similar = {*PARTS, "training", "testing"}
    strange = sorted(name for name in top if name not in PARTS and name.lower() in similar)
    if strange:
        raise DataError(
            f"{folder}: the name of a folder looks like a part ({strange[0]}). Call parts train and test, and give a "
            "client another name.",
            code="data.wrong-layout",
            path=str(folder),
            name=strange[0],
        )
    if "train" not in top:
        return
    unclear = sorted(top - PARTS - NOT_READ - {test})
    if unclear:
        raise DataError(
            f"{folder}: folders train and {', '.join(unclear[:3])} are either parts or clients. Keep only "
            "train and test there, or give the client train another name.",
            code="data.wrong-layout",
            path=str(folder),
            name=unclear[0],
        )


def part_of(folder: Path, below: str, listing: Listing, depths: set[int]) -> Part:
    """Read the class and client of each image below a folder. All images must lie at one of the given depths.

    Args:
        folder: The folder of the data set.
        below: The part's own folder, with a slash.
        listing: The image files in the part.
        depths: Allowed numbers of folders between the part and its images.

    Raises:
        DataError: There are no images, or they lie at other or different depths.
    """
    folder = folder / below
    if not listing.files:
        raise _wrong_layout(folder, "no images in its folders")
    first = {len(file.parts) - 1: file for file in reversed(listing.files)}
    if len(first) > 1:
        shallow = shown_name(first[min(first)])
        deep = shown_name(first[max(first)])
        raise _wrong_layout(folder, f"images lie at different depths, such as {shallow} and {deep}")
    depth = next(iter(first))
    if depth not in depths:
        raise _wrong_layout(folder, f"images lie at another depth, such as {shown_name(first[depth])}")
    names = [tuple(plain_name(folder, part) for part in file.parts[:-1]) for file in listing.files]
    return Part(
        below=below,
        files=tuple(map(str, listing.files)),
        classes=tuple(parts[-1] for parts in names),
        clients=tuple(parts[0] for parts in names) if depth == 2 else None,
    )


def check_same_names(folder: Path, what: str, train: Sequence[str], test: Sequence[str]) -> None:
    """Raise an error if a class or client of the test part has no training images.

    Args:
        folder: The folder of the data set.
        what: "class" or "client".
        train: Class or client names of the training images.
        test: Class or client names of the test images.

    Raises:
        DataError: A name occurs only in the test part.
    """
    untrained = sorted({*test} - {*train})
    if untrained:
        has = "has" if len(untrained) == 1 else "have"
        raise DataError(
            f"{folder}: {count_of(len(untrained), f'{what} folder')} of the test part {has} no training images "
            f"({first_names(untrained)}). Give every {what} training images too.",
            code="data.wrong-layout",
            path=str(folder),
            name=untrained[0],
        )
