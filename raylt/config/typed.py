"""Type checks stricter than pydantic's, which converts strings to numbers and numbers to booleans."""

import types
import typing
from collections.abc import Sequence
from typing import Any, Literal, LiteralString

from pydantic_core import PydanticCustomError

MAX_TEXT_LENGTH = 4096


def as_typed(annotation: Any, value: Any) -> Any:
    """Return a value if its type matches an annotation.

    Raises:
        PydanticCustomError: The value has another type that pydantic would convert, such as '010' to 10, 'yes' to true,
            or true to 1.
    """
    branches = (
        typing.get_args(annotation)
        if typing.get_origin(annotation) in (typing.Union, types.UnionType)
        else (annotation,)
    )
    words = [word for branch in branches if typing.get_origin(branch) is Literal for word in typing.get_args(branch)]
    takes_numbers = int in branches or float in branches
    if isinstance(value, str):
        if len(value) > MAX_TEXT_LENGTH or not value.isprintable():
            template = "is not a string of at most {limit} printable characters"
            raise PydanticCustomError("text", template, {"limit": MAX_TEXT_LENGTH})
        if str not in branches and value not in words and (takes_numbers or (bool in branches and not words)):
            raise PydanticCustomError("type", _mismatch(branches))
    elif isinstance(value, bool):
        if takes_numbers and bool not in branches:
            raise PydanticCustomError("type", _mismatch(branches))
        if any(value == word and not isinstance(word, bool) for word in words):  # 1 of Literal[1, 3]
            raise PydanticCustomError("literal_error", "is not an allowed value")
    elif isinstance(value, int | float) and bool in branches and not takes_numbers:
        raise PydanticCustomError("type", _mismatch(branches))
    for branch in branches:
        if typing.get_origin(branch) is tuple and isinstance(value, list | tuple):
            for kind, item in zip(typing.get_args(branch), value, strict=False):
                as_typed(kind, item)
    return value


def _mismatch(branches: Sequence[Any]) -> LiteralString:
    """Return the message for a value that does not have an expected type."""
    if float in branches:
        return "is not a number"
    return "is not a whole number" if int in branches else "is not true or false"
