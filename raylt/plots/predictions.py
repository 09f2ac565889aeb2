"""Plot of a segmentation run's test images with true and predicted label maps (`raylt plot predictions RUN`)."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from raylt.data.images.cache import load, take
from raylt.data.label_maps import VOID, relabel
from raylt.data.task import Task
from raylt.errors import CheckpointError, ConfigError, spoken
from raylt.plots.style import new_figure, plain_text, save_if_asked
from raylt.runs.callbacks.prediction_grid import palette_of
from raylt.runs.export.export import choose_client_of, clients_of, has_client_models
from raylt.runs.export.trained_model import TrainedModel
from raylt.runs.run import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DEFAULT_IMAGES = 4  # number of images to draw by default


def draw_predictions(
    run: Run, images: Sequence[int] = (), client: str | int | None = None, path: Path | str | None = None
) -> "Figure":
    """Draw test images of a run, one row per image: the input, its true map and its predicted map.

    Args:
        run: The run.
        images: Indices in the test set; by default four evenly spaced images.
        client: Name or id of the client whose model and view of the classes to show. By default the global model, or
            with a personal method the model of the first client with samples.
        path: File to save the picture to: .png, .pdf or .svg.

    Raises:
        CheckpointError: The run is not finished, or its task is not segmentation.
        ConfigError: The image or the client is unknown, or the picture cannot be written.
    """
    task = run.finished().task
    if task.kind != "segmentation":
        raise CheckpointError(
            f"{run.folder}: the task has no label maps ({task.name}). Draw its accuracies with "
            f"{spoken('raylt plot clients', 'run.plot(' + repr('clients') + ')')}.",
            code="run.wrong-kind",
            path=str(run.folder),
            task=task.kind,
        )
    rows = np.array(
        images or np.linspace(0, len(task.test) - 1, min(DEFAULT_IMAGES, len(task.test))).round(), dtype=np.int64
    )
    outside = rows[(rows < 0) | (rows >= len(task.test))]
    if outside.size:
        raise ConfigError(
            f"{spoken('--image', 'images')}: unknown test image ({outside[0]}). Give a number from 0 to "
            f"{len(task.test) - 1}.",
            code="config.out-of-range",
            key="--image",
            value=int(outside[0]),
        )
    pictures = load(take(task.test.x, rows))
    truth = load(take(task.test.y, rows))
    id, model, title = _model_to_draw(run, client)
    predicted = model.predict(pictures).labels.numpy().astype(np.uint8)
    if id is not None and task.views is not None:
        truth = relabel(truth, task.views[id])
        predicted = relabel(predicted, task.views[id])
    figure = _plot(
        f"{run.name}, {title}",
        task,
        [f"image {row}" for row in rows],
        pictures,
        {"truth": truth, "prediction": predicted},
    )
    return save_if_asked(figure, path)


def _model_to_draw(run: Run, client: str | int | None) -> tuple[int | None, TrainedModel, str]:
    """Return the client whose class mapping applies (or None), the model that predicts, and the model's name."""
    own_models = has_client_models(run)
    clients = clients_of(run)
    if client is None and not own_models:
        return None, run.model(), "global model"
    id = clients[0][0] if client is None else choose_client_of(run, client)
    name = dict(clients)[id]
    if own_models:
        return id, run.client_model(id), f"model of client {name}"
    return id, run.model(), f"global model, classes as client {name} sees them"


def _plot(title: str, task: Task, rows: list[str], images: np.ndarray, maps: dict[str, np.ndarray]) -> "Figure":
    from matplotlib.patches import Patch

    palette = palette_of(task)
    height, width, channels = task.shape
    figure = new_figure(13, 1.5 + len(rows) * 4.2 * height / width, dpi=120)
    axes = figure.subplots(len(rows), 1 + len(maps), squeeze=False)
    for i, name in enumerate(rows):
        panels = {name: images[i] if channels == 3 else np.repeat(images[i][..., :1], 3, axis=-1)}
        panels |= {kind: palette[pixels[i]] for kind, pixels in maps.items()}
        for ax, (kind, picture) in zip(axes[i], panels.items(), strict=True):
            ax.imshow(picture, interpolation="nearest")
            ax.set(xticks=[], yticks=[])
            ax.set_title(kind if i == 0 or kind == name else "", fontsize=11)
    shown = [*np.unique(np.stack(list(maps.values())))]
    keys = [
        Patch(
            facecolor=tuple((palette[c] / 255).tolist()),
            edgecolor="#888888",
            label="void" if c == VOID else plain_text(task.class_names[c]),
        )
        for c in shown
    ]
    figure.legend(handles=keys, loc="outside lower center", ncols=min(len(keys), 7), frameon=False, fontsize=11)
    figure.suptitle(plain_text(title), fontsize=13)
    return figure
