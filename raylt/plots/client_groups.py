"""Plot of one round's client groups next to the clients' data (`raylt plot clusters RUN`; MuPFL, Fig. 10).

The paper and the command call the groups clusters.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from raylt.errors import CheckpointError, spoken
from raylt.methods.mupfl.clustering import embed
from raylt.plots.style import ACCENT, COLOURS, INK, new_figure, plain_text, save_if_asked, tick_name
from raylt.runs.run import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage


@dataclass(frozen=True)
class ClientGroups:
    """The client groups that a method formed in one round.

    Attributes:
        ids: Ids of the n grouped clients.
        labels: Number of each client's group, [n].
        points: First two principal components of points with squared distances 2 (1 - similarity), [n, 2].
        explained: Shares of the variance that the components explain, [2].
        counts: Number of samples of each client and class, int64 [n, C].
        kappas: Number of groups by round.
    """

    round: int
    ids: list[int]
    labels: list[int]
    silhouette: float | None
    points: np.ndarray
    explained: np.ndarray
    counts: np.ndarray
    class_names: tuple[str, ...]
    kappas: dict[int, int]


def draw_clusters(run: Run, round: int | None = None, path: Path | str | None = None) -> "Figure":
    """Draw the client groups of a round. The run need not be finished.

    Args:
        run: The run.
        round: Round whose similarities were kept; by default the last such round.
        path: File to save the picture to: .png, .pdf or .svg.

    Raises:
        CheckpointError: The run's method does not form groups, or the round's similarities were not kept.
        ConfigError: The picture cannot be written.
    """
    return save_if_asked(_plot(run.name, read_client_groups(run, round)), path)


def read_client_groups(run: Run, round: int | None = None) -> ClientGroups:
    """Read the client groups of a round, as `draw_clusters` draws them.

    Raises:
        CheckpointError: The run's method does not form groups, or the round's similarities were not kept.
    """
    from sklearn.decomposition import PCA  # takes a second to import

    saved = run.checkpoint()
    kept = {} if saved is None else saved.read("server")["state"].get("similarities", {})
    similarities: dict[int, Tensor] = {entry["round"]: entry["matrix"] for entry in kept.values()}
    if not similarities:
        raise CheckpointError(
            f"{run.folder}: the run has no clusters ({run.method.name}). Give a run of mupfl with method.acmu=true and "
            "at least one round.",
            code="run.wrong-kind",
            path=str(run.folder),
            method=run.method.name,
        )
    round = max(similarities) if round is None else round
    if round not in similarities:
        rounds = ", ".join(map(str, similarities))
        raise CheckpointError(
            f"{spoken('--round', 'round')}: its similarities were not kept ({round}). Give one of {rounds}.",
            code="checkpoint.not-kept",
            path=str(run.folder),
            round=round,
            rounds=list(similarities),
        )
    reports = {report["step"]: report for report in run.reports}
    figures = reports[round]["figures"]
    ids = figures.get("clustered", reports[round]["participants"])  # missing in older runs
    points = embed(similarities[round].double()).numpy()
    pca = PCA(2)
    if len(points) < 2:
        raise CheckpointError(
            f"{spoken('--round', 'round')}: only one client was clustered ({round}). Give another round.",
            code="run.wrong-kind",
            path=str(run.folder),
            round=round,
        )
    plane = pca.fit_transform(points)
    return ClientGroups(
        round,
        ids,
        figures["clusters"],
        figures["silhouettes"].get(str(figures["kappa"])),
        plane,
        pca.explained_variance_ratio_,
        run.outline.client_counts[ids],
        run.outline.class_names,
        {step: report["figures"]["kappa"] for step, report in reports.items()},
    )


def _labels(groups: ClientGroups) -> list[tuple[str, tuple[float, float]]]:
    """Return label texts and their positions. Clients of a group that are close to each other share a label."""
    near = 0.05 * np.ptp(groups.points, axis=0).clip(1e-9)
    texts: list[tuple[int, list[str], np.ndarray]] = []
    for id, label, point in zip(groups.ids, groups.labels, groups.points, strict=True):
        close = next((ids for other, ids, at in texts if other == label and (abs(at - point) < near).all()), None)
        if close is None:
            texts.append((label, [str(id)], point))
        else:
            close.append(str(id))
    return [(", ".join(ids), (point[0], point[1])) for _, ids, point in texts]


def _plot(name: str, groups: ClientGroups) -> "Figure":
    """Draw a map of the clients, their class shares, and the number of groups over the rounds."""
    height = min(24.0, 5.0 + 0.16 * max(0, len(groups.ids) - 16))
    figure = new_figure(13, height + 1.6)
    axes = figure.subplot_mosaic([["map", "classes"], ["kappa", "kappa"]], height_ratios=[height, 1.3])
    _draw_map(axes["map"], groups)
    image = _draw_classes(axes["classes"], groups)
    figure.colorbar(image, ax=axes["classes"], label="share of the client's samples")
    _draw_kappas(axes["kappa"], groups)
    quality = "" if groups.silhouette is None else f", silhouette {groups.silhouette:.2f}"
    figure.suptitle(
        f"Clusters of {plain_text(name)} in round {groups.round}: {max(groups.labels) + 1}{quality}", fontsize=14
    )
    return figure


def _draw_map(ax: "Axes", groups: ClientGroups) -> None:
    colours = _colours(groups)
    ax.scatter(*groups.points.T, s=110, c=colours, edgecolors="white", linewidths=0.8, zorder=2)
    for text, point in _labels(groups):
        ax.annotate(text, point, xytext=(7, 6), textcoords="offset points", fontsize=9)
    first, second = (f"{100 * share:.0f} %" for share in np.nan_to_num(groups.explained))
    ax.set(
        xlabel=f"first principal component ({first} of the variance)",
        ylabel=f"second ({second})",
        title="clients by the similarity of their updates and maps",
    )
    ax.margins(0.2)
    ax.grid(color="#eeeeee", zorder=0)


def _draw_classes(ax: "Axes", groups: ClientGroups) -> "AxesImage":
    """Draw the class shares of each client, with clients sorted by group."""
    n = len(groups.ids)
    order = sorted(range(n), key=lambda i: (groups.labels[i], groups.ids[i]))
    shares = groups.counts[order] / groups.counts[order].sum(1, keepdims=True)
    image = ax.imshow(shares, aspect="auto", cmap="Greys", vmin=0, vmax=1, interpolation="nearest")
    names = [f"{groups.ids[i]} ({groups.counts[i].sum()})" for i in order]
    ax.set_yticks(range(n), names, fontsize=min(9, 300 / n))
    colours = _colours(groups)
    for tick, i in zip(ax.get_yticklabels(), order, strict=True):
        tick.set_color(colours[i])
        tick.set_fontweight("bold")
    for row in range(1, n):
        if groups.labels[order[row]] != groups.labels[order[row - 1]]:
            ax.axhline(row - 0.5, color=ACCENT, linewidth=1.5)
    classes = groups.class_names if len(groups.class_names) <= 20 else ()
    ax.set_xticks(
        range(len(classes)),
        list(map(tick_name, classes)),
        fontsize=9,
        rotation=45 if max(map(len, groups.class_names)) > 3 else 0,
    )
    ax.set(ylabel="client (its samples), by cluster", title="their classes", xlabel="class")
    return image


def _draw_kappas(ax: "Axes", groups: ClientGroups) -> None:
    """Draw the number of client groups over the rounds."""
    from matplotlib.ticker import MaxNLocator

    ax.step(list(groups.kappas), list(groups.kappas.values()), where="mid", color=INK)
    ax.plot(groups.round, groups.kappas[groups.round], "o", color=ACCENT)
    ax.set(xlabel="round", ylabel="clusters", ylim=(0.5, max(groups.kappas.values()) + 0.5))
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))


def _colours(groups: ClientGroups) -> list[str]:
    return [COLOURS[label % len(COLOURS)] for label in groups.labels]
