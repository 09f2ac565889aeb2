"""Federated learning for non-IID, long-tailed data, on Ray.

    run = raylt.run("sfd", data="digits", rounds=30)
    run.summary; run.metrics; run.model().predict(images)

Names are imported when they are first used: `import raylt` alone brings neither torch nor Ray.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raylt.config import load as load_config
    from raylt.core.method import Method
    from raylt.core.reductions import each, mean, total
    from raylt.errors import RayltError
    from raylt.hyper import hp
    from raylt.models.split import SplitModel
    from raylt.registry import register
    from raylt.runs.branch import branch
    from raylt.runs.callbacks import Callback
    from raylt.runs.exporting import export
    from raylt.runs.opening import load_model
    from raylt.runs.run import Run
    from raylt.runs.start import resume, run
    from raylt.studies.study import Study, study

    __version__: str

__all__ = ["Callback", "Method", "RayltError", "Run", "SplitModel", "Study", "__version__", "branch", "each",
           "export", "hp", "load_config", "load_model", "mean", "register", "resume", "run", "study", "total"]

_PLACES = {
    "Callback": ("raylt.runs.callbacks", "Callback"),
    "Method": ("raylt.core.method", "Method"),
    "RayltError": ("raylt.errors", "RayltError"),
    "Run": ("raylt.runs.run", "Run"),
    "SplitModel": ("raylt.models.split", "SplitModel"),
    "Study": ("raylt.studies.study", "Study"),
    "branch": ("raylt.runs.branch", "branch"),
    "each": ("raylt.core.reductions", "each"),
    "export": ("raylt.runs.exporting", "export"),
    "hp": ("raylt.hyper", "hp"),
    "load_config": ("raylt.config", "load"),
    "load_model": ("raylt.runs.opening", "load_model"),
    "mean": ("raylt.core.reductions", "mean"),
    "register": ("raylt.registry", "register"),
    "resume": ("raylt.runs.start", "resume"),
    "run": ("raylt.runs.start", "run"),
    "study": ("raylt.studies.study", "study"),
    "total": ("raylt.core.reductions", "total"),
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version
        value: Any = version("raylt")
    elif name in _PLACES:
        module, attribute = _PLACES[name]
        value = getattr(import_module(module), attribute)
    else:
        raise AttributeError(f"module 'raylt' has no attribute {name!r}")
    globals()[name] = value         # the next time it is found without asking
    return value


def __dir__() -> list[str]:
    return __all__
