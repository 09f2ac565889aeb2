"""Implementation of `Run.plot`, `Study.plot` and `Comparison.plot`."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from raylt.errors import ConfigError, did_you_mean
from raylt.plots.arms import draw_arms
from raylt.plots.classes import confusion_of, draw_classes, draw_confusion
from raylt.plots.client_groups import draw_clusters
from raylt.plots.clients import compare_clients, draw_clients
from raylt.plots.curves import Over, draw_curves
from raylt.plots.data import draw_data
from raylt.plots.features import draw_features
from raylt.plots.predictions import draw_predictions
from raylt.runs.run import PictureKind, Run
from raylt.studies.analysis.comparison import Comparison
from raylt.studies.report.comparison_tables import Spread
from raylt.studies.study import Study, of_runs

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_run(run: Run, kind: PictureKind, path: Path | str | None) -> "Figure":
    """Draw a plot of a run; see `Run.plot`.

    Raises:
        ConfigError: The kind is unknown.
    """
    if kind == "data":
        return draw_data(run.task, path)
    if kind == "clusters":
        return draw_clusters(run, path=path)
    run = run.finished()
    if kind == "features":
        return draw_features(run, path)
    if kind == "predictions":
        return draw_predictions(run, path=path)
    if kind == "curves":
        return draw_curves(of_runs([run.folder]), path=path)
    if kind == "clients":
        return draw_clients(compare_clients([run]), path)
    if kind == "classes":
        return draw_classes(confusion_of(run), path)
    if kind == "confusion":
        return draw_confusion(confusion_of(run), path)
    kinds = get_args(PictureKind)
    raise ConfigError(
        f"kind: unknown picture of a run ({kind}). {did_you_mean(kind, kinds)}Give one of {', '.join(kinds)}.",
        code="config.unknown-name",
        key="kind",
        value=kind,
    )


def draw_study(study: Study, measures: Sequence[str], over: Over, spread: Spread, path: Path | str | None) -> "Figure":
    """Draw the curves of a study; see `Study.plot`."""
    return draw_curves(study, measures, over, spread, path)


def draw_comparison(comparison: Comparison, path: Path | str | None) -> "Figure":
    """Draw the arms of a comparison; see `Comparison.plot`."""
    return draw_arms([comparison], path)
