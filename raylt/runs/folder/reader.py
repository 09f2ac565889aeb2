"""`Files`: reads the files of a run folder, validates each, and checks them against one another.

A file that was changed, or that belongs to another run, raises a CheckpointError with the file and the difference. The
records of studies, `Run` and `raylt verify` read run folders only through this class.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from raylt.config import Config, load
from raylt.data.splits.split import LIMIT as SPLIT
from raylt.data.splits.split import Split
from raylt.disk import is_folder
from raylt.errors import CheckpointError, DataError, quoted, spoken, without_remedy
from raylt.runs.folder import notes, provenance, summary
from raylt.runs.folder.identity import (
    Identity,
    PluginRecord,
    check_config,
    check_data,
    check_split,
    check_version,
    plugins_of,
    read_identity,
)
from raylt.runs.folder.metrics_log import Lines, read_lines
from raylt.store import Folder
from raylt.typed_json import hash_json

if TYPE_CHECKING:
    from torch import Tensor

    from raylt.core.checkpoint.checkpoint import Checkpoint
    from raylt.core.evaluation.counts import Matrices
    from raylt.data.task import Task, TaskOutline

# Avoid importing torch and other slow modules at the top, so that runs are listed quickly.

LOCK = ".lock"
OUTLINE = "outline.json"
RunState = Literal["missing", "running", "stopped", "done"]


class Files:
    """The files of a run folder, each read when it is first needed."""

    def __init__(self, folder: Path):
        self.path = folder

    @property
    def state(self) -> RunState:
        """Return whether the run is missing, running, stopped or done.

        "missing": the folder is not a run; "running": a process is working on it; "stopped": it can be resumed; "done":
        it is finished.
        """
        if not is_folder(self.path):
            return "missing"
        with self._open() as folder:
            names = folder.names()
        if "config.yaml" not in names:
            return "missing"
        if is_locked(self.path):
            return "running"
        return "done" if summary.FILE in names else "stopped"

    def failure(self) -> tuple[str, str | None] | None:
        """Return the error that ended the run's last process, see notes.py."""
        with self._open() as folder:
            return notes.failure(folder)

    @cached_property
    def identity(self) -> Identity:
        """Return the content of identity.json: everything that determines the result."""
        with self._open() as folder:
            return read_identity(folder)

    def config(self) -> Config:
        """Return the configuration that the run was made with; only resources and output may have changed since."""
        with self._open() as folder:
            config = load(folder.place("config.yaml"))
            check_config(self.identity, config, folder)
        return config

    def plugins(self) -> list[PluginRecord]:
        """Return the records of the run's plugins."""
        with self._open() as folder:
            return plugins_of(self.identity, folder)

    def split(self) -> Split:
        """Return the training samples of each client.

        Raises:
            CheckpointError: split.json belongs to another run.
            DataError: It cannot be read.
        """
        with self._open() as folder:
            try:
                split = Split.from_json(folder.read("split.json", SPLIT))
            except DataError as error:
                path = self.path / "split.json"
                raise DataError(f"{path}: {error}", code=error.code or "data.malformed", path=str(path)) from None
            check_split(self.identity, split, folder)
        return split

    def outline(self) -> "TaskOutline | None":
        """Return the description of the data, or None if the run has none.

        Raises:
            CheckpointError: outline.json was changed.
        """
        from raylt.data.fingerprint import OUTLINE_HASH
        from raylt.data.task import OUTLINES

        with self._open() as folder:
            sha256 = self.identity["data"].get(OUTLINE_HASH)
            if sha256 is None:
                return None
            outline = folder.read_json(OUTLINE, OUTLINES)
        if hash_json(outline) != sha256:
            path = self.path / OUTLINE
            raise CheckpointError(
                f"{path}: the file was changed after the run was made. Put the original back.",
                code="run.changed",
                path=str(path),
            )
        return outline

    def check_data(self, task: "Task") -> None:
        """Check that the data are the same as when the run was made.

        Raises:
            CheckpointError: They differ.
        """
        from raylt.data.fingerprint import hash_data

        with self._open() as folder:
            check_data(self.identity, hash_data(task), folder)

    def check_version(self) -> None:
        """Check that this version of raylt made the run.

        Raises:
            CheckpointError: Another version made it.
        """
        with self._open() as folder:
            check_version(self.identity, folder)

    def lines(self) -> Lines:
        """Return the lines of metrics.jsonl, one for each committed step.

        Raises:
            CheckpointError: A line was changed, or the last line is not that with which the run ended.
        """
        ended = self.ended  # checked before reading the lines, since a run may end in the meantime
        lines = self.lines_alone()
        if ended:
            with self._open() as folder:
                summary.read_summary(folder, lines)
        return lines

    def lines_alone(self) -> Lines:
        """Return the lines of metrics.jsonl without comparing them with summary.json."""
        root = self.identity["sha256"]
        with self._open() as folder:
            return read_lines(folder, root)

    def matrices(self, step: int | None = None) -> "Matrices":
        """Return the confusion matrices of the evaluation after a step, by default the last.

        Raises:
            CheckpointError: There was no evaluation after this step, or the matrices were changed.
        """
        hashes = {report["step"]: report["confusion"] for report in self.lines().reports if report["confusion"]}
        if not hashes:
            raise CheckpointError(
                f"{self.path}: the run has no confusion matrices before its first evaluation. Continue it with "
                f"{spoken('raylt resume', 'raylt.resume')}.",
                code="run.not-judged",
                path=str(self.path),
            )
        asked = max(hashes) if step is None else step
        if asked not in hashes:
            raise CheckpointError(
                f"{self.path}: there was no evaluation after this step ({asked}). Give one of "
                f"{', '.join(map(str, hashes))}.",
                code="run.not-judged",
                path=str(self.path),
                step=asked,
            )
        from raylt.core.evaluation import counts

        return counts.read(self.path, asked, hashes[asked])

    @property
    def ended(self) -> bool:
        """Return whether the run has ended: its folder has a summary."""
        with self._open() as folder:
            return summary.FILE in folder.names()

    def summary(self) -> dict[str, Any]:
        """Return the content of summary.json."""
        lines = self.lines_alone()
        with self._open() as folder:
            content = summary.read_summary(folder, lines)
            provenance.check_summary(folder, content)
        return content

    def provenance(self) -> list[dict[str, Any]]:
        """Return descriptions of the processes that worked on the run, oldest first."""
        return provenance.read(self.path)

    def checkpoint(self) -> "Checkpoint | None":
        """Return the newest undamaged checkpoint, or None if the run has none."""
        from raylt.core.checkpoint import checkpoint

        saved = checkpoint.latest(self.path / "checkpoints")[0]
        if saved is not None:
            self.lines_alone().check(saved)
        return saved

    def checkpoint_after(self, step: int) -> "Checkpoint":
        """Return the checkpoint that was saved after a step.

        Raises:
            CheckpointError: It is damaged, or belongs to another run.
        """
        from raylt.core.checkpoint import checkpoint

        try:
            saved = checkpoint.at(self.path / "checkpoints", step)
        except CheckpointError as error:
            raise CheckpointError(
                f"{self.path}: the checkpoint after round {step} is damaged ({without_remedy(error)}). Give another "
                "round.",
                code="checkpoint.damaged",
                path=str(self.path),
                step=step,
            ) from None
        self.lines_alone().check(saved)
        return saved

    def model(self) -> "dict[str, Tensor]":
        """Return the tensors of a finished run's model, by name.

        Raises:
            CheckpointError: The file cannot be read, or is not the model of the run's summary.
        """
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        from raylt.core.checkpoint.checkpoint import hash_tensors

        remedy = f"Restore it with raylt verify {quoted(self.path)} --repair, or put the original back."
        with self._open() as folder:
            if summary.MODEL not in folder.names():
                file = self.path / summary.MODEL
                raise CheckpointError(f"{file}: is missing. {remedy}", code="file.not-found", path=str(file))
            file = folder.place(summary.MODEL)
        try:
            tensors = load_file(file)
        except SafetensorError as error:
            raise CheckpointError(
                f"{file}: the file cannot be read ({' '.join(str(error).split())}). {remedy}",
                code="file.unreadable",
                path=str(file),
            ) from None
        if hash_tensors(tensors) != self.summary()["model_sha256"]:
            raise CheckpointError(
                f"{file}: the model does not match {summary.FILE}. {remedy}",
                code="run.changed",
                path=str(file),
            )
        return tensors

    @contextmanager
    def _open(self) -> Iterator[Folder]:
        with Folder.open(self.path) as folder:
            yield folder


def is_locked(folder: Path) -> bool:
    """Return whether a process is running the run in this folder."""
    with Folder.open(folder) as run:
        return run.is_locked(LOCK)
