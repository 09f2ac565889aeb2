"""`raylt plot data`: who holds what, clients by classes, with the long tail above, the clients' sizes beside, and how
unlike each other they are."""

from pathlib import Path

import numpy as np

from raylt.data.heterogeneity import heterogeneity
from raylt.data.task import Task
from raylt.plots.style import COLOURS, INK, new_figure, plain, plain_text, save

GROUPS = {"many": COLOURS[0], "medium": COLOURS[1], "few": COLOURS[2], "-": INK}
LABELLED = 40           # classes or clients that are named one by one at most


def draw_data(task: Task, path: Path) -> Path:
    """Writes a picture of the training samples (pixels, of label maps) of every client and class.

    Returns:
        The picture's path.

    Raises:
        ConfigError: it cannot be written there.
    """
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap, LogNorm
    from matplotlib.patches import Patch

    clients, classes = task.client_counts.shape
    unit = "samples" if task.kind == "classification" else "pixels"
    wide, high = min(18.0, max(5.0, 0.34 * classes)), min(11.0, max(3.2, 0.26 * clients))
    figure = new_figure(wide + 3.6, high + 2.6)
    axes = figure.subplot_mosaic([["tail", "."], ["map", "sizes"]], width_ratios=[wide, 1.7],
                                 height_ratios=[1.5, high])
    tail, ax, sizes = axes["tail"], axes["map"], axes["sizes"]

    tail.bar(range(classes), task.counts, color=[GROUPS[group] for group in task.groups], width=0.85, zorder=2)
    tail.set(xlim=(-0.5, classes - 0.5), xticks=[], ylabel=unit, yscale="linear" if unit == "samples" else "log")
    plain(tail)
    counts = np.ma.masked_equal(task.client_counts, 0)
    shades = ListedColormap(colormaps["Blues"](np.linspace(0.18, 1, 200)))      # one sample is not white
    image = ax.imshow(counts, aspect="auto", cmap=shades, interpolation="nearest",
                      norm=LogNorm(1, max(2, int(task.client_counts.max()))))
    if counts.size <= 400 and task.client_counts.max() < 10_000:
        middle = 0.5 * np.log(max(2, task.client_counts.max()))
        for (k, c), n in np.ndenumerate(task.client_counts):
            if n:
                ax.text(c, k, str(n), ha="center", va="center", fontsize=7,
                        color="white" if np.log(n) > middle else "black")
    every = -(-clients // LABELLED)
    class_names, client_names = (list(map(plain_text, names)) for names in (task.class_names, task.client_names))
    ax.set_yticks(range(0, clients, every), client_names[::every], fontsize=8)
    named = classes <= LABELLED
    ax.set_xticks(range(classes) if named else [], class_names if named else [], fontsize=8,
                  rotation=90 if max(map(len, task.class_names)) > 3 else 0)
    ax.set(xlabel="class" if named else f"class, 0 to {classes - 1}", ylabel="client")
    figure.colorbar(image, ax=sizes, label=f"{unit} of a class, white: none", fraction=0.3, pad=0.25,
                    format="{x:,.0f}")
    sizes.barh(range(clients), task.sizes, color=INK, height=0.85, zorder=2)
    sizes.set(ylim=ax.get_ylim(), yticks=[], xlabel="images" if unit == "pixels" else unit)
    plain(sizes, "x")

    present = [group for group in GROUPS if group in task.groups]
    keys = [Patch(color=GROUPS[group], label="background" if group == "-" else f"{group}-shot: "
                  f"{task.groups.count(group)} classes") for group in present]
    figure.legend(handles=keys, loc="outside lower center", ncols=len(keys), frameon=False, fontsize=9)
    figures = heterogeneity(task.client_counts)
    figure.suptitle(f"{task.name}: {clients} clients, {int(task.sizes.sum())} images, split {task.split.sha256[:12]}\n"
                    f"IF {figures.imbalance:.3g}, clients 1 : {figures.sizes:.3g}, {figures.classes:.3g} classes each, "
                    f"class mix {figures.distance:.2f} from that of all", fontsize=11)
    return save(figure, path)
