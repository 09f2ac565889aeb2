"""What pydantic would let pass: texts for numbers, numbers for true and false, texts that no file can be named by."""

import types
import typing
from typing import Any, Literal

LONGEST_TEXT = 4096


def as_typed(annotation: Any, value: Any) -> Any:
    """The value, where its type is one that the annotation names.

    Raises:
        ValueError: it is of another type that could be converted, as '010' to 10 or 'yes' to true.
    """
    branches = typing.get_args(annotation) if typing.get_origin(annotation) in (typing.Union, types.UnionType) else (
        annotation,)
    words = [word for branch in branches if typing.get_origin(branch) is Literal for word in typing.get_args(branch)]
    if isinstance(value, str):
        if len(value) > LONGEST_TEXT or not value.isprintable():
            raise ValueError(f"must be a text of at most {LONGEST_TEXT} printable letters")
        if not words and str not in branches:
            for kind, name in ((int, "integer"), (float, "number"), (bool, "boolean")):
                if kind in branches:
                    raise ValueError(f"input should be a valid {name}")
        elif words and value not in words and str not in branches and (int in branches or float in branches):
            raise ValueError(f"input should be a valid {'integer' if int in branches else 'number'}")
    elif isinstance(value, bool) and bool not in branches and (int in branches or float in branches):
        raise ValueError(f"input should be a valid {'integer' if int in branches else 'number'}, not true or false")
    elif isinstance(value, int | float) and not isinstance(value, bool) and bool in branches and not (
            int in branches or float in branches):
        raise ValueError("input should be a valid boolean: true or false")
    for branch in branches:
        if typing.get_origin(branch) is tuple and isinstance(value, list | tuple):
            for kind, item in zip(typing.get_args(branch), value, strict=False):
                as_typed(kind, item)
    return value
