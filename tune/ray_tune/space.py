"""Conversion of search spaces to Ray Tune's notation."""

from typing import Any

from ray import tune as ray_tune

from raylt.errors import ConfigError
from raylt.hyper import Choice, LogUniform
from tune.space import Grid, Space, to_text


def param_space(space: Space, grid: bool = False) -> dict[str, Any]:
    """Convert a search space to Ray Tune's notation, for `ray.tune.Tuner(param_space=...)`.

    Args:
        space: A search space from `tune.space`.
        grid: Whether each value of a choice is tried in turn.

    Raises:
        ConfigError: The space has a range of numbers, and `grid` is true.
    """
    domains: dict[str, Any] = {}
    for key, axis in space.items():
        if isinstance(axis, Grid) or (grid and isinstance(axis, Choice)):
            domains[key] = ray_tune.grid_search(list(axis.values))
        elif grid:
            raise ConfigError(
                f"{key}: a range of numbers has no grid with Ray's schedulers ({to_text(axis)}). Give the values as "
                "grid(a, b, ...).",
                code="search.bad-range",
                key=key,
                value=to_text(axis),
            )
        elif isinstance(axis, Choice):
            domains[key] = ray_tune.choice(list(axis.values))
        elif isinstance(axis, LogUniform):
            domains[key] = ray_tune.loguniform(axis.low, axis.high)
        else:
            domains[key] = ray_tune.uniform(axis.low, axis.high)
    return domains
