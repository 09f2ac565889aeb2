"""`hp()`: declare a hyper-parameter with its default, checks, search range and source."""

import math
from dataclasses import dataclass
from typing import Any

from pydantic import Field
from pydantic.fields import FieldInfo
from pydantic_core import PydanticKnownError

from raylt.errors import ConfigError

MAX_FLOAT = 1e30  # Maximum magnitude of a float in a method's field.
MAX_INT = 2**53  # Maximum magnitude of an integer there; torch accepts at most 64 bits.


@dataclass(frozen=True)
class Choice:
    """A search range that consists of the given values."""

    values: tuple[Any, ...]

    def __init__(self, *values: Any):
        object.__setattr__(self, "values", values)

    def __str__(self) -> str:
        return "{" + ", ".join(str(v) for v in self.values) + "}"


@dataclass(frozen=True)
class Uniform:
    """A search range of floats in [low, high], sampled uniformly."""

    low: float
    high: float

    def __str__(self) -> str:
        return f"[{self.low:g}, {self.high:g}]"


@dataclass(frozen=True)
class LogUniform:
    """A search range of floats in [low, high], sampled uniformly in the logarithm."""

    low: float
    high: float

    def __str__(self) -> str:
        return f"[{self.low:g}, {self.high:g}] log"


Range = Choice | Uniform | LogUniform


def not_too_large(value: Any) -> Any:
    """Return a field's value, unless it is a number of a very large magnitude.

    Computing with such a number would raise an OverflowError in the middle of a run.

    Raises:
        PydanticKnownError: The magnitude is too large; the error is the one for a number above `le` or below `ge`.
    """
    if not isinstance(value, int | float):
        return value
    largest = MAX_FLOAT if isinstance(value, float) else MAX_INT
    if value > largest:
        raise PydanticKnownError("less_than_equal", {"le": largest})
    if value < -largest:
        raise PydanticKnownError("greater_than_equal", {"ge": -largest})
    return value


def hp(default: Any, range: Range, source: str, **checks: Any) -> Any:
    """Declare a pydantic field that also carries its search range and its source.

    Args:
        default: The paper's value.
        range: The values from which a search draws, including the default.
        source: The meaning of the field and its equation or section, in a few words.
        checks: Constraints of pydantic (`ge`, `gt`, `le`, `lt`).
    """
    extra: Any = {"range": range}
    return Field(default, description=source, json_schema_extra=extra, **checks)


def range_of(field: FieldInfo) -> Range:
    """Return the search range that `hp` declared for a field.

    Raises:
        KeyError: `hp` did not declare this field.
    """
    extra: Any = field.json_schema_extra or {}
    return extra["range"]


def check_ends(low: str, low_value: float, high: str, high_value: float) -> None:
    """Check that the lower end of an interval in a method's fields does not exceed the upper end.

    Args:
        low: Name of the field with the lower end.
        low_value: Its value.
        high: Name of the field with the upper end.
        high_value: Its value.

    Raises:
        ConfigError: The lower end is larger.
    """
    if low_value > high_value:
        raise ConfigError(
            f"method.{low}: is larger than method.{high} ({low_value:g} > {high_value:g}). Give a "
            f"{low} of at most {high}.",
            code="config.out-of-range",
            key=f"method.{low}",
            value=low_value,
        )


def in_range(value: Any, range: Range) -> bool:
    """Return whether a value lies in a search range."""
    if isinstance(range, Choice):
        return value in range.values
    return isinstance(value, int | float) and math.isfinite(value) and range.low <= value <= range.high
