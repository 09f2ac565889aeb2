"""`raylt clients RUN [RUN ...]`: the accuracy of every client, of one run or of several over the same split."""

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.table import Table

from raylt.data.split import Split
from raylt.errors import CheckpointError
from raylt.metrics import worst_decile
from raylt.plots.style import COLOURS
from raylt.runs.summary import percent

Metric = Literal["owned", "matched", "global", "miou"]
WHAT = {"owned": "Accuracy of each client over the classes it owns", "matched": "Accuracy of each client over its own "
        "class mix", "global": "Accuracy of each client over all classes", "miou": "Mean IoU of each client over the "
        "classes it owns"}


@dataclass(frozen=True)
class Comparison:
    """Accuracy of each client at the end of some runs.

    Attributes:
        sizes: training samples of each client, [K].
        runs: of each run by its name, one accuracy per client, [K]; None for a client that is not judged.
    """

    metric: Metric
    split_sha256: str
    sizes: list[int]
    runs: dict[str, list[float | None]]

    @property
    def title(self) -> str:
        return WHAT[self.metric]

    def spread(self) -> dict[str, dict[str, float]]:
        """Of each run: mean, standard deviation and worst decile over its clients."""
        judged = {name: [a for a in values if a is not None] for name, values in self.runs.items()}
        return {name: {"mean": statistics.fmean(values), "deviation": statistics.pstdev(values),
                       "worst_decile": worst_decile(values)} for name, values in judged.items()}

    def table(self) -> Table:
        """As a person reads it, in percent."""
        table = Table("client", "samples", *self.runs)
        for k, n in enumerate(self.sizes):
            table.add_row(str(k), str(n), *(percent(values[k]) for values in self.runs.values()))
        table.add_section()
        spread = self.spread()
        for kind in ("mean", "deviation", "worst_decile"):
            table.add_row(kind.replace("_", " "), "", *(percent(spread[name][kind]) for name in self.runs))
        return table

    def draw(self, path: Path) -> None:
        """Writes a bar chart: a group of bars per client, a line at each run's mean (the paper of BPFed, Fig. 2)."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        clients, spread = range(len(self.sizes)), self.spread()
        width = 0.84 / len(self.runs)
        inches = min(40.0, max(7.0, 1.5 + len(clients) * (0.16 + 0.14 * len(self.runs))))
        figure = Figure(figsize=(inches, 4.8), dpi=150, layout="constrained")
        FigureCanvasAgg(figure)
        ax = figure.subplots()
        for i, (name, values) in enumerate(self.runs.items()):
            colour, mean = COLOURS[i % len(COLOURS)], 100 * spread[name]["mean"]
            places = [k + (i - (len(self.runs) - 1) / 2) * width for k in clients]
            ax.bar(places, [100 * (a or 0) for a in values], width, color=colour, label=f"{name}: mean {mean:.1f} %",
                   edgecolor="white", linewidth=0.3, zorder=2)
            ax.axhline(mean, color=colour, linestyle="--", linewidth=1, zorder=3)
        every = -(-len(clients) // max(1, int(inches / 0.42)))          # labels that do not run into each other
        ax.set_xticks(clients[::every], [f"{k}\n{self.sizes[k]}" for k in clients[::every]], fontsize=9)
        ax.set(xlim=(-0.6, len(clients) - 0.4), ylim=(0, 100), xlabel="client, and below it its training samples",
               ylabel="mean IoU / %" if self.metric == "miou" else "accuracy / %", title=self.title)
        ax.grid(axis="y", color="#e3e3e3", zorder=0)
        ax.spines[["top", "right"]].set_visible(False)
        figure.legend(loc="outside lower center", ncols=max(1, min(len(self.runs), int(inches / 3))), frameon=False)
        figure.savefig(path)


def compare(folders: Sequence[Path], metric: Metric) -> Comparison:
    """The clients of finished runs side by side.

    Raises:
        CheckpointError: not a finished run folder, one of before figures of each client were kept, or another split
            than the first's.
    """
    folders = list(dict.fromkeys(folders))
    names = [folder.resolve().name for folder in folders]
    names = names if len(set(names)) == len(names) else [str(folder) for folder in folders]
    splits = [_split(folder) for folder in folders]
    for folder, split in zip(folders, splits, strict=True):
        if split.sha256 != splits[0].sha256:
            raise CheckpointError(f"{folder}: its clients hold other samples (split {split.sha256[:16]}) than those of "
                                  f"{folders[0]} ({splits[0].sha256[:16]}); give runs over the same split")
    runs = {name: _last_figures(folder)[metric] for name, folder in zip(names, folders, strict=True)}
    return Comparison(metric, splits[0].sha256, [len(rows) for rows in splits[0].clients], runs)


def _split(folder: Path) -> Split:
    if not (folder / "config.yaml").is_file():
        raise CheckpointError(f"{folder}: not a run folder (it has no config.yaml); give one that raylt run made")
    if not (folder / "summary.json").is_file():
        raise CheckpointError(f"{folder}: this run is not finished; continue it with raylt resume {folder}")
    return Split.load(folder / "split.json")


def _last_figures(folder: Path) -> dict[str, list[float | None]]:
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    if not last.get("by_client"):
        raise CheckpointError(f"{folder}: kept no figures of each client (an older raylt made it); run it again")
    return last["by_client"]
