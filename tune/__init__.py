"""Hyper-parameter searches for any method: `from tune import search, space`.

For Ray Tune's schedulers and searchers, use `from tune import param_space, trainable` with `ray.tune.Tuner`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tune.report.drawing import draw_pareto
from tune.report.pareto import pareto_front
from tune.search import SearchResult, resume, search
from tune.space import space, spaces_of

if TYPE_CHECKING:
    from tune.ray_tune.space import param_space
    from tune.ray_tune.trainable import model_of, trainable

__all__ = [
    "SearchResult",
    "draw_pareto",
    "model_of",
    "param_space",
    "pareto_front",
    "resume",
    "search",
    "space",
    "spaces_of",
    "trainable",
]
# Modules that import Ray, which a search in this process does not need.
_WITH_RAY = {
    "model_of": "tune.ray_tune.trainable",
    "param_space": "tune.ray_tune.space",
    "trainable": "tune.ray_tune.trainable",
}


def __getattr__(name: str) -> Any:
    if name not in _WITH_RAY:
        raise AttributeError(f"module 'tune' has no attribute {name!r}")
    return getattr(import_module(_WITH_RAY[name]), name)
