"""`raylt evaluate`: a model, or each client's own, on new images in folders."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import torch
from torch import Tensor

from raylt import metrics
from raylt.data.listing import list_images, notes_of, plain_name
from raylt.errors import ConfigError, DataError
from raylt.runs.export import TrainedModel
from raylt.runs.graphs import GraphModel
from raylt.runs.pictures import told_of, try_pictures

Model = TrainedModel | GraphModel
AT_ONCE = 256               # images that are decoded before they are judged
LAYOUTS = "expected are <class>/<image> and <client>/<class>/<image>, in the folder itself or in test/"


@dataclass(frozen=True)
class Evaluation:
    """What a model came to on images.

    Attributes:
        class_names: C names.
        matrix: counts of (true, predicted) classes over all images, int64 [C, C].
        clients: the same of each client's images, where the folders tell clients apart.
        left_out: why images are not among them.
        notes: what else lies in the folder, in whole sentences.
    """

    class_names: tuple[str, ...]
    matrix: Tensor
    clients: dict[str, Tensor]
    left_out: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Figures of everything, of each class and of each client; None where nothing was tested or predicted."""
        columns = {name: values.tolist() for name, values in metrics.class_figures(self.matrix).items()}
        return {
            **_figures(self.matrix),
            "classes": [{"class": name, "tested": int(self.matrix[c].sum()),
                         **{key: None if values[c] != values[c] else values[c] for key, values in columns.items()}}
                        for c, name in enumerate(self.class_names)],
            "clients": {name: _figures(matrix) for name, matrix in self.clients.items()},
            "confusion": self.matrix.tolist(),
            "left_out": list(self.left_out),
            "notes": list(self.notes)}


def evaluate(model_for: Callable[[str | None], Model], data: str, by_client: bool,
             bad: Literal["stop", "skip"] = "stop") -> Evaluation:
    """Judges on the images of a folder.

    Args:
        model_for: a client's name, or None, to the model that its images are judged by.
        data: folder:PATH.
        by_client: whether each client's images are judged by `model_for` its name; else all by that for None.
        bad: whether images that cannot be decoded end it, or are left out and told of.

    Raises:
        ConfigError: not such data, or no model for a client.
        DataError: another layout, a class that the model does not know, images that cannot be decoded, all of which
            it names, or none that can be.
    """
    kind, _, place = data.partition(":")
    if kind != "folder" or not place:
        raise ConfigError(f"--data {data}: must be folder:PATH; {LAYOUTS}")
    folder = Path(place).expanduser()
    folder = folder / "test" if (folder / "test").is_dir() else folder
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder; {LAYOUTS}")
    listing = list_images(folder)
    files = listing.files
    depths = {len(file.parts) for file in files}
    if depths not in ({2}, {3}):
        raise DataError(f"{folder}: {'images lie at different depths' if files else 'holds no images'}; {LAYOUTS}")
    whose: dict[str | None, list[PurePosixPath]] = {}
    for file in files:
        whose.setdefault(plain_name(folder, file.parts[0]) if depths == {3} else None, []).append(file)
    if by_client and None in whose:
        raise ConfigError(f"{folder}: does not tell clients apart, and each has a model of its own; give --client")
    shared = None if by_client else model_for(None)
    matrices: dict[str | None, Tensor] = {}
    model, damaged = None, []
    for name, own in whose.items():
        model = shared or model_for(name)
        matrices[name] = _counts(model, folder, own, damaged, bad == "skip")
    if damaged and (bad == "stop" or len(damaged) == len(files)):
        raise DataError(told_of(damaged) + (", or --bad skip leaves them out" if bad == "stop" else ""))
    assert model is not None
    return Evaluation(model.class_names, sum(matrices.values(), start=torch.zeros_like(next(iter(matrices.values())))),
                      {name: matrix for name, matrix in matrices.items() if name is not None}, tuple(damaged),
                      tuple(notes_of([(folder, listing)])))


def _counts(model: Model, folder: Path, files: Sequence[PurePosixPath], damaged: list[str], go_on: bool) -> Tensor:
    """The counts over some images; why others cannot be decoded is added to `damaged`.

    Args:
        go_on: whether to judge where some are damaged; else only what else is damaged is looked for.
    """
    known = {name: c for c, name in enumerate(model.class_names)}
    classes = {file: plain_name(folder, file.parts[-2]) for file in files}
    if strange := sorted({*classes.values()} - known.keys()):
        raise DataError(f"{folder}: has the class {', '.join(strange)}, which the model does not know; it knows "
                        f"{', '.join(model.class_names)}")
    total = torch.zeros(len(known), len(known), dtype=torch.int64)
    for part in _parts(files):
        images, faults = try_pictures([folder / file for file in part], model.shape, model.fit)
        damaged += faults.values()
        if not len(images) or (damaged and not go_on):
            continue
        prediction = model.predict(images)
        if prediction.labels.ndim != 1:
            raise ConfigError("the model says what each pixel is, and folders say what a whole image is; judge it in a "
                              "run on label maps")
        truth = torch.tensor([known[classes[file]] for place, file in enumerate(part) if place not in faults])
        total += metrics.confusion(prediction.labels, truth, len(known))
    return total


def _parts(files: Sequence[PurePosixPath]) -> Iterator[Sequence[PurePosixPath]]:
    return (files[start:start + AT_ONCE] for start in range(0, len(files), AT_ONCE))


def _figures(matrix: Tensor) -> dict[str, float | int | None]:
    images = int(matrix.sum())
    return {"images": images, "accuracy": metrics.accuracy(matrix) if images else None,
            "macro": metrics.macro(matrix) if images else None}
