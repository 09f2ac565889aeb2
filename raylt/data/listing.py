"""The image files below a folder, and what else lies there."""

import os
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from raylt.errors import DataError

SUFFIXES = {".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".bmp", ".gif", ".ppm", ".pgm", ".pbm", ".pnm", ".tif", ".tiff",
            ".webp"}
SIGNATURES = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF87a", b"GIF89a", b"II*\0", b"MM\0*")
DEEPEST = 4             # folders, one below the other, that are looked into


@dataclass(frozen=True)
class Listing:
    """What lies below a folder.

    Args:
        files: images, relative to the folder, in the order of their folders' and their own names.
        ignored: how many files of which ending are no images; links that lead back to a folder above them.
        empty: folders that hold no image, relative to the folder; none in which another of them lies.
        hidden: folders that are hidden, relative to the folder; they are not looked into.
    """

    files: tuple[PurePosixPath, ...]
    ignored: Counter[str]
    empty: tuple[str, ...]
    hidden: tuple[str, ...]


def notes_of(read: Sequence[tuple[Path, Listing]]) -> list[str]:
    """What was left out below some folders, in whole sentences."""
    ignored = sum((listing.ignored for _, listing in read), Counter[str]())
    notes = []
    if ignored:
        kinds = ", ".join(f"{-count} {kind}" for count, kind in sorted((-n, kind) for kind, n in ignored.items()))
        notes.append(f"{sum(ignored.values())} files are no images and were left out: {kinds}")
    empty = [folder / name for folder, listing in read for name in listing.empty]
    hidden = [folder / name for folder, listing in read for name in listing.hidden]
    for why, folders in (("hold no image", empty), ("are hidden", hidden)):
        if folders:
            notes.append(f"{len(folders)} folders {why} and were left out: {', '.join(map(shown_name, folders[:5]))}"
                         + ", .." * (len(folders) > 5))
    return notes


def list_images(folder: Path) -> Listing:
    """The image files below a folder: those that are called so, and those that begin like one.

    What is hidden (its name begins with a dot) is no image. Links are followed, but not to a folder above.

    Raises:
        DataError: a folder cannot be looked into, or lies deeper than any layout's images.
    """
    files: list[PurePosixPath] = []
    ignored: Counter[str] = Counter()
    empty: list[str] = []
    hidden: list[str] = []

    def look(place: PurePosixPath, above: frozenset[str]) -> None:
        before, bare, path = len(files), len(empty), folder / place
        above = above | {os.path.realpath(path)}
        try:
            # isdir, not what scandir says: that raises an error for a link to itself
            names = [(name, os.path.isdir(path / name)) for name in sorted(os.listdir(path))]
        except OSError as error:
            raise DataError(f"{shown_name(path)}: cannot be looked into ({error.strerror}); make it readable or remove "
                            "it") from None
        for name, is_folder in names:
            if is_folder and os.path.realpath(path / name) in above:
                ignored["links to a folder above"] += 1
            elif is_folder and name[0] == ".":
                hidden.append(str(place / name))
            elif is_folder and len(place.parts) == DEEPEST:
                raise DataError(f"{shown_name(path / name)}: lies deeper below {shown_name(folder)} than images do; "
                                "move it up, or out of there")
            elif is_folder:
                look(place / name, above)
            elif name[0] != "." and _is_image(path / name):
                files.append(place / name)
            else:
                ignored["hidden" if name[0] == "." else Path(name).suffix.lower() or "without an ending"] += 1
        if len(files) == before and place.parts:
            del empty[bare:]
            empty.append(str(place))

    look(PurePosixPath(), frozenset())
    return Listing(tuple(files), ignored, tuple(empty), tuple(hidden))


def plain_name(folder: Path, name: str) -> str:
    """A folder's name as that of a class or client: the same for the same letters, whatever system wrote them.

    Raises:
        DataError: it has letters that cannot be shown.
    """
    name = unicodedata.normalize("NFC", name)
    if not name.isprintable():
        raise DataError(f"{folder}: the folder {name!a} has letters that cannot be shown; rename it")
    return name


def shown_name(path: str | os.PathLike[str]) -> str:
    """A path as it can be printed: a name may be no text, or hold what a terminal would obey."""
    text = os.fsencode(path).decode("utf-8", "replace")
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _is_image(path: Path) -> bool:
    if path.suffix.lower() in SUFFIXES:
        return True
    try:                                # a FIFO is not waited for
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    with os.fdopen(handle, "rb") as stream:
        start = stream.read(12) or b""
    return start.startswith(SIGNATURES) or (start[:4] == b"RIFF" and start[8:] == b"WEBP")
