"""Federated learning for non-IID, long-tailed data, on Ray.

    run = raylt.run("sfd", data="digits", rounds=30)
    run.summary; run.metrics; run.model().predict(images)

`__all__` is the whole public interface, for users and for authors of methods, models, data sources and callbacks. The
modules below this one are internal. Each name is imported when it is first used: `import raylt` alone loads neither
torch nor Ray.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import raylt.tree as tree
    from raylt.config import Config, DataConfig
    from raylt.config import load as load_config
    from raylt.core.client import Client, Message, Reply
    from raylt.core.fleet.aggregation import Replies
    from raylt.core.fleet.cohort import Cohort
    from raylt.core.fleet.fleet import Fleet
    from raylt.core.fleet.reductions import Reduction, each, mean, total
    from raylt.core.method import Method
    from raylt.core.report import RoundReport
    from raylt.core.server import Server, ServerAdam, ServerMomentum, ServerOptimiser, ServerYogi
    from raylt.core.training.features import features
    from raylt.core.training.fit_classifier import fit_classifier
    from raylt.core.training.loss_terms import Objective, Terms
    from raylt.core.training.sgd import autocast, balanced, learning_rate, sgd, take_statistics
    from raylt.data.augment import Augmentation
    from raylt.data.samples import Batch
    from raylt.data.sources.arrays import ProblemKind, Source
    from raylt.data.task import Task, TaskSpec
    from raylt.errors import (
        BudgetSpent,
        CheckpointError,
        ClientError,
        ConfigError,
        DataError,
        DiskFull,
        Diverged,
        RayltError,
        ServerLost,
        TooFewReplies,
    )
    from raylt.hyper import Choice, LogUniform, Uniform, hp
    from raylt.models.split import SplitModel, StateDict, linear, load_entries, with_classifier
    from raylt.ops.moments import pooled_means, weighted_class_means
    from raylt.plots.clients import compare_clients, draw_clients
    from raylt.plots.data import draw_data
    from raylt.recordability import recordable
    from raylt.registry import register
    from raylt.runs.callbacks.base import Callback
    from raylt.runs.callbacks.prediction_grid import Picture
    from raylt.runs.callbacks.trackers import trackers
    from raylt.runs.continuation import branch
    from raylt.runs.export.export import export
    from raylt.runs.export.load import load_model
    from raylt.runs.run import Run
    from raylt.runs.start import resume, run
    from raylt.seeds import seed_for
    from raylt.studies.study import Study, study
    from raylt.tree import Tree

    __version__: str

__all__ = [  # noqa: RUF022 - in groups
    "__version__",
    # runs
    "Run",
    "branch",
    "export",
    "load_model",
    "resume",
    "run",
    # callbacks
    "Callback",
    "Picture",
    "RoundReport",
    "trackers",
    # studies
    "Study",
    "study",
    # pictures
    "compare_clients",
    "draw_clients",
    "draw_data",
    # methods
    "ProblemKind",
    "Method",
    "Objective",
    "Terms",
    "recordable",
    "register",
    "seed_for",
    # clients and server
    "Client",
    "Cohort",
    "Fleet",
    "Message",
    "Replies",
    "Reply",
    "Server",
    "Tree",
    "tree",
    # reductions
    "Reduction",
    "each",
    "mean",
    "total",
    # training
    "Batch",
    "autocast",
    "balanced",
    "weighted_class_means",
    "features",
    "fit_classifier",
    "learning_rate",
    "pooled_means",
    "sgd",
    "take_statistics",
    # server optimisers
    "ServerAdam",
    "ServerMomentum",
    "ServerOptimiser",
    "ServerYogi",
    # models
    "StateDict",
    "SplitModel",
    "linear",
    "load_entries",
    "with_classifier",
    # data
    "Augmentation",
    "TaskSpec",
    "Source",
    "Task",
    # settings
    "Choice",
    "Config",
    "DataConfig",
    "LogUniform",
    "Uniform",
    "hp",
    "load_config",
    # errors
    "BudgetSpent",
    "CheckpointError",
    "ClientError",
    "ConfigError",
    "DataError",
    "DiskFull",
    "Diverged",
    "RayltError",
    "ServerLost",
    "TooFewReplies",
]

# The imports above once more, for `__getattr__`; tests/test_public_interface.py checks that both agree.
_SUBMODULES = {"tree": "raylt.tree"}
_MODULES = {
    "raylt.config": ("Config", "DataConfig", "load as load_config"),
    "raylt.core.client": ("Client", "Message", "Reply"),
    "raylt.core.report": ("RoundReport",),
    "raylt.core.fleet.aggregation": ("Replies",),
    "raylt.core.fleet.cohort": ("Cohort",),
    "raylt.core.fleet.fleet": ("Fleet",),
    "raylt.core.fleet.reductions": ("Reduction", "each", "mean", "total"),
    "raylt.core.method": ("Method",),
    "raylt.core.server": ("Server", "ServerAdam", "ServerMomentum", "ServerOptimiser", "ServerYogi"),
    "raylt.core.training.features": ("features",),
    "raylt.core.training.fit_classifier": ("fit_classifier",),
    "raylt.core.training.loss_terms": ("Objective", "Terms"),
    "raylt.core.training.sgd": ("autocast", "balanced", "learning_rate", "sgd", "take_statistics"),
    "raylt.data.augment": ("Augmentation",),
    "raylt.data.samples": ("Batch",),
    "raylt.data.sources.arrays": ("ProblemKind", "Source"),
    "raylt.data.task": ("TaskSpec", "Task"),
    "raylt.errors": (
        "BudgetSpent",
        "CheckpointError",
        "ClientError",
        "ConfigError",
        "DataError",
        "DiskFull",
        "Diverged",
        "RayltError",
        "ServerLost",
        "TooFewReplies",
    ),
    "raylt.hyper": ("Choice", "LogUniform", "Uniform", "hp"),
    "raylt.models.split": ("StateDict", "SplitModel", "linear", "load_entries", "with_classifier"),
    "raylt.ops.moments": ("weighted_class_means", "pooled_means"),
    "raylt.plots.clients": ("compare_clients", "draw_clients"),
    "raylt.plots.data": ("draw_data",),
    "raylt.recordability": ("recordable",),
    "raylt.registry": ("register",),
    "raylt.runs.callbacks.base": ("Callback",),
    "raylt.runs.callbacks.prediction_grid": ("Picture",),
    "raylt.runs.callbacks.trackers": ("trackers",),
    "raylt.runs.continuation": ("branch",),
    "raylt.runs.export.export": ("export",),
    "raylt.runs.export.load": ("load_model",),
    "raylt.runs.run": ("Run",),
    "raylt.runs.start": ("resume", "run"),
    "raylt.seeds": ("seed_for",),
    "raylt.studies.study": ("Study", "study"),
    "raylt.tree": ("Tree",),
}
# public name: (module, name in this module)
_EXPORTS = {entry.split()[-1]: (module, entry.split()[0]) for module, entries in _MODULES.items() for entry in entries}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("raylt")
    elif name in _SUBMODULES:
        value = import_module(_SUBMODULES[name])
    elif name in _EXPORTS:
        module, attribute = _EXPORTS[name]
        value = getattr(import_module(module), attribute)
    else:
        raise AttributeError(f"module 'raylt' has no attribute {name!r}")
    globals()[name] = value  # later accesses do not call this function
    return value


def __dir__() -> list[str]:
    return __all__
