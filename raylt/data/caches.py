"""The caches of decoded images below data.root: what there is, and their removal."""

import os
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from pydantic import TypeAdapter
from typing_extensions import TypedDict

from raylt.data.packing import ABOUT
from raylt.errors import ConfigError, RayltError
from raylt.store import Folder


class _About(TypedDict):
    of: str
    images: int
    size: int


_ABOUT = TypeAdapter(_About)


class Cache(NamedTuple):
    """A cache of decoded images.

    Args:
        name: of its folder.
        of: the folder of images, or the data set, that it was made of.
        images, side: how many, and of how many pixels; None where it is not finished or an older raylt made it.
        size: bytes on the disk.
        made: when it was last written, as a date.
    """

    name: str
    of: str
    images: int | None
    side: int | None
    size: int
    made: str


def caches(root: Path) -> list[Cache]:
    """What there is, by name.

    Args:
        root: `data.root`.
    """
    place = root.expanduser() / "cache"
    if not place.is_dir():
        return []
    known = []
    with Folder.open(place) as folder:
        for name in folder.names():
            with suppress(RayltError), folder.inner(name) as inner:
                names = inner.names()
                if not any(file.startswith(("images.", "labels.")) for file in names):
                    continue
                about: _About | None = None
                with suppress(RayltError):
                    about = inner.read_json(ABOUT, _ABOUT)
                stats = [os.stat(place / name / file, follow_symlinks=False) for file in names]
                finished = any(file.endswith(".npy") for file in names)
                of = about["of"] if about else "made by an older raylt" if finished else "unfinished"
                known.append(Cache(name, of, about and about["images"],
                                   about and about["size"], sum(stat.st_size for stat in stats),
                                   f"{datetime.fromtimestamp(max(stat.st_mtime for stat in stats)):%Y-%m-%d %H:%M}"))
    return known


def clear(root: Path, name: str) -> list[Cache]:
    """Removes a cache, or with `all` every one.

    Returns:
        Those that were removed.

    Raises:
        ConfigError: there is none of this name, or a process is making it.
    """
    there = [cache for cache in caches(root) if name in (cache.name, "all")]
    place = root.expanduser() / "cache"
    if not there and name != "all":
        raise ConfigError(f"{name}: no cache in {place} has this name; raylt data --cache lists them")
    for cache in there:
        with Folder.open(place) as folder:
            with folder.inner(cache.name) as inner:
                if inner.held("lock"):
                    raise ConfigError(f"{place / cache.name}: a process is decoding images into it; wait until it ends")
            folder.remove(cache.name)
    return there
