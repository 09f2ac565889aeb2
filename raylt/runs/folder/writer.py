"""`Journal`: writes a run folder; `Run` (run.py) reads it.

    identity.json    everything that determines the result, see identity.py
    config.yaml      the resolved configuration, which `raylt resume` runs
    split.json       index lists per client and their SHA-256
    outline.json     the description of the data that models need, see raylt/data/task.py
    origins.json     sources of the plugins with their SHA-256, if there are plugins
    metrics.jsonl    one line per committed step, see metrics_log.py
    checkpoints/     see raylt/core/checkpoint/checkpoint.py
    confusions/      confusion counts of each evaluation, see raylt/core/evaluation/counts.py
    events.*         TensorBoard
    provenance.jsonl versions and machine, one line for each start, see provenance.py
    notes.log        remarks on the images, problems and their remedies, if there were any, see notes.py
    summary.json     written when the run is done, with model.safetensors; see summary.py

To commit a step, the checkpoint is first moved to its final name, then the line is appended. If a run is killed in
between, the line can be restored from the checkpoint.
"""

import json
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

from raylt.config import Config, yaml_text
from raylt.core.checkpoint import checkpoint, client_states
from raylt.core.checkpoint.checkpoint import Checkpoint, Seal
from raylt.core.report import RoundReport, best_validated
from raylt.data.splits.split import Split
from raylt.data.task import TaskOutline
from raylt.disk import make
from raylt.errors import CheckpointError, FolderHeld, RayltError
from raylt.own_code.commands import resume_call
from raylt.runs.callbacks.prediction_grid import Picture
from raylt.runs.callbacks.tensorboard import Board
from raylt.runs.folder import identity, metrics_log, provenance, summary
from raylt.runs.folder.notes import NOTES, SERVER_DIED, failure, failure_note
from raylt.runs.folder.reader import LOCK, OUTLINE, is_locked
from raylt.store import Folder

LOCK_ATTEMPTS = 5


class Journal:
    """A run folder that is open for writing and locked against other processes.

    Raises:
        CheckpointError: The folder cannot be written to, or another process has locked it.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._open = Folder.open(folder)
        try:
            self._lock: int | None = self._acquire()
        except CheckpointError:
            self._open.__exit__()
            raise
        self._board = Board(lambda: identity.read_identity(self._open)["config"])
        self._head: str | None = None
        self._made: str | None = None

    def _acquire(self) -> int:
        for _ in range(LOCK_ATTEMPTS):
            if (handle := self._open.lock(LOCK)) is not None:
                return handle
            time.sleep(0.05)  # a reader may be testing the lock at this moment
        raise FolderHeld(
            f"{self.folder}: another process is using the folder ({LOCK} is locked). Wait for it, or stop it.",
            code="run.busy",
            path=str(self.folder),
        )

    @classmethod
    def create(
        cls,
        folder: Path,
        config: Config,
        split: Split,
        data: Mapping[str, str],
        origins: Sequence[Mapping[str, Any]] = (),
        parent: Mapping[str, Any] | None = None,
        outline: TaskOutline | None = None,
    ) -> "Journal":
        """Create a run folder.

        Args:
            folder: The run folder, which must not exist.
            config: The configuration of the run.
            split: The split of the data.
            data: Hashes of the data, see raylt/data/fingerprint.py.
            origins: Records of the plugins that the configuration names, see raylt/registry.py.
            parent: Record of the run that this run branches from, see raylt/runs/folder/identity.py.
            outline: Description of the data; without it, the models can only be opened with the data.

        Raises:
            CheckpointError: The folder exists already. It is a `FolderHeld` if another process has locked the folder.
        """
        _make_folder(folder)
        journal = cls(folder)
        try:
            split.save(folder / "split.json")
            if origins:
                journal._open.write(identity.ORIGINS, identity.as_text(list(origins)))
            if outline is not None:
                # compact, since it has megabytes with a hundred thousand clients, and only programs read it
                journal._open.write(OUTLINE, json.dumps(outline, separators=(",", ":")) + "\n")
            identity.write(journal._open, identity.identify(config, split, data, origins, parent))
            if parent is None:  # a branched run must adopt steps first
                journal._make_resumable(config)
        except BaseException:  # such as a full disk; the same call must be possible again
            journal.discard()
            journal.close()
            raise
        return journal

    def _make_resumable(self, config: Config) -> None:
        """Write config.yaml as the folder's last file, which makes the run resumable."""
        self._open.write("config.yaml", yaml_text.write(config.model_dump(mode="json")))

    @property
    def seal(self) -> Seal:
        """Return the hashes that link the next step to the steps before it."""
        if self._head is None:
            self._head = self._lines().head()
        if self._made is None:
            self._made = provenance.head(self._open)
        return Seal(self._root, self._head, self._made)

    def append(self, report: RoundReport) -> None:
        """Record the report of a committed step."""
        self._append(metrics_log.as_record(report))

    def note(self, text: str) -> None:
        """Add a line about a problem and its remedy to the run's notes."""
        self._open.append(NOTES, text + "\n")

    def note_images(self, notes: Sequence[str]) -> None:
        """Begin the run's notes with remarks on its images, unless an earlier process has written notes."""
        if not self._open.has(NOTES):
            for note in notes:
                self.note(note)

    def note_failure(self, error: Exception) -> None:
        """Add the error that ended the run to its notes."""
        with suppress(OSError, RayltError):  # such as a full disk, which is the error itself
            self.note(failure_note(error))

    def note_start(self, step: int) -> None:
        """Add the start of this process to the notes if they end with the error of an earlier one.

        Args:
            step: Number of committed steps.
        """
        if failure(self._open) is not None:
            self.note(f"started again after step {step}")

    def server_deaths(self) -> int:
        """Return how many times the server's process has died, according to the run's notes."""
        if not self._open.has(NOTES):
            return 0
        with self._open.stream(NOTES) as lines:
            return sum(line.startswith(SERVER_DIED.encode()) for line in lines)

    def adopt(self, reports: Sequence[dict[str, Any]], checkpoints: Sequence[Checkpoint], config: Config) -> None:
        """Take over the first steps of another run: their reports, and some checkpoints.

        The run can be resumed only after this function has returned. If the process is killed before, the folder does
        not count as a run.

        Args:
            reports: Reports of the steps, oldest first.
            checkpoints: Checkpoint after the last of these steps, preceded by the checkpoint with the best accuracy on
                validation images if that is another.
            config: The configuration of the run.
        """
        by_step = {saved.facts["step"]: saved for saved in checkpoints}
        for step, content in enumerate(reports, 1):
            if step in by_step:
                facts = {"step": step, "report": content, "seal": asdict(self.seal)}
                best = best_validated(reports[:step], by_step)
                if best is not None:
                    facts["best"] = best
                parts = client_states.copied(step, by_step[step])
                folder = self.folder / "checkpoints"
                checkpoint.write(folder, step, parts, facts, None, config.output.keep, by_step.keys())
            self._append(content)
        self._make_resumable(config)

    def _append(self, content: dict[str, Any]) -> None:
        seal = self.seal
        text = metrics_log.write_line(content, seal.line, provenance.now(), seal.provenance)
        self._open.append(metrics_log.FILE, text + "\n")
        self._head = metrics_log.hash_line(text)
        self._board.show(self._open, content)

    def reports(self) -> list[dict[str, Any]]:
        """Return the reports of the committed steps, oldest first."""
        return self._lines().reports

    def rewind(self) -> tuple[Checkpoint | None, list[str]]:
        """Make metrics.jsonl end with the step of the newest usable checkpoint.

        Returns:
            The checkpoint to continue from, and a warning for each damaged checkpoint.

        Raises:
            CheckpointError: Steps were committed but no checkpoint is usable, or the files belong to different runs.
        """
        checkpoint.sweep(self._open)
        lines = self._lines()
        saved, faults = checkpoint.latest(self.folder / "checkpoints")
        if saved is None and metrics_log.was_saved(lines):
            raise CheckpointError(
                f"{self.folder}: all checkpoints are missing ({len(lines.reports)} steps were committed). Put one "
                "back, or start a new run.",
                code="checkpoint.not-found",
                path=str(self.folder),
                steps=len(lines.reports),
            )
        texts: list[str] = []
        if saved is not None:
            lines.check(saved)
            texts = lines.texts[: saved.facts["step"]]
            if len(texts) < saved.facts["step"]:  # the process was killed between the checkpoint and its line
                texts.append(metrics_log.restored_line(saved, lines.head()))
        if lines.torn or texts != lines.texts:
            self._open.write(metrics_log.FILE, "".join(text + "\n" for text in texts))
        self._head = metrics_log.hash_line(texts[-1]) if texts else lines.root
        self._made = None  # read again, since the process now adds its line to provenance.jsonl
        return saved, faults

    def discard(self) -> None:
        """Remove the folder if it is not a complete run or no step was committed.

        It stays if another process has continued the run.
        """
        with Folder.open(self.folder) as folder:
            lock = folder.lock(LOCK) if self._lock is None else self._lock
            if lock is None:
                return
            if not (folder.has("config.yaml") and folder.has(metrics_log.FILE)):
                shutil.rmtree(self.folder)
            if lock != self._lock:
                os.close(lock)

    def show(self, picture: Picture) -> None:
        """Add a picture of the final model's predictions to TensorBoard."""
        self._board.picture(self._open, len(self.reports()), picture)

    def write_summary(self, figures: dict[str, Any]) -> dict[str, Any]:
        """Write summary.json, which marks the run as done.

        Returns:
            The content of the file.
        """
        complete = summary.seal(figures, self.seal)
        summary.write(self._open, complete)
        return complete

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Unlock the folder. Further calls have no effect."""
        if self._lock is not None:
            os.close(self._lock)
            self._open.__exit__()
            self._lock = None

    def _lines(self) -> metrics_log.Lines:
        return metrics_log.read_lines(self._open, self._root)

    @cached_property
    def _root(self) -> str:
        return identity.read_identity(self._open)["sha256"]


def _make_folder(folder: Path) -> None:
    try:
        make(folder)
    except FileExistsError:
        if folder.is_dir() and is_locked(folder):
            raise FolderHeld(
                f"{folder}: another process is creating it. Give another folder.", code="run.busy", path=str(folder)
            ) from None
        is_run = (folder / "config.yaml").exists()
        remedy = f"continue it with {resume_call(folder)}" if is_run else "remove it, since it is not a complete run"
        raise CheckpointError(
            f"{folder}: exists already. Give another folder, or {remedy}.", code="run.exists", path=str(folder)
        ) from None
    except OSError as error:
        raise CheckpointError(
            f"{folder}: the folder cannot be created ({error.strerror}). Make it in a folder that can be written to.",
            code="file.unwritable",
            path=str(folder),
        ) from None
