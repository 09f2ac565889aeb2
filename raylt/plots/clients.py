"""Plot of every client's accuracy in runs over the same split (`raylt plot clients RUN [RUN ...]`)."""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rich.table import Table

from raylt.data.task import judged_images_of
from raylt.errors import CheckpointError, ConfigError, first_names, spoken, type_name
from raylt.formatting import interval_text, percent
from raylt.metrics import FEW_SAMPLES, LOCAL, worst_decile
from raylt.plots.style import COLOURS, new_figure, save_if_asked, style_axes, tick_name
from raylt.runs.run import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Metric = Literal["local", "owned", "matched", "long_tailed", "global", "miou"]
TITLES = {
    "local": "Accuracy of each client on its own test images",
    "owned": "Accuracy of each client over the classes it owns",
    "matched": "Accuracy of each client over its own class mix",
    "long_tailed": "Accuracy of each client over the class mix of all clients together",
    "global": "Accuracy of each client over all classes",
    "miou": "Mean IoU of each client over the classes it owns",
}


@dataclass(frozen=True)
class ClientComparison:
    """The final accuracy of each client in several runs.

    Attributes:
        sizes: Number of training samples of each client, [K].
        runs: Accuracy of each client, [K], by name of the run; None for clients that were not evaluated.
        owned: Number of classes that each client owns, [K].
        names: Names of the clients, [K]; by default their ids.
        tested: Number of test images behind each client's figure, [K]; None if not recorded, or for label maps.
        one_class: Names of clients with test images of a single class, whose figures say nothing.
    """

    metric: Metric
    split_sha256: str
    sizes: list[int]
    runs: dict[str, list[float | None]]
    owned: list[int]
    names: tuple[str, ...] = ()
    tested: list[int] | None = None
    one_class: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.names:
            object.__setattr__(self, "names", tuple(map(str, range(len(self.sizes)))))

    @property
    def title(self) -> str:
        return TITLES[self.metric]

    def spread(self) -> dict[str, dict[str, float]]:
        """Return the mean, standard deviation and worst decile over the clients of each run.

        If clients are evaluated on their own test images, the accuracy over all these images together is added. If some
        clients have at most two classes, the mean over the other clients is added, because a few clients with so little
        to distinguish can decide a comparison. With one class, every answer may be right; with two classes, some
        methods leave nothing to distinguish (BPFed's smoothing).
        """
        judged = {
            name: [(accuracy, n) for accuracy, n in zip(values, self.owned, strict=True) if accuracy is not None]
            for name, values in self.runs.items()
        }
        spread = {}
        for name, values in judged.items():
            figures = [accuracy for accuracy, _ in values]
            spread[name] = {
                "mean": statistics.fmean(figures),
                "deviation": statistics.pstdev(figures),
                "worst_decile": worst_decile(figures),
            }
            if self.metric == LOCAL and self.tested is not None:
                pairs = [(a, n) for a, n in zip(self.runs[name], self.tested, strict=True) if a is not None]
                spread[name]["all_images_together"] = sum(a * n for a, n in pairs) / sum(n for _, n in pairs)
            of_more_classes = [accuracy for accuracy, n in values if n > 2]
            if 0 < len(of_more_classes) < len(values):
                spread[name]["mean_of_more_than_two_classes"] = statistics.fmean(of_more_classes)
        return spread

    def table(self) -> Table:
        """Return the clients' accuracies and their spread as a table, in percent."""
        table = Table("client", "samples", *(["test images"] if self.tested else []), *self.runs)
        for k, n in enumerate(self.sizes):
            images = [str(self.tested[k])] if self.tested else []
            table.add_row(self.names[k], str(n), *images, *(self._cell(values[k], k) for values in self.runs.values()))
        table.add_section()
        spread = self.spread()
        for kind in dict.fromkeys(kind for of_run in spread.values() for kind in of_run):
            sums = [str(sum(self.tested)) if kind == "all_images_together" else ""] if self.tested else []
            table.add_row(kind.replace("_", " "), "", *sums, *(percent(spread[name].get(kind)) for name in self.runs))
        return table

    def notes(self) -> list[str]:
        """Return a notice about clients with test images of a single class, whose figures say nothing."""
        count = len(self.one_class)
        if not count:
            return []
        subject = "1 client is" if count == 1 else f"{count} clients are"
        figures = "its figure says" if count == 1 else "their figures say"
        return [f"{subject} evaluated on one class, so {figures} nothing: {first_names(self.one_class)}"]

    def _cell(self, value: float | None, client: int) -> str:
        """Format a client's accuracy, with its interval if it is based on few images."""
        images = self.tested[client] if self.tested else 0
        if value is None or self.metric != LOCAL or not 0 < images < FEW_SAMPLES:
            return percent(value)
        return f"{percent(value)} ({interval_text(value, images)})"


def draw_clients(comparison: ClientComparison, path: Path | str | None = None) -> "Figure":
    """Draw a bar chart with a group of bars per client, and a line at each run's mean (BPFed, Fig. 2).

    Args:
        comparison: The accuracies.
        path: File to save the picture to.

    Returns:
        The figure, which a notebook displays.

    Raises:
        ConfigError: The picture cannot be written.
    """
    runs = comparison.runs
    spread = comparison.spread()
    clients = range(len(comparison.sizes))
    width = 0.84 / len(runs)
    inches = min(40.0, max(7.0, 1.5 + len(clients) * (0.16 + 0.14 * len(runs))))
    names = [tick_name(name) for name in comparison.names]
    longest = max(map(len, names))
    # draw names upright if they would overlap
    upright = len(clients) * max(0.42, 0.1 * longest) > inches and longest > 3
    figure = new_figure(inches, 4.8 + (0.08 * longest if upright else 0))
    ax = figure.subplots()
    for i, (name, values) in enumerate(runs.items()):
        colour = COLOURS[i % len(COLOURS)]
        mean = 100 * spread[name]["mean"]
        positions = [k + (i - (len(runs) - 1) / 2) * width for k in clients]
        ax.bar(
            positions,
            [math.nan if a is None else 100 * a for a in values],  # no bar for clients that were not evaluated
            width,
            color=colour,
            label=f"{name}: mean {mean:.1f} %",
            edgecolor="white",
            linewidth=0.3,
            zorder=2,
        )
        ax.axhline(mean, color=colour, linestyle="--", linewidth=1, zorder=3)
    every = -(-len(clients) // max(1, int(inches / (0.25 if upright else 0.42))))
    labels = [
        f"{names[k]}{', ' if upright else chr(10)}{comparison.sizes[k]}"
        + (f" / {comparison.tested[k]}" if comparison.tested else "")
        for k in clients[::every]
    ]
    ax.set_xticks(clients[::every], labels, fontsize=9, rotation=90 if upright else 0)
    ax.set(
        xlim=(-0.6, len(clients) - 0.4),
        ylim=(0, 100),
        xlabel="client, and its training samples" + (" / test images" if comparison.tested else ""),
        ylabel="mean IoU / %" if comparison.metric == "miou" else "accuracy / %",
        title=comparison.title,
    )
    style_axes(ax)
    figure.legend(loc="outside lower center", ncols=max(1, min(len(runs), int(inches / 3))), frameon=False)
    return save_if_asked(figure, path)


def compare_clients(runs: Sequence[Run | Path | str], metric: Metric | None = None) -> ClientComparison:
    """Compare the accuracies of clients in several finished runs.

    Args:
        runs: The runs or their folders.
        metric: Accuracy to compare; by default "local" if all runs have it, otherwise "owned".

    Raises:
        CheckpointError: A run is not finished, was changed, does not have the metric, or has another split than the
            first run.
        ConfigError: The runs are not a list, or the list is empty.
    """
    finished = list({run.folder: run.finished() for run in _opened(runs)}.values())
    names = [run.name for run in finished]
    names = names if len(set(names)) == len(names) else [str(run.folder) for run in finished]
    first = finished[0].split
    for run in finished:
        if run.split.sha256 != first.sha256:
            raise other_split(run, finished[0])
    judged = {name: run.reports[-1]["by_client"] for name, run in zip(names, finished, strict=True)}
    metric = metric or ("local" if all("local" in figures for figures in judged.values()) else "owned")
    if lacking := [name for name, figures in judged.items() if metric not in figures]:
        raise CheckpointError(
            f"{spoken('--metric', 'metric')}: {lacking[0]} has no such metric of clients ({metric}). Give "
            f"{spoken('--metric owned', 'metric=' + repr('owned'))}.",
            code="study.no-figure",
            key="--metric",
            value=metric,
            run=lacking[0],
        )
    figures = {name: of_run[metric] for name, of_run in judged.items()}
    if without := [name for name, values in figures.items() if all(value is None for value in values)]:
        raise CheckpointError(
            f"{spoken('--metric', 'metric')}: no client of {without[0]} has this metric ({metric}). Give another "
            "metric.",
            code="study.no-figure",
            key="--metric",
            value=metric,
            run=without[0],
        )
    task = finished[0].task
    owned = (task.client_counts > 0).sum(1).tolist()
    judged_images = judged_images_of(task)
    tested = judged_images["own"] if metric == LOCAL else [judged_images["images"]] * task.clients
    return ClientComparison(
        metric,
        first.sha256,
        task.sizes.tolist(),
        figures,
        owned,
        first.client_names or (),
        tested if task.kind == "classification" else None,
        tuple(judged_images["one_class"]),
    )


def _opened(runs: Sequence[Run | Path | str]) -> list[Run]:
    """Return the runs of a list of runs and folders."""
    if isinstance(runs, str) or not isinstance(runs, Iterable) or not (listed := list(runs)):
        raise ConfigError(
            f"runs: is not a list of runs ({type_name(runs)}). Give a list with at least one run or run folder.",
            code="config.wrong-type",
            key="runs",
            value=type_name(runs),
        )
    return [run if isinstance(run, Run) else Run.open(run) for run in listed]


def other_split(run: Run, first: Run) -> CheckpointError:
    """Return the error for runs that use different splits."""
    return CheckpointError(
        f"{run.folder}: has another split than {first.folder} ({run.split.sha256[:16]}, {first.split.sha256[:16]}). "
        "Give runs over the same split.",
        code="run.other-split",
        path=str(run.folder),
        first=str(first.folder),
    )
