"""Images in folders (`data.source=folder:PATH`): which layout it is, and whose and of which class each image is.

    <client>/<class>/<image>                a part of each client's images becomes its test images
    train/<client>/<class>/<image>          with test/<client>/<class>/<image>, or as above without a test folder
    train/<class>/<image>                   with test/<class>/<image>

They are told apart by a folder `train` and by the depth at which the images lie, which must be the same everywhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from raylt.data.assembly import Known, assemble
from raylt.data.listing import Listing, list_images, notes_of, plain_name, shown_name
from raylt.data.source import Source
from raylt.data.trees import How, decode_tree
from raylt.errors import DataError

LAYOUTS = ("expected are <client>/<class>/<image>, train/<client>/<class>/<image> or train/<class>/<image>, the latter "
           "two with a test folder beside train")
PARTS = {"train", "test"}
NOT_READ = {"val", "valid", "validation"}       # parts beside train and test that other tools want


@dataclass(frozen=True)
class Part:
    """Images of a part, in the order of clients, classes and names.

    Args:
        below: the part's own folder, with a slash; files are relative to it.
        classes, clients: the name of each image's; clients None where there are none.
    """

    below: str
    files: tuple[str, ...]
    classes: tuple[str, ...]
    clients: tuple[str, ...] | None


@dataclass(frozen=True)
class Parts:
    """What a folder holds."""

    folder: Path
    train: Part
    test: Part | None
    notes: tuple[str, ...]


def read_parts(folder: Path) -> Parts:
    """The images in a folder and their layout; nothing is decoded.

    Raises:
        DataError: the folder is not there, or its layout is none of the three or not one.
    """
    top = _top(folder)
    if strange := sorted(name for name in top if name not in PARTS and name.lower() in {*PARTS, "training", "testing"}):
        raise DataError(f"{folder}: has a folder {strange[0]}; parts are called train and test, and a client must not "
                        "be taken for one; rename it")
    if "train" not in top and "test" not in top:
        listing = list_images(folder)
        part = _part(folder, "", listing, {2})
        return Parts(folder, part, None, tuple(notes_of([(folder, listing)])))
    if "train" not in top:
        raise DataError(f"{folder}: has a folder test and no folder train; {LAYOUTS}")
    others = sorted(top - {"train", "test"} - NOT_READ)
    if others:
        raise DataError(f"{folder}: has folders train and {', '.join(others[:3])}, so it is either parts or clients; "
                        "leave train and test alone there, or give the client train another name")
    read = {name: list_images(folder / name) for name in ("train", "test") if name in top}
    notes = [f"{folder / name}: is not read; data.validation holds images of train out"
             for name in sorted(top & NOT_READ)]
    unread = "" if "test" in top else "".join(f"; {name} is not read: call it test to judge by it"
                                              for name in sorted(top & NOT_READ))
    train = _part(folder, "train/", read["train"], {1, 2} if "test" in top else {2}, unread)
    test = _part(folder, "test/", read["test"], {1} if train.clients is None else {2}) if "test" in top else None
    if test is not None:
        _check_beside(folder, "class", train.classes, test.classes)
        _check_beside(folder, "client", train.clients or (), test.clients or ())
    return Parts(folder, train, test, (*notes, *notes_of([(folder / name, listing) for name, listing in read.items()])))


def open_parts(name: str, parts: Parts, how: How, cache: Path) -> Source:
    """The images of a folder, decoded; a source without test images where the folder has none.

    Args:
        how, cache: as of `decode_tree`.
    """
    read = [parts.train] if parts.test is None else [parts.train, parts.test]
    # in one cache: whether images are grey is asked of all of them
    files = [f"{part.below}{file}" for part in read for file in part.files]
    x, rows, damaged = decode_tree(name.partition(":")[0], parts.folder, files, how, cache)
    clients = None if parts.train.clients is None else [k for part in read for k in part.clients or ()]
    known = Known([c for part in read for c in part.classes], clients, len(parts.train.files), parts.test is not None)
    return assemble(name, x, rows, known, (*parts.notes, *damaged))


def _top(folder: Path) -> set[str]:
    if not folder.is_dir():
        raise DataError(f"{folder.resolve()}: {'is no folder' if folder.exists() else 'no such folder'}; {LAYOUTS}")
    return {entry.name for entry in folder.iterdir() if entry.is_dir() and entry.name[0] != "."}


def _part(folder: Path, below: str, listing: Listing, depths: set[int], hint: str = "") -> Part:
    """A part whose images lie in so many folders, one below the other.

    Args:
        hint: ends the error where they do not.
    """
    folder = folder / below
    if not listing.files:
        raise DataError(f"{folder}: no images in its folders; {LAYOUTS}")
    first = {len(file.parts) - 1: file for file in reversed(listing.files)}
    if len(first) > 1:
        shallow, deep = first[min(first)], first[max(first)]
        raise DataError(f"{folder}: images lie at different depths, as {shown_name(shallow)} and {shown_name(deep)}; "
                        f"{LAYOUTS}")
    depth = next(iter(first))
    if depth not in depths:
        raise DataError(f"{folder}: images lie as {shown_name(first[depth])}; {LAYOUTS}{hint}")
    names = [tuple(plain_name(folder, part) for part in file.parts[:-1]) for file in listing.files]
    return Part(below, tuple(map(str, listing.files)), tuple(parts[-1] for parts in names),
                tuple(parts[0] for parts in names) if depth == 2 else None)


def _check_beside(folder: Path, what: str, train: Sequence[str], test: Sequence[str]) -> None:
    if more := sorted({*test} - {*train}):
        raise DataError(f"{folder}: train and test must hold the same {what} folders; they differ in "
                        f"{sorted({*test} ^ {*train})}, and {more[0]} has test images alone")
