"""Plot of the samples of each client and class, with sums and heterogeneity (`raylt plot data`).

Classes are sorted by size, so that the long tail is visible.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from raylt.data.heterogeneity import heterogeneity
from raylt.data.task import Task
from raylt.errors import count_of
from raylt.plots.style import COLOURS, INK, new_figure, save_if_asked, style_axes, tick_name

if TYPE_CHECKING:
    import numpy.typing as npt
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

GROUPS = {"many": COLOURS[0], "medium": COLOURS[1], "few": COLOURS[2], "-": INK}
MAX_LABELS = 40  # maximum number of class or client names on an axis


def draw_data(task: Task, path: Path | str | None = None) -> "Figure":
    """Draw the number of training samples of every client and class; for label maps, the number of pixels.

    Args:
        task: The data with their split.
        path: File to save the picture to.

    Returns:
        The figure, which a notebook displays.

    Raises:
        ConfigError: The picture cannot be written.
    """
    clients, classes = task.client_counts.shape
    unit = "samples" if task.kind == "classification" else "pixels"
    width = min(18.0, max(5.0, 0.34 * classes))
    height = min(11.0, max(3.2, 0.26 * clients))
    figure = new_figure(width + 3.6, height + 2.6)
    axes = figure.subplot_mosaic(
        [["tail", "."], ["map", "sizes"]], width_ratios=[width, 1.7], height_ratios=[1.5, height]
    )
    tail, counts, sizes = axes["tail"], axes["map"], axes["sizes"]

    order = np.argsort(-task.counts, kind="stable")
    colours = [GROUPS[task.groups[c]] for c in order]
    tail.bar(range(classes), task.counts[order], color=colours, width=0.85, zorder=2)
    tail.set(xlim=(-0.5, classes - 0.5), xticks=[], ylabel=unit, yscale="linear" if unit == "samples" else "log")
    style_axes(tail)
    image = _draw_counts(counts, task, order)
    figure.colorbar(image, ax=sizes, label=f"{unit} of a class, white: none", fraction=0.3, pad=0.25, format="{x:,.0f}")
    sizes.barh(range(clients), task.sizes, color=INK, height=0.85, zorder=2)
    sizes.set(ylim=counts.get_ylim(), yticks=[], xlabel="images" if unit == "pixels" else unit)
    style_axes(sizes, "x")
    _draw_legend(figure, task)
    figures = heterogeneity(task.client_counts)
    figure.suptitle(
        f"{task.name}: {count_of(clients, 'client')}, {count_of(int(task.sizes.sum()), 'image')}, "
        f"split {task.split.sha256[:12]}\n"
        f"IF {figures.imbalance:.3g}, clients 1 : {figures.sizes:.3g}, {figures.classes:.3g} classes each, "
        f"class mix {figures.distance:.2f} from that of all",
        fontsize=11,
    )
    return save_if_asked(figure, path)


def _draw_counts(ax: "Axes", task: Task, order: "npt.NDArray[np.int64]") -> "AxesImage":
    """Draw the sample counts of clients and classes as shades of blue, with numbers where they fit.

    Args:
        ax: Axes to draw on.
        task: The data with their split.
        order: Classes in the order of the columns, [C].
    """
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap, LogNorm

    clients, classes = task.client_counts.shape
    sorted_counts = task.client_counts[:, order]
    most = int(sorted_counts.max())
    counts = np.ma.masked_equal(sorted_counts, 0)
    # without white, so that a single sample is visible
    shades = ListedColormap(colormaps["Blues"](np.linspace(0.18, 1, 200)))
    norm = LogNorm(1, max(2, most))
    image = ax.imshow(counts, aspect="auto", cmap=shades, interpolation="nearest", norm=norm)
    if counts.size <= 400 and most < 10_000:
        middle = 0.5 * np.log(max(2, most))
        for (k, c), n in np.ndenumerate(sorted_counts):
            if n:
                colour = "white" if np.log(n) > middle else "black"
                ax.text(c, k, str(n), ha="center", va="center", fontsize=7, color=colour)
    every = -(-clients // MAX_LABELS)
    client_names = [tick_name(name) for name in task.client_names]
    ax.set_yticks(range(0, clients, every), client_names[::every], fontsize=8)
    named = classes <= MAX_LABELS
    ax.set_xticks(
        range(classes) if named else [],
        [tick_name(task.class_names[c]) for c in order] if named else [],
        fontsize=8,
        rotation=90 if max(map(len, task.class_names)) > 3 else 0,
    )
    ax.set(xlabel="class, the largest first" if named else f"{classes} classes, the largest first", ylabel="client")
    return image


def _draw_legend(figure: "Figure", task: Task) -> None:
    """Draw a legend of the colours of the class groups that occur in the task."""
    from matplotlib.patches import Patch

    keys = []
    for group, colour in GROUPS.items():
        if group in task.groups:
            count = count_of(task.groups.count(group), "class", "classes")
            text = "background" if group == "-" else f"{group}-shot: {count}"
            keys.append(Patch(color=colour, label=text))
    figure.legend(handles=keys, loc="outside lower center", ncols=len(keys), frameon=False, fontsize=9)
