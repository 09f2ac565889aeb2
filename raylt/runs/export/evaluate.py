"""`raylt evaluate`: evaluate a model, or each client's own model, on new images in folders."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import torch
from torch import Tensor

from raylt import metrics
from raylt.data.images.image_files import Listing, list_images, notes_of, plain_name, shown_name
from raylt.errors import ConfigError, DataError, count_of, spoken
from raylt.runs.export.graph_formats import GraphModel
from raylt.runs.export.load import describe_faults, try_images
from raylt.runs.export.trained_model import TrainedModel

Model = TrainedModel | GraphModel
CHUNK_SIZE = 256  # number of images to decode and evaluate together
LAYOUTS = "Use <class>/<image> or <client>/<class>/<image>, in the folder itself or in test/."


@dataclass(frozen=True)
class Evaluation:
    """The confusion counts of a model on the images of a folder.

    Attributes:
        class_names: Names of the C classes.
        matrix: Counts of (true, predicted) classes over all images, int64 [C, C].
        clients: Counts for each client's images, if the folders distinguish clients.
        left_out: Reasons why images were left out.
        notes: Sentences about other files in the folder.
    """

    class_names: tuple[str, ...]
    matrix: Tensor
    clients: dict[str, Tensor]
    left_out: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the figures over all images, by class and by client, with None where no image was counted."""
        columns = {name: values.tolist() for name, values in metrics.class_figures(self.matrix).items()}
        classes = []
        for c, name in enumerate(self.class_names):
            figures = {key: None if values[c] != values[c] else values[c] for key, values in columns.items()}
            classes.append({"class": name, "tested": int(self.matrix[c].sum()), **figures})
        return {
            **_figures(self.matrix),
            "classes": classes,
            "clients": {name: _figures(matrix) for name, matrix in self.clients.items()},
            "confusion": self.matrix.tolist(),
            "left_out": list(self.left_out),
            "notes": list(self.notes),
        }


def evaluate(
    model_for: Callable[[str | None], Model],
    data: str,
    by_client: bool,
    bad: Literal["stop", "skip"] = "stop",
    joining: Collection[str] = (),
) -> Evaluation:
    """Evaluate models on the images of a folder.

    Args:
        model_for: Function that maps a client's name, or None, to the model for its images.
        data: Path of the folder, as folder:PATH.
        by_client: Whether each client's images are evaluated with `model_for(name)`; otherwise all use the model for
            None.
        bad: Whether to stop at images that cannot be decoded, or to skip them.
        joining: Names of clients that join after training, and so have no models. Their images are left out.

    Raises:
        ConfigError: The data are not given as folder:PATH, a client has no model, or all clients join after training.
        DataError: The folder has another layout, the model does not know a class, or images cannot be decoded (with
            "skip", if none can). The message names all such images.
    """
    folder = _folder_of(data)
    listing = list_images(folder)
    files_by_client = _by_client(folder, listing)
    if by_client and None in files_by_client:
        raise ConfigError(
            f"{folder}: does not distinguish clients, but each has its own model. Give --client.",
            code="client.not-named",
            path=str(folder),
        )
    notes = notes_of([(folder, listing)])
    if by_client:
        files_by_client, without = _with_models(folder, files_by_client, joining)
        notes += without
    shared = None if by_client else model_for(None)
    model: Model | None = None
    matrices: dict[str | None, Tensor] = {}
    faults: list[str] = []
    for client, files in files_by_client.items():
        model = shared or model_for(client)
        matrices[client] = _count(model, folder, files, faults, skip=bad == "skip")
    assert model is not None
    if faults and (bad == "stop" or len(faults) == sum(map(len, files_by_client.values()))):
        remedy = f" {spoken('--bad skip', 'bad=' + repr('skip'))} leaves them out." if bad == "stop" else ""
        raise DataError(describe_faults(faults) + remedy, code="data.undecodable", path=str(folder), images=len(faults))
    return Evaluation(
        model.class_names,
        torch.stack(list(matrices.values())).sum(0),
        {client: matrix for client, matrix in matrices.items() if client is not None},
        tuple(faults),
        tuple(notes),
    )


def _with_models(
    folder: Path, files_by_client: dict[str | None, list[PurePosixPath]], joining: Collection[str]
) -> tuple[dict[str | None, list[PurePosixPath]], list[str]]:
    """Return the images of the clients that train, and a note on each client that joins after training."""
    kept = {client: files for client, files in files_by_client.items() if client not in joining}
    late = [client for client in files_by_client if client not in kept]
    if not kept:
        raise ConfigError(
            f"{folder}: has only clients that join after training, whose models are not kept "
            f"({', '.join(map(str, late))}). Give {spoken('--client', 'client')} with a client that trains, to "
            "evaluate its model on all images.",
            code="client.unknown",
            path=str(folder),
        )
    return kept, [
        f"left out: {count_of(len(files_by_client[client]), 'image')} of client {client}, which joins after training; "
        "its model is not kept"
        for client in late
    ]


def _folder_of(data: str) -> Path:
    """Return the path in a data argument of the form folder:PATH."""
    kind, _, path = data.partition(":")
    if kind != "folder" or not path:
        raise ConfigError(
            f"{spoken('--data', 'data')}: must be folder:PATH ({data}). {LAYOUTS}",
            code="config.unknown-name",
            key="--data",
            value=data,
        )
    folder = Path(path).expanduser()
    folder = folder / "test" if (folder / "test").is_dir() else folder
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder. {LAYOUTS}", code="data.not-found", path=str(folder))
    return folder


def _by_client(folder: Path, listing: Listing) -> dict[str | None, list[PurePosixPath]]:
    """Return the image files by client, or all files under the key None if the folders do not distinguish clients."""
    first = {len(file.parts): file for file in reversed(listing.files)}
    if first.keys() not in ({2}, {3}):
        examples = " and ".join(shown_name(first[depth]) for depth in sorted(first))
        fault = f"images lie at {'different depths' if len(first) > 1 else 'another depth'}, such as {examples}"
        raise DataError(
            f"{folder}: {fault if first else 'contains no images'}. {LAYOUTS}",
            code="data.malformed",
            path=str(folder),
        )
    if 2 in first:
        return {None: list(listing.files)}
    files_by_client: dict[str | None, list[PurePosixPath]] = {}
    for file in listing.files:
        files_by_client.setdefault(plain_name(folder, file.parts[0]), []).append(file)
    return files_by_client


def _count(model: Model, folder: Path, files: Sequence[PurePosixPath], faults: list[str], skip: bool) -> Tensor:
    """Return the confusion counts on some images, int64 [C, C].

    Args:
        model: The model.
        folder: The folder that contains the images.
        files: Paths of the images in the folder.
        faults: List to which the reasons are added why images cannot be decoded.
        skip: Whether to continue counting after a fault. Otherwise the remaining images are only decoded, to find all
            faults.
    """
    numbers = {name: c for c, name in enumerate(model.class_names)}
    class_of = {file: plain_name(folder, file.parts[-2]) for file in files}
    if unknown := sorted({*class_of.values()} - numbers.keys()):
        raise DataError(
            f"{folder}: the model does not have these classes ({', '.join(unknown)}). Name the folders after its "
            f"classes: {', '.join(model.class_names)}.",
            code="data.unknown-class",
            path=str(folder),
            classes=unknown,
        )
    total = torch.zeros(len(numbers), len(numbers), dtype=torch.int64)
    for start in range(0, len(files), CHUNK_SIZE):
        part = files[start : start + CHUNK_SIZE]
        images, part_faults = try_images([folder / file for file in part], model.shape, model.fit, model.depth)
        faults += part_faults.values()
        if not len(images) or (faults and not skip):
            continue
        prediction = model.predict(images)
        if prediction.labels.ndim != 1:
            raise ConfigError(
                "model: predicts a class for each pixel, but folders define one class per image. Evaluate it in a run "
                "on label maps.",
                code="config.conflict",
                key="model",
            )
        truth = torch.tensor([numbers[class_of[file]] for index, file in enumerate(part) if index not in part_faults])
        total += metrics.confusion(prediction.labels, truth, len(numbers))
    return total


def _figures(matrix: Tensor) -> dict[str, float | int | None]:
    images = int(matrix.sum())
    return {
        "images": images,
        "accuracy": metrics.accuracy(matrix) if images else None,
        "macro": metrics.macro(matrix) if images else None,
    }
