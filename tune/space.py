"""Search spaces: a range for each searched setting, and the values that trials take from these ranges.

A range is declared by a field of the method, or given as one of the following texts:

    loguniform(0.01, 0.3)   a float, uniform in its logarithm
    uniform(0, 1)           a float
    choice(0.1, 1)          one of the values
    grid(0, 1, 2)           all of the values, in turn
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import yaml

from raylt.config import Config, check, yaml_text
from raylt.errors import ConfigError, did_you_mean, spoken
from raylt.hyper import Choice, LogUniform, Range, Uniform, range_of
from raylt.methods import METHODS, make_method
from raylt.seeds import seed_for

DIGITS = 4  # Significant digits of a drawn float; few, so that configurations are readable.
GRID_POINTS = 3  # Values of a float's range in a grid search.


@dataclass(frozen=True)
class Grid:
    """A range whose values are used in turn."""

    values: tuple[Any, ...]

    def __str__(self) -> str:
        return "each of " + ", ".join(str(v) for v in self.values)


Axis = Range | Grid
Space = dict[str, Axis]  # Ranges by setting, such as `local.lr`.


def parse(text: str) -> Axis | None:
    """Parse a range from text; return None if the text does not look like a range.

    Raises:
        ConfigError: The text is written like a range but malformed.
    """
    match = re.fullmatch(r"\s*([a-z_]+)\((.*)\)\s*", text, re.DOTALL)
    if match is None:
        return None
    kind, inner = match.groups()
    if kind not in ("choice", "uniform", "loguniform", "grid"):
        raise _bad_range(
            text,
            "unknown kind of range",
            "Use choice(a, b, ...), uniform(low, high), loguniform(low, high) or grid(a, b, ...).",
        )
    values = _values(text, inner)
    if kind in ("choice", "grid"):
        if not values:
            raise _bad_range(text, "has no value", "Give at least one.")
        if len({repr(v) for v in values}) < len(values):
            raise _bad_range(text, "a value occurs twice", "Give each value once.")
        return Choice(*values) if kind == "choice" else Grid(tuple(values))
    if len(values) != 2 or not all(_is_number(v) for v in values):
        raise _bad_range(text, "does not have two numbers", f"Use {kind}(low, high).")
    low, high = (float(v) for v in values)
    if not low < high or (kind == "loguniform" and low <= 0):
        raise _bad_range(text, "is empty", f"Give {'0 < ' if kind == 'loguniform' else ''}low < high.")
    return LogUniform(low, high) if kind == "loguniform" else Uniform(low, high)


def to_text(axis: Axis) -> str:
    """Return the text of a range, the inverse of `parse`."""
    if isinstance(axis, Choice | Grid):
        kind = "choice" if isinstance(axis, Choice) else "grid"
        inner = yaml.safe_dump(list(axis.values), default_flow_style=True, width=math.inf).strip()[1:-1]
        return f"{kind}({inner})"
    return f"{'loguniform' if isinstance(axis, LogUniform) else 'uniform'}({axis.low!r}, {axis.high!r})"


def value_at(axis: Range, u: float) -> Any:
    """Map u in [0, 1] to a value of a range. For a choice, u must be less than 1."""
    if isinstance(axis, Choice):
        return axis.values[int(u * len(axis.values))]
    if isinstance(axis, LogUniform):
        return readable(axis, math.exp(math.log(axis.low) + u * math.log(axis.high / axis.low)))
    return readable(axis, axis.low + u * (axis.high - axis.low))


def readable(axis: Uniform | LogUniform, value: float) -> float:
    """Round a float to `DIGITS` significant digits, within its range."""
    return min(max(float(f"{value:.{DIGITS}g}"), axis.low), axis.high)


def probes(axis: Axis) -> list[Any]:
    """Return sample values of a range, for a check that the setting accepts them.

    They include both ends and some values between them, which a setting of whole numbers rejects.
    """
    if isinstance(axis, Choice | Grid):
        return list(axis.values)
    return [axis.low, axis.high, *(value_at(axis, u) for u in (0.137, 0.5, 0.811))]


def separate(overrides: Sequence[str]) -> tuple[list[str], dict[str, Axis]]:
    """Separate overrides `key=value` into settings with one value and settings with a range.

    Raises:
        ConfigError: A range is malformed, or its setting cannot be searched.
    """
    fixed = []
    ranges = {}
    for override in overrides:
        key, _, text = override.partition("=")
        axis = _parse_for(key, text)
        if axis is None:
            fixed.append(override)
        else:
            _check_searchable(key, axis)  # here, because the other settings lack a method that has a range
            ranges[key] = axis
    return fixed, ranges


def space(
    config: Config,
    ranges: Mapping[str, Axis | str] | None = None,
    fields: Sequence[str] | None = None,
    method: str | None = None,
) -> Space:
    """Return the search space of a method: the ranges that its fields declare, and the given ranges.

    Args:
        config: Settings that all trials share.
        ranges: Ranges or their texts by setting. They replace declared ranges.
        fields: Fields of the method whose declared ranges are searched; by default all fields that `config` does not
            set.
        method: Name of the method; by default the method of `config`.

    Raises:
        ConfigError: A method, field or setting is unknown, or a range is not valid for its setting.
    """
    if not isinstance(config, Config):
        raise ConfigError(
            f"space: is not given a configuration, which names the method ({config!r}). Give the result of "
            "raylt.load_config.",
            code="config.wrong-type",
            key="space",
            value=repr(config),
        )
    given = {key: axis_of(key, axis) if isinstance(axis, str) else axis for key, axis in (ranges or {}).items()}
    method = method or str(config.method["name"])
    given_fields = dict(config.method) if config.method["name"] == method else {"name": method}
    made = make_method(given_fields)
    for name in fields or ():
        if name not in type(made).model_fields:
            raise ConfigError(
                f"method.{name}: unknown field of {made.name}. {did_you_mean(name, type(made).model_fields)}Give a "
                f"field that raylt methods {made.name} lists.",
                code="search.unknown-field",
                key=f"method.{name}",
            )
    declared: Space = {
        f"method.{name}": range_of(field)
        for name, field in type(made).model_fields.items()
        if (name not in given_fields if fields is None else name in fields)
    }
    ranges_by_setting = declared | given
    for key, axis in ranges_by_setting.items():
        _check_searchable(key, axis)
        for value in probes(axis):
            configure(config, made.name, {key: value})
    return ranges_by_setting


def configure(base: Config, method: str, values: Mapping[str, Any]) -> Config:
    """Return the configuration of a trial: `base` with a method and the trial's values, resolved and checked.

    Raises:
        ConfigError: A value is not valid.
    """
    tree = base.to_tree()
    if tree["method"]["name"] != method:
        tree["method"] = {"name": method}
    for key, value in values.items():
        *parents, last = key.split(".")
        below = tree
        for name in parents:
            below = below.get(name)
            if not isinstance(below, dict):
                raise ConfigError(
                    f"{key}: unknown setting. Give one that raylt settings lists.",
                    code="config.unknown-key",
                    key=key,
                )
        below[last] = value
    config = check(Config, tree)
    made = make_method(config.method)
    return config.model_copy(update={"method": {"name": made.name, **made.model_dump(mode="json")}})


def draw(space: Space, seed: int, method: str, index: int) -> dict[str, Any]:
    """Return the random values of one trial; equal arguments give equal values.

    Values of a grid are taken in turn, so each draw is used once for every combination of the grids' values.

    Args:
        space: The ranges.
        seed: Seed of the search.
        method: Name of the method.
        index: Number of the trial.
    """
    grids = {key: axis for key, axis in space.items() if isinstance(axis, Grid)}
    turn, corner = divmod(index, math.prod(len(axis.values) for axis in grids.values()))
    values: dict[str, Any] = {}
    for key, axis in space.items():
        if isinstance(axis, Grid):
            corner, index_of_value = divmod(corner, len(axis.values))
            values[key] = axis.values[index_of_value]
        else:
            u = np.random.default_rng(seed_for(seed, "draw", method, key, turn)).random()
            values[key] = value_at(axis, u)
    return values


def combinations(space: Space) -> list[dict[str, Any]]:
    """Return the values of each trial of a grid search.

    The grid has every value of a choice or grid, and `GRID_POINTS` values of a float's range, including both ends.
    """
    choices = []
    for axis in space.values():
        if isinstance(axis, Choice | Grid):
            choices.append(list(axis.values))
        else:
            choices.append([value_at(axis, i / (GRID_POINTS - 1)) for i in range(GRID_POINTS)])
    return [dict(zip(space, values, strict=True)) for values in product(*choices)]


def spaces_of(
    methods: Sequence[str], ranges: Mapping[str, Axis], fixed: Config, only: Sequence[str] | None = None
) -> dict[str, Space]:
    """Return the search space of each method.

    A range of a field applies to the methods that have the field.

    Args:
        methods: Names of the methods.
        ranges: Given ranges by setting. They replace declared ranges.
        fixed: Settings that all trials share.
        only: Fields whose declared ranges are searched; by default all fields that `fixed` does not set.

    Raises:
        ConfigError: No method has a field, or there is nothing to search.
    """
    spaces = {}
    for method in methods:
        make_method({"name": method})
        fields = METHODS[method].model_fields
        applicable = {
            key: axis
            for key, axis in ranges.items()
            if not key.startswith("method.") or key.removeprefix("method.") in fields or len(methods) == 1
        }
        own = None if only is None else [name for name in only if name in fields]
        spaces[method] = space(fixed, applicable, own, method)
    for key in [*ranges, *(f"method.{name}" for name in only or ())]:
        if not any(key in method_space for method_space in spaces.values()):
            raise ConfigError(
                f"{key}: no searched method has this field ({', '.join(methods)}). Give one that raylt methods lists.",
                code="search.unknown-field",
                key=key,
            )
    if not any(spaces.values()):
        raise ConfigError(
            f"search: there is nothing to search, because every field has a value ({', '.join(methods)}). Give a "
            "range, as in local.lr=loguniform(0.01,0.3).",
            code="search.nothing-to-search",
        )
    return spaces


def axis_of(key: str, text: str) -> Axis:
    """Parse the range that is given for a setting.

    Raises:
        ConfigError: The text is not a range.
    """
    axis = _parse_for(key, text)
    if axis is None:
        raise ConfigError(
            f"{key}: is not a range ({text!r}). Give a range, as in loguniform(0.01,0.3).",
            code="search.bad-range",
            key=key,
            value=text,
        )
    return axis


def _parse_for(key: str, text: str) -> Axis | None:
    """Return the result of `parse`, with errors that name the setting."""
    try:
        return parse(text)
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}", code=error.code, **error.details | {"key": key}) from None


def _check_searchable(key: str, axis: Axis) -> None:
    if key == "method":
        raise ConfigError(
            f"method: cannot have a range ({to_text(axis)}). Search several methods with "
            f"{spoken('--methods a,b', 'methods=[...]')}.",
            code="search.not-searchable",
            key=key,
            value=to_text(axis),
        )
    if key.startswith(("resources.", "output.")):
        raise ConfigError(
            f"{key}: results do not depend on this setting, so it cannot be searched ({to_text(axis)}). Give it one "
            "value.",
            code="search.not-searchable",
            key=key,
            value=to_text(axis),
        )


def _bad_range(text: str, fault: str, remedy: str) -> ConfigError:
    return ConfigError(f"{text!r}: {fault}. {remedy}", code="search.bad-range", value=text)


def _values(text: str, inner: str) -> list[Any]:
    try:
        values = yaml_text.parse(f"[{inner}]")
    except ValueError:
        values = None
    if values is None or any(isinstance(v, list | dict) for v in values):
        raise _bad_range(text, "a value is neither a number nor a word", "Separate numbers or words by commas.")
    return values


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
