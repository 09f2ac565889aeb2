"""`recordable`: marks functions whose GPU work may be recorded once as a CUDA graph and then replayed.

A replay repeats the recorded GPU launches on the same memory. Code on the host does not run again, so a function that
depends on it is replayed wrongly, without an error. Therefore a function counts as recordable only if it is marked, or
if it belongs to raylt's own methods. The tests compare each step of these methods, replayed and executed directly, bit
by bit.
"""

from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])
_MARK = "recordable"
_TESTED_MODULES = "raylt.methods."


def recordable(fn: Function) -> Function:
    """Declare that every call of a function launches the same GPU work on the same tensors.

    - It draws no random numbers on the host: neither from `client.order` nor with Python's or NumPy's generators. It
      may draw from `client.noise` and from torch's generator of the device.
    - It changes no Python state between calls, such as a counter or an attribute that refers to another tensor. It
      changes tensors in place only.
    - It reads no value back (`.item()`, `if tensor:`) and makes no tensor from values on the host. The shapes of its
      tensors depend only on the shapes of its arguments.
    - The first two calls may differ, because they are never recorded.

    On a layer class, the mark applies to the forward function of that class, but not of its subclasses.
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

    Instead of a function, `fn` may be an object with the attribute `recordable`.
    """
    mark = getattr(fn, _MARK, None)
    if mark is not None:
        return mark is True
    return (getattr(fn, "__module__", None) or "").startswith(_TESTED_MODULES)
