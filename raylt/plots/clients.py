"""`raylt plot clients RUN [RUN ...]`: the accuracy of every client, of one run or of several over the same split."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.table import Table

from raylt.errors import CheckpointError
from raylt.metrics import worst_decile
from raylt.plots.style import COLOURS, new_figure, plain, plain_text, save
from raylt.runs.run import Run
from raylt.runs.summary import percent

Metric = Literal["local", "owned", "matched", "global", "miou"]
WHAT = {"local": "Accuracy of each client on its own test images",
        "owned": "Accuracy of each client over the classes it owns", "matched": "Accuracy of each client over its own "
        "class mix", "global": "Accuracy of each client over all classes", "miou": "Mean IoU of each client over the "
        "classes it owns"}


@dataclass(frozen=True)
class Comparison:
    """Accuracy of each client at the end of some runs.

    Attributes:
        sizes: training samples of each client, [K].
        runs: of each run by its name, one accuracy per client, [K]; None for a client that is not judged.
        owned: classes that each client owns, [K].
        names: of each client, [K]; by default their numbers.
    """

    metric: Metric
    split_sha256: str
    sizes: list[int]
    runs: dict[str, list[float | None]]
    owned: list[int]
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.names:
            object.__setattr__(self, "names", tuple(map(str, range(len(self.sizes)))))

    @property
    def title(self) -> str:
        return WHAT[self.metric]

    def spread(self) -> dict[str, dict[str, float]]:
        """Of each run: mean, standard deviation and worst decile over its clients; and, where there are some of at most
        two classes, the mean over the others.

        With two classes some methods leave a client nothing to tell (BPFed's smoothing), and with one every answer may
        be right: a few such clients can decide a comparison.
        """
        judged = {name: [(a, n) for a, n in zip(values, self.owned, strict=True) if a is not None]
                  for name, values in self.runs.items()}
        spread = {}
        for name, values in judged.items():
            figures = [a for a, _ in values]
            spread[name] = {"mean": statistics.fmean(figures), "deviation": statistics.pstdev(figures),
                            "worst_decile": worst_decile(figures)}
            others = [a for a, n in values if n > 2]
            if 0 < len(others) < len(values):
                spread[name]["mean_of_more_than_two_classes"] = statistics.fmean(others)
        return spread

    def table(self) -> Table:
        """As a person reads it, in percent."""
        table = Table("client", "samples", *self.runs)
        for k, n in enumerate(self.sizes):
            table.add_row(self.names[k], str(n), *(percent(values[k]) for values in self.runs.values()))
        table.add_section()
        spread = self.spread()
        for kind in dict.fromkeys(kind for of_run in spread.values() for kind in of_run):
            table.add_row(kind.replace("_", " "), "", *(percent(spread[name].get(kind)) for name in self.runs))
        return table


def draw_clients(comparison: Comparison, path: Path) -> Path:
    """Writes a bar chart: a group of bars per client, a line at each run's mean (the paper of BPFed, Fig. 2).

    Returns:
        The picture's path.

    Raises:
        ConfigError: it cannot be written there.
    """
    runs, spread = comparison.runs, comparison.spread()
    clients, width = range(len(comparison.sizes)), 0.84 / len(runs)
    inches = min(40.0, max(7.0, 1.5 + len(clients) * (0.16 + 0.14 * len(runs))))
    figure = new_figure(inches, 4.8)
    ax = figure.subplots()
    for i, (name, values) in enumerate(runs.items()):
        colour, mean = COLOURS[i % len(COLOURS)], 100 * spread[name]["mean"]
        places = [k + (i - (len(runs) - 1) / 2) * width for k in clients]
        ax.bar(places, [100 * (a or 0) for a in values], width, color=colour, label=f"{name}: mean {mean:.1f} %",
               edgecolor="white", linewidth=0.3, zorder=2)
        ax.axhline(mean, color=colour, linestyle="--", linewidth=1, zorder=3)
    longest = max(map(len, comparison.names))
    # long names would meet, so they stand
    upright = len(clients) * max(0.42, 0.1 * longest) > inches and longest > 3
    every = -(-len(clients) // max(1, int(inches / (0.25 if upright else 0.42))))
    labels = [f"{plain_text(comparison.names[k])}{', ' if upright else chr(10)}{comparison.sizes[k]}"
              for k in clients[::every]]
    ax.set_xticks(clients[::every], labels, fontsize=9, rotation=90 if upright else 0)
    ax.set(xlim=(-0.6, len(clients) - 0.4), ylim=(0, 100), xlabel="client, and its training samples",
           ylabel="mean IoU / %" if comparison.metric == "miou" else "accuracy / %", title=comparison.title)
    plain(ax)
    figure.legend(loc="outside lower center", ncols=max(1, min(len(runs), int(inches / 3))), frameon=False)
    return save(figure, path)


def compare(runs: Sequence[Run], metric: Metric | None = None) -> Comparison:
    """The clients of finished runs side by side.

    Args:
        metric: by default local where all clients were judged on test images of their own, else owned.

    Raises:
        CheckpointError: a run is not finished, was changed, or has another split than the first.
    """
    runs = list({run.folder: run.finished() for run in runs}.values())
    names = [run.name for run in runs]
    names = names if len(set(names)) == len(names) else [str(run.folder) for run in runs]
    first = runs[0].split
    for run in runs:
        if run.split.sha256 != first.sha256:
            raise CheckpointError(f"{run.folder}: its clients hold other samples (split {run.split.sha256[:16]}) than "
                                  f"those of {runs[0].folder} ({first.sha256[:16]}); give runs over the same split")
    judged = {name: _last_figures(run) for name, run in zip(names, runs, strict=True)}
    metric = metric or ("local" if all("local" in figures for figures in judged.values()) else "owned")
    if lacking := [name for name, figures in judged.items() if metric not in figures]:
        raise CheckpointError(f"{lacking[0]}: its clients have no test images of their own; give --metric owned")
    figures = {name: of_run[metric] for name, of_run in judged.items()}
    owned = (runs[0].task.client_counts > 0).sum(1).tolist()
    return Comparison(metric, first.sha256, [len(rows) for rows in first.clients], figures, owned,
                      first.client_names or ())


def _last_figures(run: Run) -> dict[str, list[float | None]]:
    return run.reports[-1]["by_client"]
