"""The picture of predictions that TensorBoard shows: test images, what is on them and what the model says."""

import io
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from raylt.core import checkpoint
from raylt.core.setup import Setup
from raylt.core.validation import has_own_models
from raylt.data.cache import load, take
from raylt.data.maps import VOID, relabel
from raylt.data.scenes import COLOURS
from raylt.data.task import Task
from raylt.runs.export import client_models, global_model
from raylt.runs.here import computed_on, open_here

if TYPE_CHECKING:
    from PIL import Image

ACROSS, SHOWN, SHOWN_MAPS = 6, 24, 4
SIDE = 96                   # pixels that a test image gets at least, in whole multiples of its own
GAP, LINE = 6, 13           # pixels between images, and of a line of text
RIGHT, WRONG = (0, 120, 0), (190, 0, 0)
BACKGROUND, NOBODY = (0, 0, 0), (255, 255, 255)     # a client's other classes; VOID


class Picture(NamedTuple):
    """A PNG of height x width pixels, and whose predictions are on it."""

    png: bytes
    height: int
    width: int
    whose: str


def draw_predictions(setup: Setup, task: Task, folder: Path) -> Picture:
    """Test images of a run that has come to its end, with truth and prediction: of classes in words, right ones green;
    of label maps as maps. By the global model, or where clients have models of their own by the first one's, on its own
    test images where it has any."""
    saved, _ = checkpoint.latest(folder / "checkpoints")
    assert saved is not None
    experiment = open_here(computed_on(setup, "cpu"), task, folder, None)
    experiment.load(saved, clients=False)
    rows, whose, client = np.arange(len(task.test)), "global model", None
    if has_own_models(setup.method, experiment.server):
        client, model = next(client_models(experiment, setup, saved, None))
        whose = f"client {task.client_names[client]}"
        if task.own_tests is not None and len(task.own_tests[client]):
            rows = task.own_tests[client]
    else:
        model = global_model(experiment, None)
    most = SHOWN if task.kind == "classification" else SHOWN_MAPS
    rows = rows[np.linspace(0, len(rows) - 1, min(most, len(rows))).round().astype(np.int64)]
    images, truth = load(take(task.test.x, rows)), load(take(task.test.y, rows))
    predicted = model.predict(images).labels.numpy()
    if task.kind == "classification":
        names = [(task.class_names[a], task.class_names[b]) for a, b in zip(truth, predicted, strict=True)]
        return _with_words(images, names, whose)
    predicted = predicted.astype(np.uint8)
    if client is not None:
        truth, predicted = (relabel(maps, task.views[client]) for maps in (truth, predicted))
    palette = palette_of(task)
    return _with_maps(images, palette[truth], palette[predicted], whose)


def palette_of(task: Task) -> np.ndarray:
    """Colours of the classes as the data set's authors draw them, else evenly spaced hues, uint8 [256, 3]."""
    known = COLOURS.get(task.name)
    classes = task.classes - ("-" in task.groups)
    if known is None:
        from matplotlib import colormaps
        known = [[int(255 * part) for part in colormaps["turbo"](c / max(classes - 1, 1))[:3]] for c in range(classes)]
    palette = np.array([*known, *[BACKGROUND] * (256 - classes)], dtype=np.uint8)
    palette[VOID] = NOBODY
    return palette


def _with_words(images: np.ndarray, names: list[tuple[str, str]], whose: str) -> Picture:
    from PIL import Image, ImageDraw, ImageFont

    pictures = _enlarged(images)
    height, width = pictures.shape[1:3]
    across = min(ACROSS, len(pictures))
    down = -(-len(pictures) // across)
    sheet = Image.new("RGB", (GAP + across * (width + GAP), GAP + down * (height + 2 * LINE + GAP)), "white")
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default()
    for place, (picture, (truth, predicted)) in enumerate(zip(pictures, names, strict=True)):
        x = GAP + place % across * (width + GAP)
        y = GAP + place // across * (height + 2 * LINE + GAP)
        sheet.paste(Image.fromarray(picture), (x, y))
        colour = RIGHT if truth == predicted else WRONG
        for line, (text, ink) in enumerate(((truth, (0, 0, 0)), (predicted, colour))):
            while pen.textlength(text, font) > width and len(text) > 1:
                text = text.rstrip("…")[:-1] + "…"
            pen.text((x, y + height + line * LINE), text, ink, font)
    return _encoded(sheet, whose)


def _with_maps(images: np.ndarray, truth: np.ndarray, predicted: np.ndarray, whose: str) -> Picture:
    from PIL import Image

    columns = [_enlarged(part) for part in (images, truth, predicted)]
    height, width = columns[0].shape[1:3]
    sheet = Image.new("RGB", (GAP + 3 * (width + GAP), GAP + len(images) * (height + GAP)), "white")
    for across, pictures in enumerate(columns):
        for down, picture in enumerate(pictures):
            sheet.paste(Image.fromarray(picture), (GAP + across * (width + GAP), GAP + down * (height + GAP)))
    return _encoded(sheet, whose)


def _enlarged(images: np.ndarray) -> np.ndarray:
    """Images with three channels, each pixel as a square: uint8 [n, H, W, 3]."""
    times = max(1, -(-SIDE // images.shape[2]))
    coloured = images if images.shape[3] == 3 else np.repeat(images[..., :1], 3, axis=3)
    return coloured.repeat(times, axis=1).repeat(times, axis=2)


def _encoded(sheet: "Image.Image", whose: str) -> Picture:
    stream = io.BytesIO()
    sheet.save(stream, "PNG")
    return Picture(stream.getvalue(), sheet.height, sheet.width, whose)
