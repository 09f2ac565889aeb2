"""`raylt plot features RUN`: real and synthetic features of a finished run, as the paper of SFD shows them."""

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
from raylt.plots.style import COLOURS, GRID, new_figure, save
from raylt.runs.run import Run
from raylt.seeds import seed_for

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
    from sklearn.manifold import TSNE  # a second of imports
    from threadpoolctl import threadpool_limits

    experiment = run.finished().experiment()
    config, task, server = experiment.config, experiment.task, experiment.server
    if "synthetic" not in server.state:
        raise CheckpointError(f"{run.folder}: {run.method.name} left no synthetic features; give a run of sfd with "
                              "method.safs=true")
    z, y = server.state["synthetic"]["z"], server.state["synthetic"]["y"]
    classes = y.unique().tolist()
    synthetic: dict[int, Tensor] = {c: z[y == c] for c in classes}
    real = {c: _real_features(config, task, server, c, len(synthetic[c])) for c in classes}
    parts = [real[c] for c in classes] + [synthetic[c] for c in classes]
    z = torch.cat(parts).double().numpy()
    perplexity = min(30.0, (len(z) - 1) / 3)
    with threadpool_limits(1):      # its threads wait busily for each other: four times as slow on a shared machine
        points = TSNE(perplexity=perplexity, init="pca", random_state=0).fit_transform(z)
    cut = np.split(points, np.cumsum([len(part) for part in parts])[:-1])
    figure = _plot(run.name, [task.class_names[c] for c in classes], [int(task.counts[c]) for c in classes],
                   {"real": cut[:len(classes)], "synthetic": cut[len(classes):]})
    return save(figure, path or run.folder / "features.png")


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
    from matplotlib.lines import Line2D

    figure = new_figure(12, 6.4)
    axes = figure.subplots(1, 2, sharex=True, sharey=True)
    other = dict(zip(panels, reversed(list(panels.values())), strict=True))
    for ax, (kind, clouds) in zip(axes, panels.items(), strict=True):
        shape = "o" if kind == "real" else "^"
        ax.scatter(*np.concatenate(other[kind]).T, s=9, c=GRID, marker="o" if shape == "^" else "^", linewidths=0)
        for i, cloud in enumerate(clouds):
            ax.scatter(*cloud.T, s=22 if kind == "real" else 16, color=COLOURS[i % len(COLOURS)], marker=shape,
                       linewidths=0.3, edgecolors="white", zorder=2)
        unlike = next(k for k in panels if k != kind)
        ax.set_title(f"{kind}: {sum(map(len, clouds))} features (grey: the {unlike} ones)", fontsize=12)
        ax.set(xticks=[], yticks=[])
    keys = [Line2D([], [], linestyle="", marker="s", markersize=8, color=COLOURS[i % len(COLOURS)],
                   label=f"{of} ({count})") for i, (of, count) in enumerate(zip(names, counts, strict=True))]
    figure.legend(handles=keys, loc="outside lower center", ncols=min(len(keys), 5), frameon=False, fontsize=10,
                  title="class (its training samples)", title_fontsize=10)
    figure.suptitle(f"Features of {name}, t-SNE", fontsize=14)
    return figure
