"""`raylt clusters RUN`: the clusters of one round's clients, and whether they follow the data (MuPFL, Fig. 10)."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from raylt.config import load
from raylt.core import checkpoint
from raylt.data.task import build_task
from raylt.errors import CheckpointError
from raylt.methods.mupfl.clustering import embed
from raylt.plots.style import COLOURS


@dataclass(frozen=True)
class Clusters:
    """What is drawn.

    Attributes:
        ids, labels: of the round's n participants.
        points: [n, 2], the two principal components of points whose squared distances are 2 (1 - similarity).
        explained: their shares of the variance, [2].
        counts: samples per class of each participant, int64 [n, C].
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


def draw_clusters(folder: Path, round: int | None = None) -> Path:
    """Writes clusters.png into a run folder, whether or not the run is finished.

    Args:
        round: one of those whose similarities are kept; by default the last.

    Returns:
        The picture's path.

    Raises:
        CheckpointError: not a run folder, of a method that makes no clusters, or the round's similarity is not kept.
    """
    found = read_clusters(folder, round)
    path = folder / "clusters.png"
    _plot(path, folder.resolve().name, found)
    return path


def read_clusters(folder: Path, round: int | None = None) -> Clusters:
    """The clusters of a round; see `draw_clusters`."""
    from sklearn.decomposition import PCA  # a second of imports

    if not (folder / "config.yaml").is_file():
        raise CheckpointError(f"{folder}: not a run folder (it has no config.yaml); give one that raylt run made")
    config = load(folder / "config.yaml")
    saved, _ = checkpoint.latest(folder / "checkpoints")
    similarities = {} if saved is None else saved.read("server")["state"].get("similarity", {})
    if not similarities:
        raise CheckpointError(f"{folder}: {config.method['name']} left no clusters; give a run of mupfl with "
                              "method.acmu=true and a round behind it")
    round = max(map(int, similarities)) if round is None else round
    if str(round) not in similarities:
        raise CheckpointError(f"{folder}: similarities are kept of rounds {', '.join(similarities)}, not of {round}; "
                              "give one of them with --round")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    reports = {line["step"]: line for line in lines if line["phase"] == "round"}
    own, ids = reports[round]["figures"], reports[round]["participants"]
    task = build_task(config.data.model_copy(update={"split": str(folder / "split.json")}))
    points, pca = embed(similarities[str(round)].double()).numpy(), PCA(2)
    places = pca.fit_transform(points)
    return Clusters(round, ids, own["clusters"], own["silhouettes"].get(str(own["kappa"])), places,
                    pca.explained_variance_ratio_, task.client_counts[ids], task.class_names,
                    {step: its["figures"]["kappa"] for step, its in reports.items()})


def _names(found: Clusters) -> list[tuple[str, tuple[float, float]]]:
    """What is written beside the points: one text for those of a cluster that are too near each other for their own."""
    near, texts = 0.05 * np.ptp(found.points, axis=0).clip(1e-9), []
    for id, label, place in zip(found.ids, found.labels, found.points, strict=True):
        text = next((t for t in texts if t[0] == label and (abs(t[2] - place) < near).all()), None)
        if text is None:
            texts.append((label, [str(id)], place))
        else:
            text[1].append(str(id))
    return [(", ".join(ids), (place[0], place[1])) for _, ids, place in texts]


def _plot(path: Path, run: str, found: Clusters) -> None:
    """The map of clients, their class shares, and how many clusters there were from round to round."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    n = len(found.ids)
    height = min(24.0, 5.0 + 0.16 * max(0, n - 16))
    figure = Figure(figsize=(13, height + 1.6), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplot_mosaic([["map", "classes"], ["kappa", "kappa"]], height_ratios=[height, 1.3])
    colours = [COLOURS[label % len(COLOURS)] for label in found.labels]
    axes["map"].scatter(*found.points.T, s=110, c=colours, edgecolors="white", linewidths=0.8, zorder=2)
    for ids, place in _names(found):
        axes["map"].annotate(ids, place, xytext=(7, 6), textcoords="offset points", fontsize=9)
    first, second = (f"{100 * share:.0f} %" for share in np.nan_to_num(found.explained))
    axes["map"].set(xlabel=f"first principal component ({first} of the variance)", ylabel=f"second ({second})",
                    title="participants by the similarity of their updates and maps")
    axes["map"].margins(0.2)
    axes["map"].grid(color="#eeeeee", zorder=0)

    order = sorted(range(n), key=lambda i: (found.labels[i], found.ids[i]))
    shares = found.counts[order] / found.counts[order].sum(1, keepdims=True)
    ax = axes["classes"]
    image = ax.imshow(shares, aspect="auto", cmap="Greys", vmin=0, vmax=1, interpolation="nearest")
    figure.colorbar(image, ax=ax, label="share of the client's samples")
    ax.set_yticks(range(n), [f"{found.ids[i]} ({found.counts[i].sum()})" for i in order], fontsize=min(9, 300 / n))
    for tick, i in zip(ax.get_yticklabels(), order, strict=True):
        tick.set_color(colours[i])
        tick.set_fontweight("bold")
    ends = [place for place in range(1, n) if found.labels[order[place]] != found.labels[order[place - 1]]]
    for place in ends:
        ax.axhline(place - 0.5, color="#bd1f01", linewidth=1.5)
    few = len(found.class_names) <= 20
    ax.set_xticks(range(len(found.class_names)) if few else [], found.class_names if few else [], fontsize=9,
                  rotation=45 if max(map(len, found.class_names)) > 3 else 0)
    ax.set(ylabel="client (its samples), by cluster", title="their classes", xlabel="class")

    ax = axes["kappa"]
    ax.step(list(found.kappas), list(found.kappas.values()), where="mid", color="#555555")
    ax.plot(found.round, found.kappas[found.round], "o", color="#bd1f01")
    ax.set(xlabel="round", ylabel="clusters", ylim=(0.5, max(found.kappas.values()) + 0.5))
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    quality = "" if found.silhouette is None else f", silhouette {found.silhouette:.2f}"
    figure.suptitle(f"Clusters of {run} in round {found.round}: {max(found.labels) + 1}{quality}", fontsize=14)
    figure.savefig(path)
