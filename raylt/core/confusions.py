"""`Matrices`: the counts that an evaluation came to, and the file that keeps them, confusions/000012.npz."""

import io
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from raylt.core.checkpoint import hash_tensors
from raylt.data.decoding import read_npz
from raylt.errors import CheckpointError, DataError
from raylt.store import Folder

FOLDER = "confusions"
_STACKS = "clients", "own"


@dataclass(frozen=True)
class Matrices:
    """Counts of (true, predicted) classes of one evaluation, each int64 [C, C], over the true classes.

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
        """Over names, ids and counts."""
        return hash_tensors(self._tensors())

    def __bool__(self) -> bool:
        return self.shared is not None or bool(self.clients or self.own)

    def _tensors(self) -> dict[str, Tensor]:
        tensors = {} if self.shared is None else {"shared": self.shared}
        for name in _STACKS:
            if stack := dict(sorted(getattr(self, name).items())):
                tensors |= {name: torch.stack(list(stack.values())), f"{name}_ids": torch.tensor(list(stack))}
        return tensors


def write(folder: Path, step: int, matrices: Matrices) -> None:
    """Writes the counts of an evaluation into a run folder."""
    content = io.BytesIO()
    arrays = {name: value.numpy() for name, value in matrices._tensors().items()}
    np.savez_compressed(content, **arrays)          # pyright: ignore[reportArgumentType]
    with Folder.open(folder) as here, here.inner(FOLDER, make=True) as inner:
        inner.write(_name(step), content.getvalue())


def read(folder: Path, step: int, sha256: str) -> Matrices:
    """The counts of the evaluation after a step.

    Args:
        sha256: what the step's report says they hash to.

    Raises:
        CheckpointError: they are gone, or other counts.
    """
    path = folder / FOLDER / _name(step)
    try:
        with Folder.open(folder) as here, here.inner(FOLDER) as inner:
            inner.place(path.name)
        names = ["shared", *_STACKS, *(f"{name}_ids" for name in _STACKS)]
        entries = {name: torch.from_numpy(value) for name, value in read_npz(path, names).items()}
    except (CheckpointError, DataError, TypeError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error}); put the original back") from None
    clients, own = (dict(zip(entries.get(f"{name}_ids", torch.empty(0)).tolist(), entries.get(name, ()), strict=False))
                    for name in _STACKS)
    matrices = Matrices(entries.get("shared"), clients, own)
    if matrices.sha256 != sha256:
        raise CheckpointError(f"{path}: has other counts than those of step {step}; put the original back")
    return matrices


def copy(source: Path, target: Path, steps: Iterable[int]) -> None:
    """Takes over those of some steps from another run folder."""
    with Folder.open(source) as there, Folder.open(target) as here:
        if FOLDER in there.names():
            with there.inner(FOLDER) as old, here.inner(FOLDER, make=True) as new:
                for name in {_name(step) for step in steps}.intersection(old.names()):
                    old.copy(name, new)


def remove(folder: Path, step: int) -> None:
    """Removes those of a step."""
    with Folder.open(folder) as here, here.inner(FOLDER) as inner:
        inner.remove(_name(step))


def _name(step: int) -> str:
    return f"{step:06d}.npz"
