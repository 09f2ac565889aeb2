"""`raylt plot features RUN [RUN ...]`: features as the paper of SFD shows them, of a run real and synthetic ones (Fig.
8), of several runs over the same split the real ones of each run's encoder, all in one map (Fig. 5)."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from raylt.config import Config
from raylt.core.server import Server
from raylt.data.cache import load as load_images
from raylt.data.cache import take
from raylt.data.samples import Samples
from raylt.data.task import Shard, Task
from raylt.errors import CheckpointError
from raylt.plots.style import COLOURS, GRID, new_figure, plain_text, save
from raylt.runs.run import Run
from raylt.seeds import seed_for

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SHOWN_CLASSES, SHOWN_FEATURES = 10, 200


def draw_features(run: Run, path: Path | None = None) -> Path:
    """Writes features.png into a run folder: t-SNE of real and synthetic features, fitted to both together.

    The real ones are those of training samples of all clients: only a simulation can look at them.

    Args:
        path: of the picture, if it is to go elsewhere.

    Returns:
        The picture's path.

    Raises:
        CheckpointError: the run is not finished, or of a method that synthesises no features.
        ConfigError: it cannot be written there.
    """
    experiment = run.finished().experiment()
    config, task, server = experiment.config, experiment.task, experiment.server
    if "synthetic" not in server.state:
        raise CheckpointError(f"{run.folder}: {run.method.name} left no synthetic features; give a run of sfd with "
                              "method.safs=true")
    z, y = server.state["synthetic"]["z"], server.state["synthetic"]["y"]
    classes = y.unique().tolist()
    synthetic: dict[int, Tensor] = {c: z[y == c] for c in classes}
    real = {c: _real_features(config, task, server, c, len(synthetic[c])) for c in classes}
    cut = _map([real[c] for c in classes] + [synthetic[c] for c in classes])
    figure = _plot(run.name, [task.class_names[c] for c in classes], [int(task.counts[c]) for c in classes],
                   {"real": cut[:len(classes)], "synthetic": cut[len(classes):]})
    return save(figure, path or run.folder / "features.png")


def draw_encoders(runs: Sequence[Run], path: Path) -> Path:
    """Writes a picture of the features that the encoders of several runs make of the same training samples.

    The classes are spread evenly over the sizes, the most frequent and the rarest among them. Features are divided by
    their run's mean length, so that no encoder's scale decides, and t-SNE is fitted to those of all runs together; each
    run has a panel of the one map. Its title tells how well the classes are apart before they are drawn: the mean
    silhouette of the features, in [-1, 1].

    Raises:
        CheckpointError: a run is not finished, the splits differ, or labels are maps.
        ConfigError: it cannot be written there.
    """
    from sklearn.metrics import silhouette_score

    first = runs[0].finished()
    if first.task.kind != "classification":
        raise CheckpointError(f"{first.folder}: {first.task.name} has label maps, and features are drawn by an image's "
                              "one class; give runs of classification")
    for run in runs[1:]:
        if run.finished().split.sha256 != first.split.sha256:
            raise CheckpointError(f"{run.folder}: its clients hold other samples than those of {first.folder}; give "
                                  "runs over the same split")
    counts = first.task.counts
    classes = spread([c for c in np.argsort(-counts, kind="stable").tolist() if counts[c]], SHOWN_CLASSES)
    parts, titles = [], []
    for run in runs:
        experiment = run.experiment()
        own = [_real_features(first.config, experiment.task, experiment.server, c, SHOWN_FEATURES) for c in classes]
        z = torch.cat(own)
        if parts and z.shape[1] != parts[0].shape[1]:
            raise CheckpointError(f"{run.folder}: its model's features have d = {z.shape[1]}, those of {first.folder} "
                                  f"d = {parts[0].shape[1]}, and one map is drawn of all; give runs of models with the "
                                  "same d")
        parts += [part / z.norm(dim=1).mean() for part in own]
        apart = silhouette_score(z.numpy(), np.repeat(classes, [len(part) for part in own]))
        titles.append(f"{plain_text(run.name)}: silhouette {apart:.2f}")
    cut = _map(parts)
    size = len(classes)
    panels = [(title, cut[i * size:(i + 1) * size]) for i, title in enumerate(titles)]
    figure = new_figure(6 * len(runs), 6.4)
    axes = figure.subplots(1, len(runs), sharex=True, sharey=True, squeeze=False)[0]
    for ax, (title, clouds) in zip(axes, panels, strict=True):
        _draw(ax, clouds, title, "o")
    _legend(figure, [first.task.class_names[c] for c in classes], [int(counts[c]) for c in classes])
    figure.suptitle("Features of training samples, one t-SNE over all encoders", fontsize=14)
    return save(figure, path)


def spread(ranked: Sequence[int], most: int) -> list[int]:
    """At most `most` of a list, evenly spaced, both ends among them."""
    steps = min(most, len(ranked)) - 1
    return [ranked[round(i * (len(ranked) - 1) / max(steps, 1))] for i in range(steps + 1)]


def _map(parts: Sequence[Tensor]) -> list[np.ndarray]:
    """Points [n, 2] of each part, of one t-SNE over all of them."""
    from sklearn.manifold import TSNE  # a second of imports
    from threadpoolctl import threadpool_limits

    z = torch.cat(list(parts)).double().numpy()
    perplexity = min(30.0, (len(z) - 1) / 3)
    with threadpool_limits(1):      # its threads wait busily for each other: four times as slow on a shared machine
        points = TSNE(perplexity=perplexity, init="pca", random_state=0).fit_transform(z)
    return np.split(points, np.cumsum([len(part) for part in parts])[:-1])


@torch.no_grad()
def _real_features(config: Config, task: Task, server: Server, c: int, most: int) -> Tensor:
    """Features of at most `most` training samples of class c, drawn over all clients, [n, d]."""
    owned = [(shard, np.flatnonzero(shard.y == c)) for shard in task.shards]
    images = np.concatenate([load_images(take(shard.x, rows)) for shard, rows in owned if len(rows)])
    rng = np.random.default_rng(seed_for(config.seed, "features", c))
    rows = np.sort(rng.choice(len(images), min(most, len(images)), replace=False))
    samples = Samples(Shard(images[rows], np.full(len(rows), c)), task.facts, torch.device("cpu"))
    encoder = server.model.encoder.eval()
    return torch.cat([encoder(batch.x) for batch in samples.in_order(config.evaluation.batch)])


def _plot(name: str, names: list[str], counts: list[int], panels: dict[str, list[np.ndarray]]) -> "Figure":
    """Two panels over the same map; in each, the other's points in grey."""
    figure = new_figure(12, 6.4)
    axes = figure.subplots(1, 2, sharex=True, sharey=True)
    other = dict(zip(panels, reversed(list(panels.values())), strict=True))
    for ax, (kind, clouds) in zip(axes, panels.items(), strict=True):
        shape = "o" if kind == "real" else "^"
        ax.scatter(*np.concatenate(other[kind]).T, s=9, c=GRID, marker="o" if shape == "^" else "^", linewidths=0)
        unlike = next(k for k in panels if k != kind)
        _draw(ax, clouds, f"{kind}: {sum(map(len, clouds))} features (grey: the {unlike} ones)", shape)
    _legend(figure, names, counts)
    figure.suptitle(f"Features of {plain_text(name)}, t-SNE", fontsize=14)
    return figure


def _draw(ax: "Axes", clouds: list[np.ndarray], title: str, shape: str) -> None:
    """The points of one panel, a colour for each class."""
    for i, cloud in enumerate(clouds):
        ax.scatter(*cloud.T, s=22 if shape == "o" else 16, color=COLOURS[i % len(COLOURS)], marker=shape,
                   linewidths=0.3, edgecolors="white", zorder=2)
    ax.set_title(title, fontsize=12)
    ax.set(xticks=[], yticks=[])


def _legend(figure: "Figure", names: list[str], counts: list[int]) -> None:
    from matplotlib.lines import Line2D

    keys = [Line2D([], [], linestyle="", marker="s", markersize=8, color=COLOURS[i % len(COLOURS)],
                   label=f"{plain_text(name)} ({count})")
            for i, (name, count) in enumerate(zip(names, counts, strict=True))]
    figure.legend(handles=keys, loc="outside lower center", ncols=min(len(keys), 5), frameon=False, fontsize=10,
                  title="class (its training samples)", title_fontsize=10)
