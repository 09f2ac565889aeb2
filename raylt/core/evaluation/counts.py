"""Confusion counts, and the files of a run folder that store them (confusions/000012.npz).

`EvaluationSet` is the test set of one process, `Counts` the running counts of one model's answers, and `Matrices` the
counts of one whole evaluation. `CountsByClient` keeps only the nonzero cells of clients' matrices. With many classes
nearly all cells are zero, and K dense matrices of C classes would take 8 K C^2 bytes.
"""

import io
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from raylt.core.checkpoint.checkpoint import hash_tensors
from raylt.data.images.decoding import read_npz
from raylt.data.samples import IGNORED, Batch, Samples
from raylt.data.task import Shard, TaskSpec
from raylt.errors import CheckpointError, ConfigError, DataError, type_name, without_remedy
from raylt.machine import total_memory
from raylt.metrics import confusion
from raylt.models.split import SplitModel, with_encoder
from raylt.seeds import seeded
from raylt.store import Folder

Predict = Callable[[nn.Module, Tensor], Tensor]
NO_CLIENT = -1  # owner of a test image that belongs to no client
FOLDER = "confusions"
KEPT = 100  # number of evaluations whose counts a run folder keeps, besides those with a checkpoint
_STACKS = ("clients", "own")
# Suffixes of array names in a file; "" is a dense array, as earlier versions of raylt wrote it.
_SUFFIXES = ("", "_ids", "_sizes", "_cells", "_classes")
_NAME = re.compile(r"[0-9]{6,}\.npz")


def cell_type(classes: int, labels: int) -> torch.dtype:
    """Return an integer type that can hold a confusion matrix's cell numbers and counts up to `labels`."""
    return torch.int32 if max(classes**2, labels) < 2**31 else torch.int64


def cells_of(*matrices: Tensor) -> Tensor:
    """Return the cells that are nonzero in at least one of several confusion matrices, with their counts.

    Args:
        matrices: Counts, int64 [C, C], of some labels and of parts of them.

    Returns:
        The number of each cell, row * C + column, ascending, then its count in each matrix: [m, 1 + matrices], of the
        type that `cell_type` gives for the first matrix.
    """
    flat = torch.stack([matrix.flatten() for matrix in matrices], 1)
    cells = flat.any(1).nonzero()
    kind = cell_type(len(matrices[0]), int(flat[:, 0].sum()))
    return torch.cat([cells, flat[cells[:, 0]]], 1).to(kind)


class CountsByClient(Mapping[int, Tensor]):
    """Confusion counts int64 [C, C] by client id; only nonzero cells are held in memory.

    A matrix has at most as many nonzero cells as the test set has labels. Each access builds the dense matrix.

    Args:
        classes: Number of classes, C.
        cells: Nonzero cells by client id, as `cells_of` returns them for one matrix.
    """

    def __init__(self, classes: int, cells: Mapping[int, Tensor]):
        self.classes = classes
        self.cells = dict(cells)

    def __getitem__(self, id: int) -> Tensor:
        cells, counts = self.cells[id].long().unbind(1)
        matrix = torch.zeros(self.classes**2, dtype=torch.int64)
        matrix[cells] = counts
        return matrix.view(self.classes, self.classes)

    def __iter__(self) -> Iterator[int]:
        return iter(self.cells)

    def __len__(self) -> int:
        return len(self.cells)

    def __contains__(self, id: object) -> bool:
        return id in self.cells

    def of(self, ids: Collection[int]) -> "CountsByClient":
        """Return the counts of the clients in `ids` only."""
        return CountsByClient(self.classes, {id: cells for id, cells in self.cells.items() if id in ids})

    @classmethod
    def gathered(cls, classes: int, keys: Tensor, counts: Tensor) -> "CountsByClient":
        """Return confusion counts by client; values for the same client and cell are added up.

        Args:
            keys: Client id times C^2 plus the number of a cell, int64 [n], in any order and perhaps several times.
            classes: Number of classes, C.
            counts: The count of each key, int64 [n].
        """
        keys, places = keys.unique(return_inverse=True)
        counts = torch.zeros_like(keys).index_add_(0, places, counts)
        clients, sizes = (keys // classes**2).unique_consecutive(return_counts=True)
        both = torch.stack([keys % classes**2, counts], 1).split(sizes.tolist())
        return cls(
            classes,
            {
                id: cells.to(cell_type(classes, int(cells[:, 1].sum())))
                for id, cells in zip(clients.tolist(), both, strict=True)
            },
        )


class Counts:
    """Confusion counts over a test set, and over each client's own images in it.

    Args:
        classes: Number of classes, C.
        device: Device that holds the counts until `cpu`.
        owners: The client of each test image or NO_CLIENT, int64 [N]; None if no image has an owner.

    Attributes:
        all: Counts over the whole test set, int64 [C, C].
        own: Counts over each client's own test images, available after `cpu`.
        nan_predictions: Number of NaN predictions, int64; each counts as a wrong class.
    """

    def __init__(self, classes: int, device: torch.device, owners: Tensor | None = None):
        self._classes = classes
        self._owners = None if owners is None else owners.to(device)
        self.all = torch.zeros(classes, classes, dtype=torch.int64, device=device)
        self.own = CountsByClient(classes, {})
        self._own_keys: list[Tensor] = []  # keys of each batch for `CountsByClient.gathered`
        self._own_counts: list[Tensor] = []
        self.nan_predictions = torch.zeros((), dtype=torch.int64, device=device)

    def add(self, logits: Tensor, batch: Batch) -> None:
        """Count the predictions for a batch, from logits [B, C] or [B, C, H, W].

        Raises:
            ConfigError: The logits have another shape.
        """
        _check_logits(logits, [len(batch.y), self._classes, *batch.y.shape[1:]])
        is_nan = logits.isnan().any(1)
        self.nan_predictions += (is_nan & (batch.y != IGNORED)).sum()
        # argmax of NaN would be the first class
        predicted = logits.argmax(1).where(~is_nan, (batch.y + 1) % self._classes)
        self.all += confusion(predicted, batch.y, self._classes, IGNORED)
        if self._owners is None:
            return
        owners = self._owners[batch.rows].view(-1, *[1] * (batch.y.dim() - 1)).expand_as(batch.y)
        counted = (owners != NO_CLIENT) & (batch.y != IGNORED)
        cells = batch.y[counted] * self._classes + predicted[counted]
        keys, counts = (owners[counted] * self._classes**2 + cells).unique(return_counts=True)
        self._own_keys.append(keys)
        self._own_counts.append(counts)

    def cpu(self) -> "Counts":
        """End the counting, move the counts to the CPU and return them."""
        self.all = self.all.cpu()
        self.nan_predictions = self.nan_predictions.cpu()
        if self._own_keys:
            keys, counts = torch.cat(self._own_keys).cpu(), torch.cat(self._own_counts).cpu()
            self.own = CountsByClient.gathered(self._classes, keys, counts)
        return self


def _check_logits(logits: object, expected: list[int]) -> None:
    shape = list(logits.shape) if isinstance(logits, Tensor) else type_name(logits)
    if shape != expected:
        raise ConfigError(
            f"method: predict returned {shape} for {expected[0]} images, expected {expected}. Return one logit for "
            "each class.",
            code="model.wrong-output",
            key="method",
            shape=shape,
        )


class EvaluationSet:
    """One process's copy of the test set, loaded into memory on first use.

    Clients that share an encoder differ only in their classifiers. The features of the last encoder are kept, so each
    process encodes the test set once for all these clients.
    """

    def __init__(self, shard: Shard, spec: TaskSpec, device: torch.device):
        self._shard, self._spec, self._device = shard, spec, device
        self._layout: list[tuple[str, torch.dtype, torch.Size]] | None = None  # layout of the last encoder's entries
        self._bits = torch.empty(0, dtype=torch.uint8)
        self._features: list[Tensor] = []

    @cached_property
    def samples(self) -> Samples:
        """Return the test images and their labels, on the device."""
        return Samples(self._shard, self._spec, self._device)

    @torch.no_grad()
    def counts(self, model: SplitModel, predict: Predict, size: int, owners: Tensor | None = None) -> Counts:
        """Count the pairs (true class, predicted class) of a client's model on the test set.

        Args:
            model: The client's model.
            predict: The method's function from a model and images to logits.
            size: Number of images in a batch, the same in every call.
            owners: The owner of each test image, see `Counts`.
        """
        model.eval()
        if self._spec.kind == "segmentation":  # the features of every pixel would not fit into memory
            return counts_of(lambda x: predict(model, x), self.samples, self._spec.classes, size, owners)
        encoded = self._has_features_of(model.encoder)
        if not encoded:
            self._features = []
        encoder = _KeptFeatures(model.encoder)
        judged = with_encoder(model, encoder)
        counts = Counts(self._spec.classes, self._device, owners)
        try:
            for number, batch in enumerate(self.samples.in_order(size)):
                if not encoded:
                    with seeded(0, "features", number, device=self._device):  # the same for all clients
                        self._features.append(model.encoder(batch.x))
                encoder.x, encoder.z = batch.x, self._features[number]
                counts.add(predict(judged, batch.x), batch)
        except BaseException:  # the device is full: the caller tries again, and the features are incomplete
            self._layout, self._features = None, []
            raise
        return counts.cpu()

    def _has_features_of(self, encoder: nn.Module) -> bool:
        """Return whether the stored features are from this encoder.

        If not, note the encoder as the one whose features are stored next.
        """
        entries = encoder.state_dict()
        layout = [(name, value.dtype, value.shape) for name, value in entries.items()]
        # one comparison for all entries: the host waits for each comparison
        pieces = [value.contiguous().flatten().view(torch.uint8) for value in entries.values()]
        bits = torch.cat(pieces) if pieces else self._bits
        if layout == self._layout and torch.equal(bits, self._bits):
            return True
        self._layout, self._bits = layout, bits
        return False


class _KeptFeatures(nn.Module):
    """An encoder that returns the stored features of known images, and computes the features of other images."""

    x: Tensor
    z: Tensor

    def __init__(self, encoder: nn.Module):
        super().__init__()
        self.encoder = encoder

    def forward(self, x: Tensor) -> Tensor:
        return self.z if x is self.x else self.encoder(x)


@torch.no_grad()
def counts_of(
    predict: Callable[[Tensor], Tensor],
    samples: Samples,
    classes: int,
    size: int,
    owners: Tensor | None = None,
    on_logits: Callable[[Tensor], None] | None = None,
) -> Counts:
    """Count the pairs (true class, predicted class) over all samples or labelled pixels.

    The counts are on the CPU.

    Args:
        predict: Function from images [B, channels, H, W] to logits [B, C] or [B, C, H, W], in evaluation mode.
        samples: The samples to predict.
        classes: Number of classes, C.
        size: Number of images in a batch.
        owners: The owner of each image, see `Counts`.
        on_logits: Called with the logits of each batch.
    """
    counts = Counts(classes, samples.y.device, owners)
    for batch in samples.in_order(size):
        logits = predict(batch.x)
        counts.add(logits, batch)
        if on_logits is not None:
            on_logits(logits)
    return counts.cpu()


def confusion_of(predict: Callable[[Tensor], Tensor], samples: Samples, classes: int, size: int) -> Tensor:
    """Return the confusion matrix over all samples or labelled pixels, int64 [C, C]; arguments as for `counts_of`."""
    return counts_of(predict, samples, classes, size).all


@dataclass(frozen=True)
class Matrices:
    """The confusion matrices of one evaluation, each int64 [C, C].

    Attributes:
        shared: Matrix of the global model on the test set; None if it was not evaluated.
        clients: Matrices of the clients' own models on the test set, by client id.
        own: Matrices of the clients' own models, or of the global model, on each client's own test images.
    """

    shared: Tensor | None = None
    clients: CountsByClient = field(default_factory=lambda: CountsByClient(0, {}))
    own: CountsByClient = field(default_factory=lambda: CountsByClient(0, {}))

    @property
    def sha256(self) -> str:
        """Return the SHA-256 over the tensors that the file of these matrices contains."""
        return hash_tensors(self.tensors())

    def __bool__(self) -> bool:
        return self.shared is not None or bool(self.clients or self.own)

    def tensors(self) -> dict[str, Tensor]:
        """Return the counts as tensors for a file: client ids, the number of cells per client, and the cells."""
        tensors = {} if self.shared is None else {"shared": self.shared}
        for name in _STACKS:
            counts: CountsByClient = getattr(self, name)
            cells = [counts.cells[id] for id in sorted(counts)]
            if cells:
                tensors |= {
                    f"{name}_ids": torch.tensor(sorted(counts)),
                    f"{name}_sizes": torch.tensor([len(own) for own in cells]),
                    f"{name}_cells": torch.cat(cells),
                    f"{name}_classes": torch.tensor(counts.classes),
                }
        return tensors


def write(folder: Path, step: int, matrices: Matrices) -> None:
    """Write the confusion counts of an evaluation into a run folder."""
    content = io.BytesIO()
    arrays = {name: value.numpy() for name, value in matrices.tensors().items()}
    np.savez_compressed(content, **arrays)  # pyright: ignore[reportArgumentType]
    with Folder.open(folder) as run, run.inner(FOLDER, make=True) as inner:
        inner.write(_name(step), content.getvalue())


def read(folder: Path, step: int, sha256: str) -> Matrices:
    """Read the confusion counts of the evaluation after a step.

    Args:
        folder: The run folder.
        step: Number of the step.
        sha256: The hash of the counts in the step's report.

    Raises:
        CheckpointError: The file cannot be read, or has other counts.
    """
    path = folder / FOLDER / _name(step)
    if step in missing(folder, [step]):
        raise CheckpointError(
            f"{path}: the file is missing. A run keeps the counts of its last {KEPT} evaluations, and of those with a "
            "checkpoint.",
            code="file.unreadable",
            path=str(path),
        )
    names = ["shared", *(f"{name}{suffix}" for name in _STACKS for suffix in _SUFFIXES)]
    try:
        with Folder.open(folder) as run, run.inner(FOLDER) as inner:
            inner.place(path.name)
        entries = {name: torch.from_numpy(value) for name, value in read_npz(path, names).items()}
        changed = hash_tensors(entries) != sha256
        matrices = (
            None if changed else Matrices(entries.get("shared"), *(_by_client(entries, name) for name in _STACKS))
        )
    except (CheckpointError, DataError, TypeError, ValueError, RuntimeError, IndexError) as error:
        raise CheckpointError(
            f"{path}: the file cannot be read ({without_remedy(error)}). Put the original back.",
            code="file.unreadable",
            path=str(path),
        ) from None
    if matrices is None:
        raise CheckpointError(
            f"{path}: the counts differ from those of the evaluation after step {step}. Put the original back.",
            code="run.changed",
            path=str(path),
            step=step,
        )
    return matrices


def copy(source: Path, target: Path, hashes: Mapping[int, str]) -> None:
    """Copy the confusion counts of some steps from one run folder to another.

    Args:
        source: The run folder to copy from.
        target: The run folder to copy to.
        hashes: Hash of the counts, by step.

    Raises:
        CheckpointError: A file cannot be read, or has other counts.
    """
    for step in hashes.keys() - missing(source, hashes):
        read(source, step, hashes[step])
    with Folder.open(source) as old_run, Folder.open(target) as new_run:
        if FOLDER not in old_run.names():
            return
        with old_run.inner(FOLDER) as old, new_run.inner(FOLDER, make=True) as new:
            for name in {_name(step) for step in hashes}.intersection(old.names()):
                old.copy(name, new)


def prune(folder: Path, step: int, spared: Collection[int]) -> None:
    """Remove the confusion counts of all steps except the last `KEPT` evaluations up to `step`.

    Args:
        folder: The run folder.
        step: Number of the last step.
        spared: Steps whose counts are kept in any case.
    """
    with Folder.open(folder) as run:
        if FOLDER not in run.names():
            return
        with run.inner(FOLDER) as inner:
            steps = sorted(int(name.removesuffix(".npz")) for name in inner.names() if _NAME.fullmatch(name))
            kept = {*[taken for taken in steps if taken <= step][-KEPT:], *spared}
            for old in steps:
                if old not in kept:
                    inner.remove(_name(old))


def missing(folder: Path, steps: Iterable[int]) -> set[int]:
    """Return the steps whose confusion counts are missing from the run folder."""
    with Folder.open(folder) as run:
        if FOLDER not in run.names():
            return set(steps)
        with run.inner(FOLDER) as inner:
            names = set(inner.names())
    return {step for step in steps if _name(step) not in names}


def remove(folder: Path, step: int) -> None:
    """Remove the confusion counts of a step."""
    with Folder.open(folder) as run, run.inner(FOLDER) as inner:
        inner.remove(_name(step))


def _by_client(entries: dict[str, Tensor], name: str) -> CountsByClient:
    """Return clients' confusion counts from the arrays of a file.

    Raises:
        ValueError, RuntimeError, IndexError: The arrays do not fit each other.
    """
    dense, ids, sizes, cells, classes = (entries.get(f"{name}{suffix}") for suffix in _SUFFIXES)
    if dense is not None and ids is not None:
        return CountsByClient(dense.shape[1], {id: cells_of(one) for id, one in zip(ids.tolist(), dense, strict=False)})
    if ids is None or sizes is None or cells is None or classes is None:
        return CountsByClient(0, {})
    most = int(classes) ** 2
    if 8 * most > total_memory() or cells.shape != (len(cells), 2) or cells.is_floating_point():
        raise ValueError(f"cells of shape {list(cells.shape)} for {int(classes)} classes")
    if len(cells) and (cells[:, 0].min() < 0 or cells[:, 0].max() >= most):
        raise ValueError(f"cells outside a matrix of {int(classes)} classes")
    return CountsByClient(int(classes), dict(zip(ids.tolist(), cells.split(sizes.tolist()), strict=True)))


def _name(step: int) -> str:
    return f"{step:06d}.npz"
