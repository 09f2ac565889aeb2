"""The picture of predictions in TensorBoard: test images with true and predicted classes."""

import io
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from raylt.core.checkpoint import checkpoint
from raylt.core.evaluation.evaluator import has_own_models
from raylt.core.setup import Setup
from raylt.data.images.cache import load, take
from raylt.data.label_maps import VOID, relabel
from raylt.data.sources.scenes import COLOURS
from raylt.data.task import Task, outline_of, task_from
from raylt.registry import is_plugin
from raylt.runs.export.trained_model import client_models, global_model, needs_images
from raylt.runs.in_process import open_in_process, with_device

if TYPE_CHECKING:
    from PIL import Image

COLUMNS = 6
MAX_IMAGES = 24
MAX_MAPS = 4
MIN_SIDE = 96  # minimum width of a drawn test image in pixels; images are enlarged by whole factors
GAP = 6  # pixels between images
LINE = 13  # height of a line of text in pixels
RIGHT, WRONG = (0, 120, 0), (190, 0, 0)
BACKGROUND, UNLABELLED = (0, 0, 0), (255, 255, 255)  # colours of classes that a client does not have, and of VOID


class Picture(NamedTuple):
    """A PNG image of height x width pixels.

    Attributes:
        model: Name of the model whose predictions it shows, such as "global model" or "client 3".
    """

    png: bytes
    height: int
    width: int
    model: str


def draw_prediction_grid(setup: Setup, task: Task, folder: Path) -> Picture:
    """Draw test images of a finished run with true and predicted classes.

    Classes are written as words, with correct predictions in green, and label maps are drawn as images. If clients have
    models of their own, the first client's model is used, on its own test images if it has any.
    """
    saved, _ = checkpoint.latest(folder / "checkpoints")
    assert saved is not None
    # load the model without images: a frozen encoder would encode all of them again on this device;
    # only the method of a plugin may need them
    described = task if is_plugin("method", setup.method.name) else task_from(outline_of(task), task.split)
    experiment = open_in_process(with_device(setup, "cpu"), described, folder, saved, clients=False)
    rows = np.arange(len(task.test))
    name = "global model"
    client = None
    if has_own_models(setup.method, experiment.server):
        first = experiment.fleet.ids[:1]
        if needs_images(experiment, saved, first):
            experiment = open_in_process(with_device(setup, "cpu"), task, folder, saved, clients=False)
        client, model = next(client_models(experiment, setup, saved, first))
        name = f"client {task.client_names[client]}"
        if task.own_tests is not None and len(task.own_tests[client]):
            rows = task.own_tests[client]
    else:
        model = global_model(experiment, None)
    most = MAX_IMAGES if task.kind == "classification" else MAX_MAPS
    rows = rows[np.linspace(0, len(rows) - 1, min(most, len(rows))).round().astype(np.int64)]
    images = load(take(task.test.x, rows))
    truth = load(take(task.test.y, rows))
    predicted = model.predict(images).labels.numpy()
    if task.kind == "classification":
        class_pairs = [(task.class_names[a], task.class_names[b]) for a, b in zip(truth, predicted, strict=True)]
        return _with_words(images, class_pairs, name)
    predicted = predicted.astype(np.uint8)
    if client is not None and task.views is not None:
        truth = relabel(truth, task.views[client])
        predicted = relabel(predicted, task.views[client])
    palette = palette_of(task)
    return _with_maps(images, palette[truth], palette[predicted], name)


def palette_of(task: Task) -> np.ndarray:
    """Return the colours of the classes, uint8 [256, 3]: the data set's own colours, or evenly spaced hues."""
    colours = COLOURS.get(task.name)
    classes = task.classes - ("-" in task.groups)
    if colours is None:
        from matplotlib import colormaps

        hues = [colormaps["turbo"](c / max(classes - 1, 1))[:3] for c in range(classes)]
        colours = [[int(255 * part) for part in hue] for hue in hues]
    palette = np.array([*colours, *[BACKGROUND] * (256 - classes)], dtype=np.uint8)
    palette[VOID] = UNLABELLED
    return palette


def _with_words(images: np.ndarray, class_pairs: list[tuple[str, str]], name: str) -> Picture:
    """Draw images in rows, with the true and the predicted class below each."""
    from PIL import Image, ImageDraw, ImageFont

    pictures = _enlarge(images)
    height, width = pictures.shape[1:3]
    columns = min(COLUMNS, len(pictures))
    rows = -(-len(pictures) // columns)
    sheet = Image.new("RGB", (GAP + columns * (width + GAP), GAP + rows * (height + 2 * LINE + GAP)), "white")
    pen = ImageDraw.Draw(sheet)
    font = ImageFont.load_default()
    for number, (picture, (truth, predicted)) in enumerate(zip(pictures, class_pairs, strict=True)):
        x = GAP + number % columns * (width + GAP)
        y = GAP + number // columns * (height + 2 * LINE + GAP)
        sheet.paste(Image.fromarray(picture), (x, y))
        colour = RIGHT if truth == predicted else WRONG
        for line, (text, ink) in enumerate(((truth, (0, 0, 0)), (predicted, colour))):
            while pen.textlength(text, font) > width and len(text) > 1:
                text = text.rstrip("…")[:-1] + "…"
            pen.text((x, y + height + line * LINE), text, ink, font)
    return _encode(sheet, name)


def _with_maps(images: np.ndarray, truth: np.ndarray, predicted: np.ndarray, name: str) -> Picture:
    """Draw one row per image: the image, its true label map and its predicted label map."""
    from PIL import Image

    columns = [_enlarge(part) for part in (images, truth, predicted)]
    height, width = columns[0].shape[1:3]
    sheet = Image.new("RGB", (GAP + 3 * (width + GAP), GAP + len(images) * (height + GAP)), "white")
    for column, pictures in enumerate(columns):
        for row, picture in enumerate(pictures):
            sheet.paste(Image.fromarray(picture), (GAP + column * (width + GAP), GAP + row * (height + GAP)))
    return _encode(sheet, name)


def _enlarge(images: np.ndarray) -> np.ndarray:
    """Return images with three channels in which each pixel is enlarged to a square, uint8 [n, H, W, 3]."""
    factor = max(1, -(-MIN_SIDE // images.shape[2]))
    coloured = images if images.shape[3] == 3 else np.repeat(images[..., :1], 3, axis=3)
    return coloured.repeat(factor, axis=1).repeat(factor, axis=2)


def _encode(sheet: "Image.Image", name: str) -> Picture:
    stream = io.BytesIO()
    sheet.save(stream, "PNG")
    return Picture(stream.getvalue(), sheet.height, sheet.width, name)
