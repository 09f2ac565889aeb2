"""What one setting is searched over: the range that a method's field declares, or a text like one of these.

    loguniform(0.01, 0.3)   a float, uniform in its logarithm
    uniform(0, 1)           a float
    choice(0.1, 1)          one of the values
    grid(0, 1, 2)           each of the values, in turn
"""

import math
import re
from dataclasses import dataclass
from typing import Any

import yaml

from raylt.config import notation
from raylt.errors import ConfigError
from raylt.hyper import Choice, LogUniform, Range, Uniform

DIGITS = 4              # significant ones of a drawn float: a configuration is read by people


@dataclass(frozen=True)
class Grid:
    """Each of the values in turn."""

    values: tuple[Any, ...]

    def __str__(self) -> str:
        return "each of " + ", ".join(str(v) for v in self.values)


Axis = Range | Grid


def parse(text: str) -> Axis | None:
    """The range that a text describes; None when it is not written like one.

    Raises:
        ConfigError: it is written like one and is none; says what is wrong.
    """
    match = re.fullmatch(r"\s*([a-z_]+)\((.*)\)\s*", text, re.DOTALL)
    if match is None:
        return None
    kind, inner = match.groups()
    if kind not in ("choice", "uniform", "loguniform", "grid"):
        raise ConfigError(f"{text!r}: no such range; there are choice(a, b, ...), uniform(low, high), "
                          "loguniform(low, high) and grid(a, b, ...)")
    values = _values(text, inner)
    if kind in ("choice", "grid"):
        if not values:
            raise ConfigError(f"{text!r}: needs one value at least")
        if len({repr(v) for v in values}) < len(values):
            raise ConfigError(f"{text!r}: a value is given twice; give each once")
        return Choice(*values) if kind == "choice" else Grid(tuple(values))
    if len(values) != 2 or not all(_is_number(v) for v in values):
        raise ConfigError(f"{text!r}: needs two numbers, {kind}(low, high)")
    low, high = (float(v) for v in values)
    if not low < high or (kind == "loguniform" and low <= 0):
        raise ConfigError(f"{text!r}: must have {'0 < ' if kind == 'loguniform' else ''}low < high")
    return LogUniform(low, high) if kind == "loguniform" else Uniform(low, high)


def written(axis: Axis) -> str:
    """The text that `parse` reads as this range."""
    if isinstance(axis, Choice | Grid):
        kind = "choice" if isinstance(axis, Choice) else "grid"
        inner = yaml.safe_dump(list(axis.values), default_flow_style=True, width=math.inf).strip()[1:-1]
        return f"{kind}({inner})"
    return f"{'loguniform' if isinstance(axis, LogUniform) else 'uniform'}({axis.low!r}, {axis.high!r})"


def at(axis: Range, u: float) -> Any:
    """The value of a range at u in [0, 1)."""
    if isinstance(axis, Choice):
        return axis.values[int(u * len(axis.values))]
    if isinstance(axis, LogUniform):
        return readable(axis, math.exp(math.log(axis.low) + u * math.log(axis.high / axis.low)))
    return readable(axis, axis.low + u * (axis.high - axis.low))


def readable(axis: Uniform | LogUniform, value: float) -> float:
    """A float with few digits, still inside its range."""
    return min(max(float(f"{value:.{DIGITS}g}"), axis.low), axis.high)


def probes(axis: Axis) -> list[Any]:
    """Values that show whether a setting can have this range: the ends, and some between (for whole numbers)."""
    if isinstance(axis, Choice | Grid):
        return list(axis.values)
    return [axis.low, axis.high, *(at(axis, u) for u in (0.137, 0.5, 0.811))]


def _values(text: str, inner: str) -> list[Any]:
    try:
        values = notation.parse(f"[{inner}]")
    except ValueError:
        values = None
    if values is None or any(isinstance(v, list | dict) for v in values):
        raise ConfigError(f"{text!r}: its values must be plain numbers or words, separated by commas")
    return values


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
