"""Images in folders (`data.source=folder:PATH`): which layout it is, and whose and of which class each image is.

    <client>/<class>/<image>                a part of each client's images becomes its test images
    train/<client>/<class>/<image>          with test/<client>/<class>/<image>, or as above without a test folder
    train/<class>/<image>                   with test/<class>/<image>

They are told apart by a folder `train` and by the depth at which the images lie, which must be the same everywhere.
"""

import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from raylt.data.assembly import Known, assemble
from raylt.data.listing import Listing, list_images, shown_name
from raylt.data.source import Source
from raylt.data.trees import How, decode_tree
from raylt.errors import DataError

LAYOUTS = ("expected are <client>/<class>/<image>, train/<client>/<class>/<image> or train/<class>/<image>, the latter "
           "two with a test folder beside train")
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
    if "train" not in top and "test" not in top:
        listing = list_images(folder)
        part = _part(folder, "", listing, {2})
        return Parts(folder, part, None, tuple(_notes([(folder, listing)])))
    if "train" not in top:
        raise DataError(f"{folder}: has a folder test and no folder train; {LAYOUTS}")
    others = sorted(top - {"train", "test"} - NOT_READ)
    if others:
        raise DataError(f"{folder}: has folders train and {', '.join(others[:3])}, so it is either parts or clients; "
                        "leave train and test alone there, or give the client train another name")
    read = {name: list_images(folder / name) for name in ("train", "test") if name in top}
    notes = [f"{folder / name}: is not read; data.validation holds images of train out"
             for name in sorted(top & NOT_READ)]
    train = _part(folder, "train/", read["train"], {1, 2} if "test" in top else {2})
    test = _part(folder, "test/", read["test"], {1} if train.clients is None else {2}) if "test" in top else None
    if test is not None:
        _check_beside(folder, "class", train.classes, test.classes)
        _check_beside(folder, "client", train.clients or (), test.clients or ())
    return Parts(folder, train, test, (*notes, *_notes([(folder / name, listing) for name, listing in read.items()])))


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
        raise DataError(f"{folder.resolve()}: no such folder; {LAYOUTS}")
    return {entry.name for entry in folder.iterdir() if entry.is_dir() and entry.name[0] != "."}


def _part(folder: Path, below: str, listing: Listing, depths: set[int]) -> Part:
    """A part whose images lie in so many folders, one below the other."""
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
        raise DataError(f"{folder}: images lie as {shown_name(first[depth])}; {LAYOUTS}")
    names = [tuple(_name(folder, part) for part in file.parts[:-1]) for file in listing.files]
    return Part(below, tuple(map(str, listing.files)), tuple(parts[-1] for parts in names),
                tuple(parts[0] for parts in names) if depth == 2 else None)


def _name(folder: Path, name: str) -> str:
    """The same name for the same letters, whatever system wrote them."""
    name = unicodedata.normalize("NFC", name)
    if not name.isprintable():
        raise DataError(f"{folder}: the folder {name!a} has letters that cannot be shown; rename it")
    return name


def _check_beside(folder: Path, what: str, train: Sequence[str], test: Sequence[str]) -> None:
    if more := sorted({*test} - {*train}):
        raise DataError(f"{folder}: train and test must hold the same {what} folders; they differ in "
                        f"{sorted({*test} ^ {*train})}, and {more[0]} has test images alone")


def _notes(read: Sequence[tuple[Path, Listing]]) -> list[str]:
    ignored = sum((listing.ignored for _, listing in read), Counter())
    notes = []
    if ignored:
        kinds = ", ".join(f"{-count} {kind}" for count, kind in sorted((-n, kind) for kind, n in ignored.items()))
        notes.append(f"{sum(ignored.values())} files are no images and were left out: {kinds}")
    if empty := [str(folder / name) for folder, listing in read for name in listing.empty]:
        notes.append(f"{len(empty)} folders hold no image and were left out: {', '.join(empty[:5])}"
                     + ", .." * (len(empty) > 5))
    return notes
