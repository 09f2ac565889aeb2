"""Plot of features in one t-SNE map, as in SFD's paper (`raylt plot features RUN [RUN ...]`).

For one run: real and synthetic features (Fig. 8). For several runs over the same split: real features from each run's
encoder (Fig. 5).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from raylt.config import Config
from raylt.core.server import Server
from raylt.data.images.cache import load as load_images
from raylt.data.images.cache import take
from raylt.data.samples import Samples
from raylt.data.task import Shard, Task
from raylt.errors import CheckpointError
from raylt.plots.clients import other_split
from raylt.plots.style import COLOURS, GRID, new_figure, plain_text, save_if_asked
from raylt.runs.run import Run
from raylt.seeds import seed_for

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SHOWN_CLASSES, SHOWN_FEATURES = 10, 200


def draw_features(run: Run, path: Path | str | None = None) -> "Figure":
    """Draw real and synthetic features of a run in a t-SNE map fitted to both together.

    The real features come from training samples of all clients, which only a simulation can access.

    Args:
        run: The run.
        path: File to save the picture to: .png, .pdf or .svg.

    Raises:
        CheckpointError: The run is not finished, or its method does not synthesise features.
        ConfigError: The picture cannot be written.
    """
    experiment = run.finished().experiment(clients=False)
    config, task, server = experiment.config, experiment.task, experiment.server
    if "synthetic" not in server.state:
        raise CheckpointError(
            f"{run.folder}: the run has no synthetic features ({run.method.name}). Give a run of sfd with "
            "method.safs=true.",
            code="run.wrong-kind",
            path=str(run.folder),
            method=run.method.name,
        )
    z = server.state["synthetic"]["z"]
    y = server.state["synthetic"]["y"]
    classes = y.unique().tolist()
    synthetic: dict[int, Tensor] = {c: z[y == c] for c in classes}
    real = {c: _real_features(config, task, server, c, len(synthetic[c])) for c in classes}
    points = _map([real[c] for c in classes] + [synthetic[c] for c in classes])
    figure = _plot(
        run.name,
        [task.class_names[c] for c in classes],
        [int(task.counts[c]) for c in classes],
        {"real": points[: len(classes)], "synthetic": points[len(classes) :]},
    )
    return save_if_asked(figure, path)


def draw_encoders(runs: Sequence[Run], path: Path | str | None = None) -> "Figure":
    """Draw features of the same training samples from the encoders of several runs, in one t-SNE map.

    The classes are chosen evenly by size, including the most frequent and the rarest. Features are divided by their
    run's mean norm, so that the encoders' scales do not matter. t-SNE is fitted to the features of all runs together,
    and each run has a panel of this map. The panel's title shows the mean silhouette of the features, in [-1, 1], which
    measures how well the classes are separated in feature space.

    Args:
        runs: The runs.
        path: File to save the picture to: .png, .pdf or .svg.

    Raises:
        CheckpointError: A run is not finished, the splits differ, or the labels are maps.
        ConfigError: The picture cannot be written.
    """
    from sklearn.metrics import silhouette_score

    first = runs[0].finished()
    if first.task.kind != "classification":
        raise CheckpointError(
            f"{first.folder}: features are drawn for one class per image, but the task has label maps "
            f"({first.task.name}). Give runs of classification.",
            code="run.wrong-kind",
            path=str(first.folder),
            task=first.task.kind,
        )
    for run in runs[1:]:
        if run.finished().split.sha256 != first.split.sha256:
            raise other_split(run, first)
    counts = first.task.counts
    classes = spread([c for c in np.argsort(-counts, kind="stable").tolist() if counts[c]], SHOWN_CLASSES)
    parts: list[Tensor] = []
    titles: list[str] = []
    for run in runs:
        experiment = run.experiment(clients=False)
        by_class = [
            _real_features(first.config, experiment.task, experiment.server, c, SHOWN_FEATURES) for c in classes
        ]
        z = torch.cat(by_class)
        if parts and z.shape[1] != parts[0].shape[1]:
            raise CheckpointError(
                f"{run.folder}: its features have another dimension than those of {first.folder} (d = {z.shape[1]}, "
                f"{parts[0].shape[1]}). Give runs of models with the same d.",
                code="run.wrong-kind",
                path=str(run.folder),
                dim=z.shape[1],
            )
        parts += [part / z.norm(dim=1).mean() for part in by_class]
        silhouette = silhouette_score(z.numpy(), np.repeat(classes, [len(part) for part in by_class]))
        titles.append(f"{plain_text(run.name)}: silhouette {silhouette:.2f}")
    points = _map(parts)
    size = len(classes)
    panels = [(title, points[i * size : (i + 1) * size]) for i, title in enumerate(titles)]
    figure = new_figure(6 * len(runs), 6.4)
    axes = figure.subplots(1, len(runs), sharex=True, sharey=True, squeeze=False)[0]
    for ax, (title, clouds) in zip(axes, panels, strict=True):
        _draw(ax, clouds, title, "o")
    _legend(figure, [first.task.class_names[c] for c in classes], [int(counts[c]) for c in classes])
    figure.suptitle("Features of training samples, one t-SNE over all encoders", fontsize=14)
    return save_if_asked(figure, path)


def spread(ranked: Sequence[int], most: int) -> list[int]:
    """Return at most `most` evenly spaced elements of a list, including the first and the last."""
    steps = min(most, len(ranked)) - 1
    return [ranked[round(i * (len(ranked) - 1) / max(steps, 1))] for i in range(steps + 1)]


def _map(parts: Sequence[Tensor]) -> list[np.ndarray]:
    """Return t-SNE points [n, 2] for each set of features, from a t-SNE of all sets together."""
    from sklearn.manifold import TSNE  # takes a second to import
    from threadpoolctl import threadpool_limits

    z = torch.cat(list(parts)).double().numpy()
    perplexity = min(30.0, (len(z) - 1) / 3)
    with threadpool_limits(1):  # more threads busy-wait for each other, which is 4 times slower on a shared machine
        points = TSNE(perplexity=perplexity, init="pca", random_state=0).fit_transform(z)
    return np.split(points, np.cumsum([len(part) for part in parts])[:-1])


@torch.no_grad()
def _real_features(config: Config, task: Task, server: Server, c: int, most: int) -> Tensor:
    """Return features [n, d] of at most `most` training samples of class c, chosen at random from all clients."""
    owned = [(shard, np.flatnonzero(shard.y == c)) for shard in task.shards]
    images = np.concatenate([load_images(take(shard.x, rows)) for shard, rows in owned if len(rows)])
    rng = np.random.default_rng(seed_for(config.seed, "features", c))
    rows = np.sort(rng.choice(len(images), min(most, len(images)), replace=False))
    samples = Samples(Shard(images[rows], np.full(len(rows), c)), task.spec, torch.device("cpu"))
    encoder = server.model.encoder.eval()
    return torch.cat([encoder(batch.x) for batch in samples.in_order(config.evaluation.batch)])


def _plot(name: str, names: list[str], counts: list[int], panels: dict[str, list[np.ndarray]]) -> "Figure":
    """Draw two panels of the same map, each with the other panel's points in grey."""
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
    """Draw the points of one panel in one colour per class."""
    for i, cloud in enumerate(clouds):
        ax.scatter(
            *cloud.T,
            s=22 if shape == "o" else 16,
            color=COLOURS[i % len(COLOURS)],
            marker=shape,
            linewidths=0.3,
            edgecolors="white",
            zorder=2,
        )
    ax.set_title(title, fontsize=12)
    ax.set(xticks=[], yticks=[])


def _legend(figure: "Figure", names: list[str], counts: list[int]) -> None:
    from matplotlib.lines import Line2D

    keys = [
        Line2D(
            [],
            [],
            linestyle="",
            marker="s",
            markersize=8,
            color=COLOURS[i % len(COLOURS)],
            label=f"{plain_text(name)} ({count})",
        )
        for i, (name, count) in enumerate(zip(names, counts, strict=True))
    ]
    figure.legend(
        handles=keys,
        loc="outside lower center",
        ncols=min(len(keys), 5),
        frameon=False,
        fontsize=10,
        title="class (its training samples)",
        title_fontsize=10,
    )
