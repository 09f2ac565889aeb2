"""`recordable`: marks functions whose GPU work may be recorded once as a CUDA graph and then replayed.

A replay repeats the recorded GPU launches on the same memory; code on the host does not run again. A function that
depends on code on the host is replayed wrongly, without an error. So a function counts as recordable only if it is
marked, or belongs to raylt's own methods, which were checked. The tests compare each step of these methods, replayed,
with the same step taken one by one, to the bit.
"""

from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])
_MARK = "recordable"
_TESTED_MODULES = "raylt.methods."


def recordable(fn: Function) -> Function:
    """Declare that every call of a function launches the same GPU work on the same tensors.

    - It draws no numbers on the host: neither from `client.order` nor with Python's or NumPy's generators. It may draw
      from `client.noise` and from torch's own generator of the device.
    - It changes no Python state from call to call: no counter, no attribute that names another tensor. It changes
      tensors in place only.
    - It reads no value back (`.item()`, `if tensor:`), makes no tensor of values on the host, and its shapes follow
      from the shapes of its arguments.
    - The first two calls may differ: they are never recorded.

    On a class of layers the mark speaks of their forward functions. It holds for that class, not for its subclasses.
    """
    setattr(fn, _MARK, True)
    return fn


def not_recordable(fn: Function) -> Function:
    """Declare that calls of a function launch different GPU work.

    Without this, functions of raylt's own methods count as recordable.
    """
    setattr(fn, _MARK, False)
    return fn


def is_recordable(fn: object) -> bool:
    """Return whether the GPU work of a function may be recorded.

    An object with the attribute `recordable` may take the place of the function.
    """
    mark = getattr(fn, _MARK, None)
    if mark is not None:
        return mark is True
    return (getattr(fn, "__module__", None) or "").startswith(_TESTED_MODULES)
