"""`function_name`: the name of a client function, on which the seeds of its calls depend."""

from collections.abc import Callable
from functools import partial
from typing import Any

from raylt.errors import ConfigError, type_name


def function_name(fn: Callable[..., Any]) -> str:
    """Return the name of a function; of a functools.partial without a name, the name of its function.

    Raises:
        ConfigError: The function has no name.
    """
    name = getattr(fn, "__name__", None)
    if isinstance(name, str):
        return name
    if isinstance(fn, partial):
        return function_name(fn.func)
    raise ConfigError(
        f"fleet: a call needs a function with a name ({type_name(fn)}). Give a function, a method, or a "
        "functools.partial of one.",
        code="method.wrong-argument",
        key="fleet",
    )
