"""What a search draws from: a range for each setting that it varies, declared by a field of the method or given."""

import math
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np

from raylt.config import Config, check
from raylt.errors import ConfigError
from raylt.hyper import Choice, in_range, range_of
from raylt.methods import METHODS, make_method
from raylt.seeds import seed_for
from tune.axes import Axis, Grid, at, parse, probes, written

POINTS = 3              # of a float's range in a grid search

Space = dict[str, Axis]     # by setting, as in `local.lr`


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
        for value in probes(axis):
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
