"""How code that Ray's workers cannot import gets to them: by value."""

import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

from ray import cloudpickle

from raylt.registry import Guest


def send_by_value(guests: Iterable[Guest]) -> None:
    """From now on, what is defined in the modules of guests travels with its code.

    A module of an installed package is on every node; that of a plug-in, of a script or of a file beside it is not,
    nor are the files beside it that it imports.
    """
    for guest in guests:
        module = sys.modules.get(guest.value.__module__)
        if module is None or module.__name__ == "__main__" or (folder := _own_folder(module)) is None:
            continue
        for other in list(sys.modules.values()):
            if _own_folder(other) == folder and other.__name__ != "__main__":
                cloudpickle.register_pickle_by_value(other)


def _own_folder(module: ModuleType) -> Path | None:
    """The folder of a module that is no part of Python, of an installed package or of raylt."""
    file = getattr(module, "__file__", None)
    if not file or module.__name__.partition(".")[0] in ("raylt", "actors", "tune"):
        return None
    path = Path(file).resolve()
    installed = {Path(sysconfig.get_path(kind)).resolve() for kind in ("stdlib", "purelib", "platlib")}
    return None if any(path.is_relative_to(folder) for folder in installed) else path.parent
