"""`raylt.load_model`: load a model from an exported file, and read image files in the model's input format."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from raylt.data.images.decoding import Fit, Undecodable, fitted_image, flat_image, grouped_by_cause
from raylt.data.images.image_files import shown_name
from raylt.disk import as_path, exists, is_folder
from raylt.errors import ConfigError, DataError, count_of
from raylt.runs.export import artefact, graph_formats
from raylt.runs.export.artefact import choose_client_in
from raylt.runs.export.graph_formats import GraphModel
from raylt.runs.export.trained_model import TrainedModel

SUFFIXES = (".safetensors", ".pt2", ".onnx")


def load_model(file: Path | str, client: str | int | None = None) -> TrainedModel | GraphModel:
    """Load the model of a run folder, or of a file that `raylt export` wrote.

    Args:
        file: A run folder or an exported file. An exported file needs neither the run nor its data.
        client: Name or id of the client whose model to load, if there are several.

    Raises:
        ConfigError: The file is of another kind, the client is unknown, or a plugin that the model needs is missing.
        CheckpointError: The file cannot be read, or the folder is not a run with a checkpoint.
    """
    path = as_path(file, "file")
    if is_folder(path):
        from raylt.runs.export.export import model_of
        from raylt.runs.run import Run

        return model_of(Run.open(path), client)
    if path.suffix not in SUFFIXES and not exists(path):
        raise ConfigError(
            f"{path}: no such run folder or file. Give a run folder, or a file that raylt export wrote.",
            code="file.not-found",
            path=str(path),
        )
    if path.suffix not in SUFFIXES:
        raise ConfigError(
            f"{path}: is not an exported model ({path.suffix or 'no ending'}). Give a file that raylt export wrote, "
            f"which ends in {', '.join(SUFFIXES)}.",
            code="export.unknown-format",
            path=str(path),
        )
    if path.suffix == ".safetensors":
        return artefact.read(path).model(client)
    model = graph_formats.read(path)
    choose_client_in(model.description, client, path)
    return model


def has_several_models(path: Path) -> bool:
    """Return whether a file contains the models of several clients."""
    return path.suffix == ".safetensors" and len(artefact.read(path).clients) > 1


def load_images(files: Sequence[Path], shape: tuple[int, int, int], fit: Fit, depth: int | None = None) -> np.ndarray:
    """Return image files as uint8 [n, H, W, channels], decoded like the model's training images.

    Args:
        files: The image files.
        shape: Height, width and channels that the model takes.
        fit: Rule for resizing an image to a square, see `fitted_image`. For other shapes, images are resized without
            cropping.
        depth: `data.depth` of the run.

    Raises:
        DataError: Files cannot be decoded, or one is a folder. The message names up to 3 files for each cause.
    """
    folder = next(filter(is_folder, files), None)
    if folder is not None:
        raise DataError(
            f"images: a folder is not an image ({shown_name(folder)}). Name the image files in it.",
            code="data.undecodable",
            paths=[str(folder)],
        )
    images, faults = try_images(files, shape, fit, depth)
    if faults:
        raise DataError(
            describe_faults(list(faults.values())), code="data.undecodable", paths=[str(files[i]) for i in faults]
        )
    return images


def try_images(
    files: Sequence[Path], shape: tuple[int, int, int], fit: Fit, depth: int | None = None
) -> tuple[np.ndarray, dict[int, str]]:
    """Return the images that can be decoded, and the error texts of those that cannot, by index in `files`."""
    _check_channels(shape)
    images = []
    faults: dict[int, str] = {}
    for index, file in enumerate(files):
        try:
            images.append(load_image(file, shape, fit, depth))
        except DataError as error:
            faults[index] = error.reason if isinstance(error, Undecodable) else str(error)
    return np.stack(images) if images else np.zeros((0, *shape), np.uint8), faults


def describe_faults(faults: Sequence[str]) -> str:
    """Return one message about the images that cannot be decoded, which are grouped by the cause."""
    return f"{count_of(len(faults), 'image')} cannot be decoded: {grouped_by_cause(faults)[0]}. Replace or remove them."


def load_image(file: Path | bytes, shape: tuple[int, int, int], fit: Fit, depth: int | None) -> np.ndarray:
    """Decode an image file, or the bytes of one, to uint8 [H, W, channels].

    Args:
        file: Path or content of the file.
        shape: See `load_images`.
        fit: See `load_images`.
        depth: See `load_images`.

    Raises:
        DataError: The image cannot be decoded, or the model does not take image files.
    """
    from PIL import Image

    height, width, channels = shape
    _check_channels(shape)
    if height == width:
        return fitted_image(file, height, channels, fit, depth)
    image = flat_image(file, depth).convert("L" if channels == 1 else "RGB")
    return np.asarray(image.resize((width, height), Image.Resampling.BILINEAR)).reshape(shape)


def _check_channels(shape: tuple[int, int, int]) -> None:
    if shape[2] not in (1, 3):
        raise DataError(
            f"images: image files have 1 or 3 channels, but the model takes {shape[2]}. Pass arrays to "
            "raylt.load_model(...).predict.",
            code="data.wrong-shape",
            channels=shape[2],
        )
