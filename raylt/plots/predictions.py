"""`raylt show RUN`: test images of a segmentation run, what is in them and what the model sees, side by side."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import nn

from raylt.config import Config, load
from raylt.core import checkpoint
from raylt.core.client import Client, Message, Reply
from raylt.core.experiment import Experiment
from raylt.core.host import Host
from raylt.core.in_process import LocalFleet
from raylt.core.judging import judged_entries, judged_model
from raylt.core.method import Method
from raylt.core.reductions import each
from raylt.data.cache import load as load_images
from raylt.data.cache import take
from raylt.data.maps import VOID, relabel
from raylt.data.samples import Samples
from raylt.data.scenes import COLOURS
from raylt.data.task import Shard, Task, build_task
from raylt.errors import CheckpointError, ConfigError
from raylt.registry import resolve

SHOWN = 4
BACKGROUND, NOBODY = (0, 0, 0), (255, 255, 255)     # a client's other classes; VOID


def draw_predictions(folder: Path, images: Sequence[int] = (), client: int | None = None) -> Path:
    """Writes predictions.png into a run folder: a row per image, its input, its true map and the predicted one.

    Args:
        images: places in the test set; by default four, evenly spaced.
        client: whose model and view of the classes; by default the deployed model, or, of a personal method, that of
            the first client that holds samples.

    Returns:
        The picture's path.

    Raises:
        CheckpointError: not a run folder, not finished, or not of segmentation.
        ConfigError: no such image or client.
    """
    config, task = _reopen(folder)
    rows = np.array(images or np.linspace(0, len(task.test) - 1, min(SHOWN, len(task.test))).round(), dtype=np.int64)
    if (strange := rows[(rows < 0) | (rows >= len(task.test))]).size:
        raise ConfigError(f"--image {strange[0]}: {task.name} has the test images 0 to {len(task.test) - 1}")
    chosen = Shard(take(task.test.x, rows), take(task.test.y, rows))
    setup, device = resolve(config), torch.device("cpu")
    method = setup.method
    fleet = LocalFleet(config, task, Host(setup, task.facts, chosen, device))
    experiment = Experiment(setup, task, fleet, device, folder)
    saved, _ = checkpoint.latest(folder / "checkpoints")
    if saved is None:
        raise CheckpointError(f"{folder}: has no checkpoint that can be read; run it again")
    experiment.load(saved)
    if client is None and (method.personal or experiment.server.model.stays):
        client = fleet.ids[0]
    if client is None:
        truth = chosen.labels()
        predicted = _maps(method, method.global_model(experiment.server), Samples(chosen, task.facts, device)).numpy()
    elif client in fleet.ids:
        message = {"model": judged_entries(experiment.server, method)}
        asked = fleet.ask(partial(_ask, method), [client], message, maps=each)["maps"]
        truth, predicted = (relabel(maps, task.views[client]) for maps in (
            chosen.labels(), asked[client].numpy()))
    else:
        raise ConfigError(f"--client {client}: holds no samples; those that do: {', '.join(map(str, fleet.ids))}")
    path = folder / "predictions.png"
    whose = "global model" if client is None else f"model of client {client}"
    _plot(path, f"{folder.name}, {whose}", task, [f"image {row}" for row in rows], load_images(chosen.x),
          {"truth": truth, "prediction": predicted})
    return path


def _reopen(folder: Path) -> tuple[Config, Task]:
    if not (folder / "config.yaml").is_file():
        raise CheckpointError(f"{folder}: not a run folder (it has no config.yaml); give one that raylt run made")
    if not (folder / "summary.json").is_file():
        raise CheckpointError(f"{folder}: this run is not finished; continue it with raylt resume {folder}")
    config = load(folder / "config.yaml")
    task = build_task(config.data.model_copy(update={"split": str(folder / "split.json")}))
    if task.kind != "segmentation":
        raise CheckpointError(f"{folder}: {task.name} is a task of {task.kind}, it has no label maps to show; raylt "
                              "clients draws its accuracies")
    return config, task


def _ask(method: Method, client: Client, message: Message) -> Reply:
    return client.reply(maps=_maps(method, judged_model(method, client, message["model"]), client.test.samples))


@torch.no_grad()
def _maps(method: Method, model: nn.Module, samples: Samples) -> torch.Tensor:
    """Predicted maps, uint8 [n, H, W]."""
    model.eval()
    return torch.cat([method.predict(model, batch.x).argmax(1).to(torch.uint8) for batch in samples.in_order(1)])


def palette_of(task: Task) -> np.ndarray:
    """Colours of the classes as the data set's authors draw them, else evenly spaced hues, uint8 [256, 3]."""
    from matplotlib import colormaps

    known = COLOURS.get(task.name)
    classes = task.classes - ("-" in task.groups)
    colours = known or [[int(255 * part) for part in colormaps["turbo"](c / max(classes - 1, 1))[:3]]
                        for c in range(classes)]
    palette = np.array([*colours, *[BACKGROUND] * (256 - classes)], dtype=np.uint8)
    palette[VOID] = NOBODY
    return palette


def _plot(path: Path, title: str, task: Task, rows: list[str], images: np.ndarray, maps: dict[str, np.ndarray]) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    palette = palette_of(task)
    height, width, channels = task.shape
    figure = Figure(figsize=(13, 1.5 + len(rows) * 4.2 * height / width), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(rows), 1 + len(maps), squeeze=False)
    for i, name in enumerate(rows):
        panels = {name: images[i] if channels == 3 else np.repeat(images[i][..., :1], 3, axis=-1)}
        panels |= {kind: palette[its[i]] for kind, its in maps.items()}
        for ax, (kind, picture) in zip(axes[i], panels.items(), strict=True):
            ax.imshow(picture, interpolation="nearest")
            ax.set(xticks=[], yticks=[])
            ax.set_title(kind if i == 0 or kind == name else "", fontsize=11)
    shown = [*np.unique(np.stack(list(maps.values())))]
    keys = [Patch(facecolor=tuple((palette[c] / 255).tolist()), edgecolor="#888888",
                  label="void" if c == VOID else task.class_names[c]) for c in shown]
    figure.legend(handles=keys, loc="outside lower center", ncols=min(len(keys), 7), frameon=False, fontsize=11)
    figure.suptitle(title, fontsize=13)
    figure.savefig(path)
