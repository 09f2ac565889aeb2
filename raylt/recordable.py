"""`recordable`: the word of a function that it may be recorded once and replayed, as a CUDA graph is.

What is replayed launches what was launched while it was recorded, on the same memory, whatever the host does meanwhile.
A function that does more than launch is replayed wrongly without any error, so nobody is taken to be recordable who
does not say so.
"""

from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])
_WORD = "recordable"


def recordable(fn: Function) -> Function:
    """Declares that each call of a function launches the same on a device, with the same tensors.

    - It draws nothing on the host: neither from `client.order` nor with Python's or NumPy's generators. It may draw
      from `client.noise` and from torch's own generator of the device.
    - It changes no state of Python's from call to call: no counter, no attribute that names another tensor. What it
      changes, it changes in place.
    - It reads no value back (`.item()`, `if tensor:`), makes no tensor of the host's values, and its shapes follow from
      those of its arguments.
    - The first two calls may differ: they are never recorded.

    A class of layers declares it of their forward functions, for itself and not for those that inherit from it.
    """
    setattr(fn, _WORD, True)
    return fn


def is_recordable(fn: object) -> bool:
    """Whether it was declared; what holds recordable functions may say so itself, by an attribute of this name."""
    return getattr(fn, _WORD, False) is True
