"""`raylt plot predictions RUN`: test images of a segmentation run, what is in them and what the model sees."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from raylt.data.cache import load, take
from raylt.data.maps import VOID, relabel
from raylt.data.task import Task
from raylt.errors import CheckpointError, ConfigError
from raylt.plots.style import new_figure, plain_text, save
from raylt.runs.about import choose
from raylt.runs.exporting import clients_of, has_client_models
from raylt.runs.grid import palette_of
from raylt.runs.run import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHOWN = 4


def draw_predictions(run: Run, images: Sequence[int] = (), client: str | int | None = None,
                     path: Path | None = None) -> Path:
    """Writes predictions.png into a run folder: a row per image, its input, its true map and the predicted one.

    Args:
        images: places in the test set; by default four, evenly spaced.
        client: name or id of the one whose model and view of the classes is shown; by default the global model, or,
            of a personal method, that of the first client that holds samples.
        path: of the picture, if it is to go elsewhere.

    Returns:
        The picture's path.

    Raises:
        CheckpointError: the run is not finished, or not of segmentation.
        ConfigError: no such image or client, or the picture cannot be written there.
    """
    task = run.finished().task
    if task.kind != "segmentation":
        raise CheckpointError(f"{run.folder}: {task.name} is a task of {task.kind}, it has no label maps to show; "
                              "raylt plot clients draws its accuracies")
    rows = np.array(images or np.linspace(0, len(task.test) - 1, min(SHOWN, len(task.test))).round(), dtype=np.int64)
    if (strange := rows[(rows < 0) | (rows >= len(task.test))]).size:
        raise ConfigError(f"--image {strange[0]}: {task.name} has the test images 0 to {len(task.test) - 1}")
    pictures = load(take(task.test.x, rows))
    truth = load(take(task.test.y, rows))
    own, clients = has_client_models(run), clients_of(run)
    first = clients[0][0] if own else None
    id = first if client is None else choose(client, clients, str(run.folder))
    model = run.model() if id is None or not own else run.client_model(id)
    predicted = model.predict(pictures).labels.numpy().astype(np.uint8)
    whose = f"model of client {dict(clients)[id]}" if own and id is not None else "global model"
    if id is not None:
        truth, predicted = (relabel(maps, task.views[id]) for maps in (truth, predicted))
        whose += "" if own else f", classes as client {dict(clients)[id]} sees them"
    figure = _plot(f"{run.name}, {whose}", task, [f"image {row}" for row in rows], pictures,
                   {"truth": truth, "prediction": predicted})
    return save(figure, path or run.folder / "predictions.png")


def _plot(title: str, task: Task, rows: list[str], images: np.ndarray, maps: dict[str, np.ndarray]) -> "Figure":
    from matplotlib.patches import Patch

    palette = palette_of(task)
    height, width, channels = task.shape
    figure = new_figure(13, 1.5 + len(rows) * 4.2 * height / width, dpi=120)
    axes = figure.subplots(len(rows), 1 + len(maps), squeeze=False)
    for i, name in enumerate(rows):
        panels = {name: images[i] if channels == 3 else np.repeat(images[i][..., :1], 3, axis=-1)}
        panels |= {kind: palette[of[i]] for kind, of in maps.items()}
        for ax, (kind, picture) in zip(axes[i], panels.items(), strict=True):
            ax.imshow(picture, interpolation="nearest")
            ax.set(xticks=[], yticks=[])
            ax.set_title(kind if i == 0 or kind == name else "", fontsize=11)
    shown = [*np.unique(np.stack(list(maps.values())))]
    keys = [Patch(facecolor=tuple((palette[c] / 255).tolist()), edgecolor="#888888",
                  label="void" if c == VOID else plain_text(task.class_names[c])) for c in shown]
    figure.legend(handles=keys, loc="outside lower center", ncols=min(len(keys), 7), frameon=False, fontsize=11)
    figure.suptitle(plain_text(title), fontsize=13)
    return figure
