"""`raylt plot clusters RUN`: the clusters of one round's clients, and whether they follow the data (MuPFL, Fig. 10)."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from raylt.errors import CheckpointError
from raylt.methods.mupfl.clustering import embed
from raylt.plots.style import ACCENT, COLOURS, INK, new_figure, plain_text, save
from raylt.runs.run import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Clusters:
    """What is drawn.

    Attributes:
        ids, labels: of the n clients that form the round's clusters.
        points: [n, 2], the two principal components of points whose squared distances are 2 (1 - similarity).
        explained: their shares of the variance, [2].
        counts: samples per class of each client, int64 [n, C].
        kappas: number of clusters of every round so far, by round.
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


def draw_clusters(run: Run, round: int | None = None, path: Path | None = None) -> Path:
    """Writes clusters.png into a run folder, whether or not the run is finished.

    Args:
        round: one of those whose similarities are kept; by default the last.
        path: of the picture, if it is to go elsewhere.

    Returns:
        The picture's path.

    Raises:
        CheckpointError: the run is of a method that makes no clusters, or the round's similarity is not kept.
        ConfigError: it cannot be written there.
    """
    return save(_plot(run.name, read_clusters(run, round)), path or run.folder / "clusters.png")


def read_clusters(run: Run, round: int | None = None) -> Clusters:
    """The clusters of a round; see `draw_clusters`."""
    from sklearn.decomposition import PCA  # a second of imports

    saved = run.checkpoint()
    kept = {} if saved is None else saved.read("server")["state"].get("similarities", {})
    similarities: dict[int, Tensor] = {entry["round"]: entry["matrix"] for entry in kept.values()}
    if not similarities:
        raise CheckpointError(f"{run.folder}: {run.method.name} left no clusters; give a run of mupfl with "
                              "method.acmu=true and a round behind it")
    round = max(similarities) if round is None else round
    if round not in similarities:
        rounds = ", ".join(map(str, similarities))
        raise CheckpointError(f"{run.folder}: similarities are kept of rounds {rounds}, not of {round}; give one of "
                              "them with --round")
    reports = {report["step"]: report for report in run.reports}
    own = reports[round]["figures"]
    ids = own.get("clustered", reports[round]["participants"])      # as runs before it was reported have it
    points, pca = embed(similarities[round].double()).numpy(), PCA(2)
    if len(points) < 2:
        raise CheckpointError(f"{run.folder}: round {round} clustered one client alone, of which there is nothing to "
                              "draw; give another with --round")
    places = pca.fit_transform(points)
    return Clusters(round, ids, own["clusters"], own["silhouettes"].get(str(own["kappa"])), places,
                    pca.explained_variance_ratio_, run.task.client_counts[ids], run.task.class_names,
                    {step: report["figures"]["kappa"] for step, report in reports.items()})


def _names(clusters: Clusters) -> list[tuple[str, tuple[float, float]]]:
    """What is written beside the points: one text for those of a cluster that are too near each other for their own."""
    near, texts = 0.05 * np.ptp(clusters.points, axis=0).clip(1e-9), []
    for id, label, place in zip(clusters.ids, clusters.labels, clusters.points, strict=True):
        text = next((t for t in texts if t[0] == label and (abs(t[2] - place) < near).all()), None)
        if text is None:
            texts.append((label, [str(id)], place))
        else:
            text[1].append(str(id))
    return [(", ".join(ids), (place[0], place[1])) for _, ids, place in texts]


def _plot(name: str, clusters: Clusters) -> "Figure":
    """The map of clients, their class shares, and how many clusters there were from round to round."""
    from matplotlib.ticker import MaxNLocator

    n = len(clusters.ids)
    height = min(24.0, 5.0 + 0.16 * max(0, n - 16))
    figure = new_figure(13, height + 1.6)
    axes = figure.subplot_mosaic([["map", "classes"], ["kappa", "kappa"]], height_ratios=[height, 1.3])
    colours = [COLOURS[label % len(COLOURS)] for label in clusters.labels]
    axes["map"].scatter(*clusters.points.T, s=110, c=colours, edgecolors="white", linewidths=0.8, zorder=2)
    for ids, place in _names(clusters):
        axes["map"].annotate(ids, place, xytext=(7, 6), textcoords="offset points", fontsize=9)
    first, second = (f"{100 * share:.0f} %" for share in np.nan_to_num(clusters.explained))
    axes["map"].set(xlabel=f"first principal component ({first} of the variance)", ylabel=f"second ({second})",
                    title="clients by the similarity of their updates and maps")
    axes["map"].margins(0.2)
    axes["map"].grid(color="#eeeeee", zorder=0)

    order = sorted(range(n), key=lambda i: (clusters.labels[i], clusters.ids[i]))
    shares = clusters.counts[order] / clusters.counts[order].sum(1, keepdims=True)
    ax = axes["classes"]
    image = ax.imshow(shares, aspect="auto", cmap="Greys", vmin=0, vmax=1, interpolation="nearest")
    figure.colorbar(image, ax=ax, label="share of the client's samples")
    names = [f"{clusters.ids[i]} ({clusters.counts[i].sum()})" for i in order]
    ax.set_yticks(range(n), names, fontsize=min(9, 300 / n))
    for tick, i in zip(ax.get_yticklabels(), order, strict=True):
        tick.set_color(colours[i])
        tick.set_fontweight("bold")
    ends = [place for place in range(1, n) if clusters.labels[order[place]] != clusters.labels[order[place - 1]]]
    for place in ends:
        ax.axhline(place - 0.5, color=ACCENT, linewidth=1.5)
    classes = clusters.class_names if len(clusters.class_names) <= 20 else ()
    ax.set_xticks(range(len(classes)), list(map(plain_text, classes)), fontsize=9,
                  rotation=45 if max(map(len, clusters.class_names)) > 3 else 0)
    ax.set(ylabel="client (its samples), by cluster", title="their classes", xlabel="class")

    ax = axes["kappa"]
    ax.step(list(clusters.kappas), list(clusters.kappas.values()), where="mid", color=INK)
    ax.plot(clusters.round, clusters.kappas[clusters.round], "o", color=ACCENT)
    ax.set(xlabel="round", ylabel="clusters", ylim=(0.5, max(clusters.kappas.values()) + 0.5))
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    quality = "" if clusters.silhouette is None else f", silhouette {clusters.silhouette:.2f}"
    figure.suptitle(f"Clusters of {plain_text(name)} in round {clusters.round}: {max(clusters.labels) + 1}{quality}",
                    fontsize=14)
    return figure
