"""What a search draws from: the ranges that a method's fields declare, and any setting given as a range.

    loguniform(0.01, 0.3)   a float, uniform in its logarithm
    uniform(0, 1)           a float
    choice(0.1, 1)          one of the values
    grid(0, 1, 2)           each of the values, in turn
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import yaml

from raylt.config import Config, check
from raylt.errors import ConfigError
from raylt.hyper import Choice, LogUniform, Range, Uniform, in_range, range_of
from raylt.methods import METHODS, make_method
from raylt.seeds import seed_for

DIGITS = 4              # significant ones of a drawn float: a configuration is read by people
POINTS = 3              # of a float's range in a grid search


@dataclass(frozen=True)
class Grid:
    """Each of the values in turn."""

    values: tuple[Any, ...]

    def __str__(self) -> str:
        return "each of " + ", ".join(str(v) for v in self.values)


Axis = Range | Grid
Space = dict[str, Axis]     # by setting, as in `local.lr`


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


def separate(overrides: Sequence[str]) -> tuple[list[str], dict[str, Axis]]:
    """Settings that are fixed, as they came, and those given as ranges."""
    fixed, ranges = [], {}
    for override in overrides:
        key, _, text = override.partition("=")
        try:
            axis = parse(text)
        except ConfigError as error:
            raise ConfigError(f"{key}: {error}") from None
        if axis is None:
            fixed.append(override)
        else:
            ranges[key] = axis
    return fixed, ranges


def space(config: Config, ranges: Mapping[str, Axis | str] | None = None, fields: Sequence[str] | None = None,
          method: str | None = None) -> Space:
    """The space of a method: the ranges that its fields declare, and those given.

    Args:
        config: the settings that all trials share.
        ranges: by setting, as `parse` reads them; they stand before what a field declares.
        fields: of the method, whose declared ranges are searched; by default all that `config` does not give.
        method: the one that `config` names by default.

    Raises:
        ConfigError: unknown method or setting, or a range that a setting cannot have.
    """
    given = {key: _axis(key, value) for key, value in (ranges or {}).items()}
    method = method or str(config.method["name"])
    of_method = dict(config.method) if config.method["name"] == method else {"name": method}
    made = make_method(of_method)
    declared: Space = {f"method.{name}": range_of(field) for name, field in type(made).model_fields.items()
                       if (name not in of_method if fields is None else name in fields)}
    found = declared | given
    for key, axis in found.items():
        if key == "method" or key.startswith(("resources.", "output.")):
            raise ConfigError(f"{key} = {written(axis)}: decides no result, so it cannot be searched" if key != "method"
                              else "method: several are searched with --methods a,b")
        for value in _probes(axis):
            configure(config, made.name, {key: value})
    return found


def configure(base: Config, method: str, values: Mapping[str, Any]) -> Config:
    """`base` with a method and the values of a trial, everything resolved and checked.

    Raises:
        ConfigError: a value is not valid.
    """
    tree = base.model_dump(mode="json")
    if tree["method"]["name"] != method:
        tree["method"] = {"name": method}
    for key, value in values.items():
        *parents, last = key.split(".")
        below = tree
        for name in parents:
            below = below.get(name)
            if not isinstance(below, dict):
                raise ConfigError(f"{key}: no such setting; raylt settings lists them")
        below[last] = value
    config = check(Config, tree)
    made = make_method(config.method)
    return config.model_copy(update={"method": {"name": made.name, **made.model_dump(mode="json")}})


def draw(space: Space, seed: int, method: str, index: int) -> dict[str, Any]:
    """The values of one trial at random: a function of its arguments alone, the same on every machine.

    A grid's values come in turn, so with grids each draw is used once for every combination of their values.
    """
    grids = {key: axis for key, axis in space.items() if isinstance(axis, Grid)}
    turn, corner = divmod(index, math.prod(len(axis.values) for axis in grids.values()))
    values: dict[str, Any] = {}
    for key, axis in space.items():
        if isinstance(axis, Grid):
            corner, place = divmod(corner, len(axis.values))
            values[key] = axis.values[place]
        else:
            u = np.random.default_rng(seed_for(seed, "draw", method, key, turn)).random()
            values[key] = at(axis, u)
    return values


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


def combinations(space: Space) -> list[dict[str, Any]]:
    """All trials of a grid search: every value of a choice or grid, `POINTS` of a float's range, ends included."""
    points = [list(axis.values) if isinstance(axis, Choice | Grid)
              else [at(axis, i / (POINTS - 1)) for i in range(POINTS)] for axis in space.values()]
    return [dict(zip(space, values, strict=True)) for values in product(*points)]


def contains(space: Space, values: Mapping[str, Any]) -> bool:
    """Whether a search of this space could have drawn these values."""
    return values.keys() == space.keys() and all(
        values[key] in axis.values if isinstance(axis, Grid) else in_range(values[key], axis)
        for key, axis in space.items())


def spaces_of(methods: Sequence[str], ranges: Mapping[str, Axis], fixed: Config,
              only: Sequence[str] | None = None) -> dict[str, Space]:
    """The space of each method; a range of a method's field goes to the methods that have it.

    Args:
        only: the fields whose declared ranges are searched; by default all that `fixed` does not give.

    Raises:
        ConfigError: no method has the field, or there is nothing to search.
    """
    found = {}
    for method in methods:
        make_method({"name": method})
        fields = METHODS[method].model_fields
        mine = {key: axis for key, axis in ranges.items()
                if not key.startswith("method.") or key.removeprefix("method.") in fields or len(methods) == 1}
        found[method] = space(fixed, mine, only, method)
    for key in [*ranges, *(f"method.{name}" for name in only or ())]:
        if not any(key in its for its in found.values()):
            raise ConfigError(f"{key}: none of {', '.join(methods)} has this field to search; raylt methods lists them")
    if not any(found.values()):
        raise ConfigError(f"nothing to search: {', '.join(methods)} has no field with a range that is not given; "
                          "give a range, as in local.lr=loguniform(0.01,0.3)")
    return found


def _axis(key: str, value: Axis | str) -> Axis:
    if not isinstance(value, str):
        return value
    axis = parse(value)
    if axis is None:
        raise ConfigError(f"{key} = {value!r}: not a range; write one as in loguniform(0.01,0.3)")
    return axis


def _values(text: str, inner: str) -> list[Any]:
    try:
        values = yaml.safe_load(f"[{inner}]")
    except yaml.YAMLError:
        values = None
    if values is None or any(isinstance(v, list | dict) for v in values):
        raise ConfigError(f"{text!r}: its values must be plain numbers or words, separated by commas")
    return [_number(v) if isinstance(v, str) else v for v in values]


def _number(text: str) -> str | float:
    """YAML 1.1 reads 1e-5 as a string; people mean the number."""
    try:
        return float(text)
    except ValueError:
        return text


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _probes(axis: Axis) -> list[Any]:
    """Values that show whether a setting can have this range: the ends, and some between (for whole numbers)."""
    if isinstance(axis, Choice | Grid):
        return list(axis.values)
    return [axis.low, axis.high, *(at(axis, u) for u in (0.137, 0.5, 0.811))]
