"""Plots of a run's confusion matrix and of figures by class (`raylt plot confusion | classes RUN`)."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich import box
from rich.table import Table
from torch import Tensor

from raylt import metrics
from raylt.core.evaluation.counts import Matrices
from raylt.data.task import Task
from raylt.formatting import percent
from raylt.plots.style import COLOURS, new_figure, plain_text, save_if_asked, style_axes, tick_name
from raylt.runs.export.export import choose_client_of, clients_of, has_client_models
from raylt.runs.run import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_NUMBERED_CLASSES = 12  # with more classes, cells have no numbers
MAX_NAMED_CLASSES = 60  # with more classes, axes have no class names


@dataclass(frozen=True)
class Confusion:
    """The confusion matrix of one evaluation, of one client or of all clients.

    Attributes:
        title: Names of the model and the images.
        matrix: Counts of (true, predicted) classes, int64 [C, C]; float64 if clients' counts are weighted.
        names: Names of the C classes.
        groups: Group of each class: "many", "medium" or "few".
        samples: Number of training samples, or pixels, of each class, [C].
        tested: Number of test images, or pixels, behind the row of each class, [C]; by default the sums of the rows.
    """

    title: str
    matrix: Tensor
    names: tuple[str, ...]
    groups: tuple[str, ...]
    samples: list[int]
    tested: list[int] | None = None

    def figures(self) -> list[dict[str, float | int | str | None]]:
        """Return each class's name, group, numbers of training and test samples, recall, precision, F1 and IoU."""
        columns = metrics.class_figures(self.matrix)
        tested = self.tested or self.matrix.sum(1).tolist()
        rows = zip(
            self.names,
            self.groups,
            self.samples,
            tested,
            *(values.tolist() for values in columns.values()),
            strict=True,
        )
        return [
            {
                key: None if value != value else value
                for key, value in zip(("class", "group", "samples", "tested", *columns), row, strict=True)
            }
            for row in rows
        ]

    def table(self) -> Table:
        """Return the figures of the classes as a table, in percent."""
        table = Table(
            "class",
            "group",
            "samples",
            "tested",
            "recall",
            "precision",
            "F1",
            "IoU",
            box=box.SIMPLE_HEAD,
            padding=(0, 1, 0, 0),
            show_edge=False,
        )
        for column in table.columns[2:]:
            column.justify = "right"
        for row in self.figures():
            table.add_row(
                *(str(row[key]) for key in ("class", "group", "samples", "tested")),
                *(percent(row[key]) for key in ("recall", "precision", "f1", "iou")),  # pyright: ignore
            )
        return table


def confusion_of(run: Run, client: str | int | None = None, step: int | None = None) -> Confusion:
    """Return the confusion matrix of an evaluation that a run stored.

    Args:
        run: The run.
        client: Name or id of a client, evaluated on its own test images if it has any, otherwise on the whole test set.
            By default all clients. If they have models of their own, these are evaluated on their own test images, or
            otherwise on the whole test set with the classes weighted as in each client's training samples.
        step: Step of the evaluation; by default the last one.

    Raises:
        ConfigError: The client is unknown.
        CheckpointError: There was no evaluation after that step, or its file was changed.
    """
    task = run.task
    matrices = run.matrices(step)
    of_clients = has_client_models(run)
    if client is not None:
        id = choose_client_of(run, client)
        if id in matrices.own:
            matrix = matrices.own[id]
            images = "own test images"
        else:
            matrix = matrices.clients.get(id) if of_clients else matrices.shared
            images = "all test images"
        samples = task.client_counts[id]
        model = f"client {task.client_names[id]}"
        seen = {} if matrix is None else metrics.seen_by_each({id: matrix}, task.views, ())
    elif of_clients:
        return _of_own_models(run, task, matrices)
    else:
        model = "global model"
        images = "all test images"
        samples = task.counts
        seen = {}
        if matrices.shared is not None:
            ids = [id for id, _ in clients_of(run)]
            views = task.views
            if views is None or (views[ids] == views[ids[0]]).all():  # these clients have the same counts
                ids = ids[:1]
            seen = metrics.seen_by_each(matrices.shared, views, ids)
    total = sum(seen.values(), start=torch.zeros(task.classes, task.classes, dtype=torch.int64))
    return Confusion(f"{run.name}: {model}, {images}", total, task.class_names, task.groups, samples.tolist())


def _of_own_models(run: Run, task: Task, matrices: Matrices) -> Confusion:
    """Return the summed confusion matrix of all clients' own models, each on its client's test images."""
    zeros = torch.zeros(task.classes, task.classes, dtype=torch.int64)
    if matrices.own:
        seen = metrics.seen_by_each(matrices.own, task.views, ())
        images = "own test images"
        total = sum(seen.values(), start=zeros)
        tested = total.sum(1).tolist()
    else:
        seen = metrics.seen_by_each(matrices.clients, task.views, ())
        images = "own class mix"
        total = zeros.double()
        for id, matrix in seen.items():
            rows = matrix.sum(1, keepdim=True).clamp(min=1)
            total += matrix / rows * torch.from_numpy(task.client_counts[id])[:, None]
        tested = next(iter(seen.values()), zeros).sum(1).tolist()
    title = f"{run.name}: models of all clients, {images}"
    return Confusion(title, total, task.class_names, task.groups, task.counts.tolist(), tested)


def draw_confusion(confusion: Confusion, path: Path | str | None = None) -> "Figure":
    """Draw a confusion matrix as a heat map. Rows are true classes and sum to 1; columns are predicted classes.

    Args:
        confusion: The confusion matrix.
        path: File to save the picture to.

    Raises:
        ConfigError: The picture cannot be written.
    """
    matrix = confusion.matrix.double()
    names = list(map(tick_name, confusion.names))
    shares = matrix / matrix.sum(1, keepdim=True).clamp(min=1)
    side = min(24.0, 3.2 + 0.34 * max(len(names), 6))
    figure = new_figure(side + 1, side)
    ax = figure.subplots()
    image = ax.imshow(shares.numpy(), cmap="Blues", vmin=0, vmax=1)
    if len(names) <= MAX_NUMBERED_CLASSES:
        for i, row in enumerate(shares.tolist()):
            for j, share in enumerate(row):
                if share >= 0.005:
                    ax.text(
                        j,
                        i,
                        f"{100 * share:.0f}",
                        ha="center",
                        va="center",
                        fontsize=8,
                        color="white" if share > 0.6 else "black",
                    )
    if len(names) <= MAX_NAMED_CLASSES:
        ax.set_xticks(range(len(names)), names, rotation=90)
        ax.set_yticks(range(len(names)), names)
    ax.set(xlabel="predicted", ylabel="true", title=plain_text(confusion.title))
    figure.colorbar(image, ax=ax, shrink=0.8, label="share of the true class")
    return save_if_asked(figure, path)


def draw_classes(confusion: Confusion, path: Path | str | None = None) -> "Figure":
    """Draw each class's recall and precision as dots, and its number of training samples in a panel below.

    The largest class comes first.

    Args:
        confusion: The confusion matrix.
        path: File to save the picture to.

    Raises:
        ConfigError: The picture cannot be written.
    """
    rows = sorted(confusion.figures(), key=lambda row: -int(row["samples"] or 0))
    positions = range(len(rows))
    figure = new_figure(min(40.0, max(6.0, 1.5 + 0.3 * len(rows))), 5.5)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    for kind, marker, colour in (("recall", "o", COLOURS[0]), ("precision", "x", COLOURS[2])):
        values = {x: row[kind] for x, row in enumerate(rows)}
        percents = {x: 100 * value for x, value in values.items() if isinstance(value, float)}
        upper.plot(
            list(percents.keys()),
            list(percents.values()),
            marker,
            color=colour,
            label=kind,
            markersize=5,
            zorder=3,
        )
    upper.set(ylim=(-3, 103), ylabel="%", title=plain_text(confusion.title))
    figure.legend(frameon=False, ncols=2, loc="outside lower center")
    lower.bar(positions, [int(row["samples"] or 0) for row in rows], color=COLOURS[8], zorder=2)
    lower.set(ylabel="samples", yscale="symlog")
    if len(rows) <= MAX_NAMED_CLASSES:
        lower.set_xticks(positions, [tick_name(str(row["class"])) for row in rows], rotation=90)
    for ax in (upper, lower):
        style_axes(ax)
    return save_if_asked(figure, path)
