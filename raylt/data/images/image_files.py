"""Search for image files below a folder, with a record of all other files and folders."""

import os
import sys
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from raylt.errors import DataError, first_names

SUFFIXES = {
    ".jpg",
    ".jpeg",
    ".jpe",
    ".jfif",
    ".png",
    ".bmp",
    ".gif",
    ".ppm",
    ".pgm",
    ".pbm",
    ".pnm",
    ".tif",
    ".tiff",
    ".webp",
}
SIGNATURES = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF87a", b"GIF89a", b"II*\0", b"MM\0*")
MAX_DEPTH = 4  # levels of folders that are searched


@dataclass(frozen=True)
class Listing:
    """The image files and all other content of a folder and of its subfolders.

    Args:
        files: Images, relative to the folder, in the order of their folders' and their own names.
        ignored: Number of other files by suffix, and of links that lead back to a folder above them.
        empty: Folders that hold no image, relative to the folder; a folder within one of them is not listed.
        hidden: Hidden folders, relative to the folder; they are not searched.
    """

    files: tuple[PurePosixPath, ...]
    ignored: Counter[str]
    empty: tuple[str, ...]
    hidden: tuple[str, ...]


def list_images(folder: Path) -> Listing:
    """List the image files below a folder, recognised by suffix or by the first bytes of their content.

    Hidden files, whose names begin with a dot, do not count. Links are followed, except to a folder above them.

    Raises:
        DataError: A folder cannot be read, or is nested more deeply than any layout allows.
    """
    search = _Search(folder)
    search.read_folder(PurePosixPath(), frozenset())
    return Listing(tuple(search.files), search.ignored, tuple(search.empty), tuple(search.hidden))


class _Search:
    """A search for image files below a folder, and its results so far."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.files: list[PurePosixPath] = []
        self.ignored: Counter[str] = Counter()
        self.empty: list[str] = []
        self.hidden: list[str] = []

    def read_folder(self, inner: PurePosixPath, parents: frozenset[str]) -> None:
        """Search a folder and its subfolders for image files.

        Args:
            inner: The folder, relative to the top folder of the search.
            parents: Real paths of the folders above it.
        """
        path = self.folder / inner
        parents = parents | {os.path.realpath(path)}
        files_before = len(self.files)
        empty_before = len(self.empty)
        for name, is_folder in self._entries(path):
            if is_folder:
                self._visit(inner / name, parents)
            elif name[0] != "." and _is_image(path / name):
                self.files.append(inner / name)
            else:
                self.ignored["hidden" if name[0] == "." else Path(name).suffix.lower() or "without an ending"] += 1
        if len(self.files) == files_before and inner.parts:
            del self.empty[empty_before:]
            self.empty.append(str(inner))

    def _entries(self, path: Path) -> list[tuple[str, bool]]:
        """Return the sorted names in a folder, each with a flag that is True for a folder."""
        try:
            # isdir instead of scandir's entries, which raise an error for a link to itself
            return [(name, os.path.isdir(path / name)) for name in sorted(os.listdir(path))]
        except OSError as error:
            raise DataError(
                f"{shown_name(path)}: the folder cannot be read ({error.strerror}). Make it readable, or remove it.",
                code="data.not-readable",
                path=shown_name(path),
            ) from None

    def _visit(self, inner: PurePosixPath, parents: frozenset[str]) -> None:
        if os.path.realpath(self.folder / inner) in parents:
            self.ignored["links to a folder above"] += 1
        elif inner.name[0] == ".":
            self.hidden.append(str(inner))
        elif len(inner.parts) > MAX_DEPTH:
            raise DataError(
                f"{shown_name(self.folder / inner)}: the folder is nested more deeply below {shown_name(self.folder)} "
                "than images may be. Move it up or elsewhere.",
                code="data.wrong-layout",
                path=shown_name(self.folder / inner),
            )
        else:
            self.read_folder(inner, parents)


def notes_of(listings: Sequence[tuple[Path, Listing]]) -> list[str]:
    """Describe, in sentences, the files and folders that the given listings left out or count as one."""
    notes = []
    ignored = sum((listing.ignored for _, listing in listings), Counter[str]())
    if ignored:
        by_count = sorted((-count, kind) for kind, count in ignored.items())
        kinds = ", ".join(f"{-negative} {kind}" for negative, kind in by_count)
        files = sum(ignored.values())
        what = "1 file is not an image and was" if files == 1 else f"{files} files are not images and were"
        notes.append(f"{what} left out: {kinds}")
    empty = [folder / name for folder, listing in listings for name in listing.empty]
    hidden = [folder / name for folder, listing in listings for name in listing.hidden]
    for one, several, folders in (
        ("1 folder holds no image and was", "folders hold no image and were", empty),
        ("1 folder is hidden and was", "folders are hidden and were", hidden),
    ):
        if folders:
            names = first_names([shown_name(folder) for folder in folders], 5)
            what = one if len(folders) == 1 else f"{len(folders)} {several}"
            notes.append(f"{what} left out: {names}")
    for folder, listing in listings:
        notes += [
            f"folders below {shown_name(folder)} count as one, since their names differ only in their Unicode form: "
            f"{', '.join(map(ascii, names))}"
            for names in _one_name(listing)
        ]
    return notes


def _one_name(listing: Listing) -> list[list[str]]:
    """Return the folders in one folder whose names `plain_name` makes equal, relative to the top folder."""
    folders = {file.parts[:-1] for file in listing.files}
    spellings: dict[tuple[tuple[str, ...], str], list[str]] = {}
    for parts in sorted({folder[:depth] for folder in folders for depth in range(1, len(folder) + 1)}):
        key = parts[:-1], unicodedata.normalize("NFC", parts[-1])
        spellings.setdefault(key, []).append("/".join(parts))
    return [names for names in spellings.values() if len(names) > 1]


def plain_name(folder: Path, name: str) -> str:
    """Return a folder's name as a class or client name, in Unicode's composed form, which is the same on every system.

    Raises:
        DataError: The name has characters that cannot be printed.
    """
    name = unicodedata.normalize("NFC", name)
    if not name.isprintable():
        encoding = sys.getfilesystemencoding()  # the locale's encoding, which may differ from the folder's
        remedy = "Rename it" if encoding == "utf-8" else f"Set PYTHONUTF8=1, since names are read as {encoding}"
        raise DataError(
            f"{folder}: the name of a folder has characters that cannot be printed ({name!a}). {remedy}.",
            code="data.bad-name",
            path=shown_name(folder),
        )
    return name


def shown_name(path: str | os.PathLike[str]) -> str:
    """Return a path in printable characters.

    File names may contain invalid text or terminal control sequences.
    """
    text = os.fsencode(path).decode("utf-8", "replace")
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _is_image(path: Path) -> bool:
    if path.suffix.lower() in SUFFIXES:
        return True
    try:  # O_NONBLOCK: do not block on a FIFO
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    with os.fdopen(handle, "rb") as stream:
        start = stream.read(12) or b""
    return start.startswith(SIGNATURES) or (start[:4] == b"RIFF" and start[8:] == b"WEBP")
