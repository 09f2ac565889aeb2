"""Counts of (true, predicted) classes, and the files of a run folder that keep them (confusions/000012.npz).

`EvaluationSet` is the test set of one process, `Counts` the running counts of one model's answers, and `Matrices` the
counts of one whole evaluation.
"""

import io
import re
from collections.abc import Callable, Collection, Iterable
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
from raylt.errors import CheckpointError, DataError
from raylt.metrics import confusion
from raylt.models.split import SplitModel, with_encoder
from raylt.store import Folder

Predict = Callable[[nn.Module, Tensor], Tensor]
NO_CLIENT = -1  # owner of a test image that belongs to no client
FOLDER = "confusions"
KEPT = 100  # evaluations whose counts a run folder keeps, besides those with a checkpoint
_STACKS = ("clients", "own")
_NAME = re.compile(r"[0-9]{6,}\.npz")


class Counts:
    """Counts of (true, predicted) classes over a test set, and over each client's own part of it.

    Args:
        owners: the client of each test image or NO_CLIENT, int64 [N]; None where no image has an owner.

    Attributes:
        all: int64 [C, C].
        own: int64 [C, C] by client, for each client that has test images.
        not_numbers: int64, how many predictions are not numbers; each counts as a wrong class.
    """

    def __init__(self, classes: int, device: torch.device, owners: Tensor | None = None):
        self._classes = classes
        self._owners = None if owners is None else owners.to(device)
        self.all = torch.zeros(classes, classes, dtype=torch.int64, device=device)
        self.own: dict[int, Tensor] = {}
        self.not_numbers = torch.zeros((), dtype=torch.int64, device=device)

    def add(self, logits: Tensor, batch: Batch) -> None:
        """Count the predictions for a batch, from logits [B, C] or [B, C, H, W]."""
        unusable = logits.isnan().any(1)
        self.not_numbers += (unusable & (batch.y != IGNORED)).sum()
        # the largest of numbers that are none would be the first class
        predicted = logits.argmax(1).where(~unusable, (batch.y + 1) % self._classes)
        self.all += confusion(predicted, batch.y, self._classes, IGNORED)
        if self._owners is None:
            return
        owners = self._owners[batch.rows]
        for id in owners.unique().tolist():
            if id != NO_CLIENT:
                one = owners == id
                counts = confusion(predicted[one], batch.y[one], self._classes, IGNORED)
                self.own[id] = self.own[id] + counts if id in self.own else counts

    def cpu(self) -> "Counts":
        """Move the counts to the CPU and return them."""
        self.all = self.all.cpu()
        self.own = {id: counts.cpu() for id, counts in self.own.items()}
        self.not_numbers = self.not_numbers.cpu()
        return self


class EvaluationSet:
    """The test set of one process, loaded into memory on first use.

    Clients that share an encoder differ in their classifiers alone. The features of the last encoder are kept, so each
    process encodes the test set once for these clients, not once for each.
    """

    def __init__(self, shard: Shard, spec: TaskSpec, device: torch.device):
        self._shard, self._spec, self._device = shard, spec, device
        self._layout: list[tuple[str, torch.dtype, torch.Size]] | None = None  # of the last encoder's entries
        self._bits = torch.empty(0, dtype=torch.uint8)
        self._features: list[Tensor] = []

    @cached_property
    def samples(self) -> Samples:
        """The test images and their labels, on the device."""
        return Samples(self._shard, self._spec, self._device)

    @torch.no_grad()
    def counts(self, model: SplitModel, predict: Predict, size: int, owners: Tensor | None = None) -> Counts:
        """Count the classes that a client's model predicts.

        Args:
            predict: the method's function of model and images to logits.
            size: images in a batch, always the same.
            owners: as for `Counts`.
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
                    self._features.append(model.encoder(batch.x))
                encoder.x, encoder.z = batch.x, self._features[number]
                counts.add(predict(judged, batch.x), batch)
        except BaseException:  # a full device, after which the caller tries again; the features are incomplete
            self._layout, self._features = None, []
            raise
        return counts.cpu()

    def _has_features_of(self, encoder: nn.Module) -> bool:
        """Return whether the kept features are this encoder's; if not, the next features will be."""
        entries = encoder.state_dict()
        layout = [(name, value.dtype, value.shape) for name, value in entries.items()]
        # in one piece: a comparison of each entry would make the host wait for each
        pieces = [value.contiguous().flatten().view(torch.uint8) for value in entries.values()]
        bits = torch.cat(pieces) if pieces else self._bits
        if layout == self._layout and torch.equal(bits, self._bits):
            return True
        self._layout, self._bits = layout, bits
        return False


class _KeptFeatures(nn.Module):
    """An encoder that returns kept features z for the images x, and computes the features of other images."""

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
    """Count (true, predicted) classes over all samples or labelled pixels; the counts are on the CPU.

    Args:
        predict: images [B, channels, H, W] to logits [B, C] or [B, C, H, W], in evaluation mode.
        size: images in a batch.
        owners: as for `Counts`.
        on_logits: called with the logits of each batch.
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
    """The counts of one evaluation, each int64 [C, C], over the true classes.

    Attributes:
        shared: of the global model on the test set; None where it was not judged.
        clients: of each client's own model on the test set, by id.
        own: of each client's own model, or of the global one, on the client's own test images.
    """

    shared: Tensor | None = None
    clients: dict[int, Tensor] = field(default_factory=dict)
    own: dict[int, Tensor] = field(default_factory=dict)

    @property
    def sha256(self) -> str:
        """The SHA-256 over names, ids and counts."""
        return hash_tensors(self._tensors())

    def __bool__(self) -> bool:
        return self.shared is not None or bool(self.clients or self.own)

    def _tensors(self) -> dict[str, Tensor]:
        tensors = {} if self.shared is None else {"shared": self.shared}
        for name in _STACKS:
            by_client = dict(sorted(getattr(self, name).items()))
            if by_client:
                tensors[name] = torch.stack(list(by_client.values()))
                tensors[f"{name}_ids"] = torch.tensor(list(by_client))
        return tensors


def write(folder: Path, step: int, matrices: Matrices) -> None:
    """Write the counts of an evaluation into a run folder."""
    content = io.BytesIO()
    arrays = {name: value.numpy() for name, value in matrices._tensors().items()}
    np.savez_compressed(content, **arrays)  # pyright: ignore[reportArgumentType]
    with Folder.open(folder) as run, run.inner(FOLDER, make=True) as inner:
        inner.write(_name(step), content.getvalue())


def read(folder: Path, step: int, sha256: str) -> Matrices:
    """Read the counts of the evaluation after a step.

    Args:
        sha256: the hash of the counts in the step's report.

    Raises:
        CheckpointError: the file cannot be read, or has other counts.
    """
    path = folder / FOLDER / _name(step)
    if step in missing(folder, [step]):
        raise CheckpointError(
            f"{path}: the file is missing. A run keeps the counts of its last {KEPT} evaluations, and of those with a "
            "checkpoint.",
            code="file.unreadable",
            path=str(path),
        )
    names = ["shared", *_STACKS, *(f"{name}_ids" for name in _STACKS)]
    try:
        with Folder.open(folder) as run, run.inner(FOLDER) as inner:
            inner.place(path.name)
        entries = {name: torch.from_numpy(value) for name, value in read_npz(path, names).items()}
    except (CheckpointError, DataError, TypeError) as error:
        raise CheckpointError(
            f"{path}: the file cannot be read ({error}). Put the original back.",
            code="file.unreadable",
            path=str(path),
        ) from None
    matrices = Matrices(entries.get("shared"), _by_client(entries, "clients"), _by_client(entries, "own"))
    if matrices.sha256 != sha256:
        raise CheckpointError(
            f"{path}: the counts are not those of the evaluation after step {step}. Put the original back.",
            code="run.changed",
            path=str(path),
            step=step,
        )
    return matrices


def copy(source: Path, target: Path, steps: Iterable[int]) -> None:
    """Copy the counts of some steps from one run folder to another."""
    with Folder.open(source) as old_run, Folder.open(target) as new_run:
        if FOLDER not in old_run.names():
            return
        with old_run.inner(FOLDER) as old, new_run.inner(FOLDER, make=True) as new:
            for name in {_name(step) for step in steps}.intersection(old.names()):
                old.copy(name, new)


def prune(folder: Path, step: int, spared: Collection[int]) -> None:
    """Remove the counts of all but the last `KEPT` evaluations up to a step, and those that a killed run left after it.

    Args:
        spared: steps whose counts stay all the same.
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
    """Return the steps whose counts the run folder does not have."""
    with Folder.open(folder) as run:
        if FOLDER not in run.names():
            return set(steps)
        with run.inner(FOLDER) as inner:
            names = set(inner.names())
    return {step for step in steps if _name(step) not in names}


def remove(folder: Path, step: int) -> None:
    """Remove the counts of a step."""
    with Folder.open(folder) as run, run.inner(FOLDER) as inner:
        inner.remove(_name(step))


def _by_client(entries: dict[str, Tensor], name: str) -> dict[int, Tensor]:
    if name not in entries or f"{name}_ids" not in entries:
        return {}
    return dict(zip(entries[f"{name}_ids"].tolist(), entries[name], strict=False))


def _name(step: int) -> str:
    return f"{step:06d}.npz"
