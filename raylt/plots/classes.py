"""`raylt plot confusion | classes RUN`: what is taken for what, and how each class fares, by the counts of a run."""

from dataclasses import dataclass
from pathlib import Path

import torch
from rich import box
from rich.table import Table
from torch import Tensor

from raylt import metrics
from raylt.plots.style import COLOURS, new_figure, plain, plain_text, save
from raylt.runs.about import choose
from raylt.runs.exporting import clients_of, has_client_models
from raylt.runs.run import Run
from raylt.runs.summary import percent

NUMBERED, NAMED = 12, 60            # classes up to which cells have numbers, and rows their names


@dataclass(frozen=True)
class Confusion:
    """The counts of one evaluation, of everybody or of one client.

    Attributes:
        title: of what and on which images.
        matrix: counts of (true, predicted) classes, int64 [C, C].
        names: of the classes, C of them.
        groups: "many", "medium" or "few" for each.
        samples: training samples, or pixels, of each class, [C].
    """

    title: str
    matrix: Tensor
    names: tuple[str, ...]
    groups: tuple[str, ...]
    samples: list[int]

    def figures(self) -> list[dict[str, float | int | str | None]]:
        """Of each class: its name, group and numbers of training and test samples, recall, precision, F1 and IoU."""
        columns = metrics.class_figures(self.matrix)
        tested = self.matrix.sum(1).tolist()
        rows = zip(self.names, self.groups, self.samples, tested, *(values.tolist() for values in columns.values()),
                   strict=True)
        return [{key: None if value != value else value for key, value in zip(
            ("class", "group", "samples", "tested", *columns), row, strict=True)} for row in rows]

    def table(self) -> Table:
        """As a person reads it, in percent."""
        table = Table("class", "group", "samples", "tested", "recall", "precision", "F1", "IoU", box=box.SIMPLE_HEAD,
                      padding=(0, 1, 0, 0), show_edge=False)
        for column in table.columns[2:]:
            column.justify = "right"
        for row in self.figures():
            table.add_row(*(str(row[key]) for key in ("class", "group", "samples", "tested")),
                          *(percent(row[key]) for key in ("recall", "precision", "f1", "iou")))  # pyright: ignore
        return table


def confusion_of(run: Run, client: str | int | None = None, step: int | None = None) -> Confusion:
    """The counts that a run kept of an evaluation.

    Args:
        client: whose alone, by name or id: on its own test images where it has any, else on the whole test set.
        step: after which was judged; by default the last evaluation.

    Raises:
        ConfigError: no such client.
        CheckpointError: nothing was judged then, or its file was changed.
    """
    task, kept = run.task, run.matrices(step)
    of_clients = has_client_models(run)
    if client is not None:
        id = choose(client, clients_of(run), str(run.folder))
        everywhere = kept.clients.get(id) if of_clients else kept.shared
        matrix, where = (kept.own[id], "own test images") if id in kept.own else (everywhere, "all test images")
        samples, who = task.client_counts[id], f"client {task.client_names[id]}"
        seen = {} if matrix is None else metrics.seen_by_each({id: matrix}, torch.from_numpy(task.views), ())
    else:
        who, where = ("models of all clients" if of_clients else "global model"), "all test images"
        everyone = kept.clients if of_clients else kept.shared
        samples, seen = task.counts, {}
        if everyone is not None:
            ids = [id for id, _ in clients_of(run)]
            seen = metrics.seen_by_each(everyone, torch.from_numpy(task.views), ids)
    total = sum(seen.values(), start=torch.zeros(task.classes, task.classes, dtype=torch.int64))
    return Confusion(f"{run.name}: {who}, {where}", total, task.class_names, task.groups, samples.tolist())


def draw_confusion(confusion: Confusion, path: Path) -> Path:
    """Writes a heat map: rows are the truth and sum to 1, columns the prediction.

    Returns:
        The picture's path.

    Raises:
        ConfigError: it cannot be written there.
    """
    matrix, names = confusion.matrix.double(), list(map(plain_text, confusion.names))
    shares = matrix / matrix.sum(1, keepdim=True).clamp(min=1)
    side = min(24.0, 3.2 + 0.34 * max(len(names), 6))
    figure = new_figure(side + 1, side)
    ax = figure.subplots()
    image = ax.imshow(shares.numpy(), cmap="Blues", vmin=0, vmax=1)
    if len(names) <= NUMBERED:
        for i, row in enumerate(shares.tolist()):
            for j, share in enumerate(row):
                if share >= 0.005:
                    ax.text(j, i, f"{100 * share:.0f}", ha="center", va="center", fontsize=8,
                            color="white" if share > 0.6 else "black")
    if len(names) <= NAMED:
        ax.set_xticks(range(len(names)), names, rotation=90)
        ax.set_yticks(range(len(names)), names)
    ax.set(xlabel="predicted", ylabel="true", title=plain_text(confusion.title))
    figure.colorbar(image, ax=ax, shrink=0.8, label="share of the true class")
    return save(figure, path)


def draw_classes(confusion: Confusion, path: Path) -> Path:
    """Writes recall and precision of each class as dots, largest class first, above its training samples.

    Returns:
        The picture's path.

    Raises:
        ConfigError: it cannot be written there.
    """
    rows = sorted(confusion.figures(), key=lambda row: -int(row["samples"] or 0))
    places = range(len(rows))
    figure = new_figure(min(40.0, max(6.0, 1.5 + 0.3 * len(rows))), 5.5)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    for kind, marker, colour in (("recall", "o", COLOURS[0]), ("precision", "x", COLOURS[2])):
        known = [(place, 100 * value) for place, row in zip(places, rows, strict=True)
                 if isinstance(value := row[kind], float)]
        upper.plot([place for place, _ in known], [value for _, value in known], marker, color=colour, label=kind,
                   markersize=5, zorder=3)
    upper.set(ylim=(-3, 103), ylabel="%", title=plain_text(confusion.title))
    figure.legend(frameon=False, ncols=2, loc="outside lower center")
    lower.bar(places, [int(row["samples"] or 0) for row in rows], color=COLOURS[8], zorder=2)
    lower.set(ylabel="samples", yscale="symlog")
    if len(rows) <= NAMED:
        lower.set_xticks(places, [plain_text(str(row["class"])) for row in rows], rotation=90)
    for ax in (upper, lower):
        plain(ax)
    return save(figure, path)
