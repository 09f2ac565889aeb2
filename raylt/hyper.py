"""`hp()`: a hyper-parameter declared once, with its default, its check, its search range and its source."""

import math
from dataclasses import dataclass
from typing import Any

from pydantic import Field
from pydantic.fields import FieldInfo


@dataclass(frozen=True)
class Choice:
    """One of the given values."""

    values: tuple[Any, ...]

    def __init__(self, *values: Any):
        object.__setattr__(self, "values", values)

    def __str__(self) -> str:
        return "{" + ", ".join(str(v) for v in self.values) + "}"


@dataclass(frozen=True)
class Uniform:
    """A float in [low, high]."""

    low: float
    high: float

    def __str__(self) -> str:
        return f"[{self.low:g}, {self.high:g}]"


@dataclass(frozen=True)
class LogUniform:
    """A float in [low, high], uniform in its logarithm."""

    low: float
    high: float

    def __str__(self) -> str:
        return f"[{self.low:g}, {self.high:g}] log"


Range = Choice | Uniform | LogUniform


def hp(default: Any, range: Range, source: str, **checks: Any) -> Any:
    """A pydantic field that also says where to search and where it comes from.

    Args:
        default: the paper's value.
        range: what a search draws from; the default lies in it.
        source: what it is and its equation or section, in a few words.
        checks: pydantic's own constraints (`ge`, `gt`, `le`, `lt`).
    """
    extra: Any = {"range": range}
    return Field(default, description=source, json_schema_extra=extra, **checks)


def range_of(field: FieldInfo) -> Range:
    """The search range that `hp` declared; a KeyError means the field was not declared by `hp`."""
    extra: Any = field.json_schema_extra or {}
    return extra["range"]


def in_range(value: Any, range: Range) -> bool:
    """Whether a search could have drawn this value."""
    if isinstance(range, Choice):
        return value in range.values
    return math.isfinite(value) and range.low <= value <= range.high
