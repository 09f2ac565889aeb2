"""`Journal`: the run folder, for the process that writes it; `Run` (run.py) reads it.

    identity.json    what the run is, see identity.py
    config.yaml      resolved; what `raylt resume` runs
    split.json       index lists per client and their SHA-256
    outline.json     what models need to know of the data, see raylt/data/outline.py
    origins.json     where what is not raylt's own came from, with its SHA-256; absent when all is
    metrics.jsonl    one line per committed step, see lines.py
    checkpoints/     see checkpoint.py
    confusions/      the counts of each evaluation, whose hash its line has, see confusions.py
    events.*         TensorBoard
    provenance.jsonl what made it: versions and machine, a line for each start
    summary.json     when the run is done, see sealed.py; model.safetensors beside it

A step is committed in this order: checkpoint renamed into its place, then its line. A run that was killed in between
has the line in the checkpoint.
"""

import json
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

from raylt.config import Config, notation
from raylt.core import checkpoint, states
from raylt.core.checkpoint import Checkpoint, Seal
from raylt.core.report import Report
from raylt.data.outline import Outline
from raylt.data.split import Split
from raylt.disk import make
from raylt.errors import CheckpointError, FolderHeld
from raylt.runs import identity, lines, provenance, sealed
from raylt.runs.board import Board
from raylt.runs.grid import Picture
from raylt.store import Folder

LOCK_ATTEMPTS = 5
LOCK = ".lock"
OUTLINE = "outline.json"


class Journal:
    """A run folder, held by one process at a time.

    Raises:
        CheckpointError: it cannot be written to, or another process is at it.
    """

    def __init__(self, folder: Path):
        self.folder, self._open = folder, Folder.open(folder)
        try:
            self._lock: int | None = self._hold()
        except CheckpointError:
            self._open.__exit__()
            raise
        self._board = Board(lambda: identity.read_identity(self._open)["config"])
        self._head: str | None = None

    def _hold(self) -> int:
        for _ in range(LOCK_ATTEMPTS):
            if (handle := self._open.lock(LOCK)) is not None:
                return handle
            time.sleep(0.05)            # it may be someone who only looks whether it is held
        raise FolderHeld(f"{self.folder}: another process is running this; wait for it or stop it")

    @classmethod
    def create(cls, folder: Path, config: Config, split: Split, data: Mapping[str, str],
               origins: Sequence[Mapping[str, Any]] = (), parent: Mapping[str, Any] | None = None,
               outline: Outline | None = None) -> "Journal":
        """A new run folder.

        Args:
            data: what the data hash to, see raylt/data/hashes.py.
            origins: records of the guests that the configuration names, see raylt/registry.py.
            parent: the run that it is branched from, see raylt/runs/identity.py.
            outline: of the data; without one its models are opened with the data alone.

        Raises:
            CheckpointError: it exists already; a FolderHeld where another process is at it.
        """
        try:
            make(folder)
        except FileExistsError:
            if folder.is_dir() and held(folder):
                raise FolderHeld(f"{folder}: another process is making it") from None
            begun = (folder / "config.yaml").exists()
            remedy = f"continue it with raylt resume {folder}" if begun else "remove it: it is no run, or none yet"
            raise CheckpointError(f"{folder}: exists already; give another place, or {remedy}") from None
        except OSError as error:
            raise CheckpointError(f"{folder}: {error.strerror}; give another --out") from None
        journal = cls(folder)
        split.save(folder / "split.json")
        if origins:
            journal._open.write(identity.ORIGINS, identity.as_text(list(origins)))
        if outline is not None:
            # compact: of a hundred thousand clients it is megabytes, and nobody reads it
            journal._open.write(OUTLINE, json.dumps(outline, separators=(",", ":")) + "\n")
        identity.write(journal._open, identity.identify(config, split, data, origins, parent))
        if parent is None:          # otherwise it has steps to adopt first
            journal._allow(config)
        return journal

    def _allow(self, config: Config) -> None:
        """What is written last: a folder with a config.yaml can be resumed."""
        self._open.write("config.yaml", notation.write(config.model_dump(mode="json")))

    @property
    def seal(self) -> Seal:
        """What binds the next step to those before it."""
        if self._head is None:
            self._head = self._lines().head()
        return Seal(self._root, self._head)

    def append(self, report: Report) -> None:
        """Records a committed step."""
        self._append(lines.plain(report))

    def adopt(self, reports: Sequence[dict[str, Any]], saved: Checkpoint, config: Config) -> None:
        """Takes over the first steps of another run: their reports, and the checkpoint after the last.

        Only then is it a run that can be resumed: what a kill leaves before is nothing.
        """
        *before, last = reports
        for content in before:
            self._append(content)
        facts = {"step": len(reports), "report": last, "seal": asdict(self.seal)}
        checkpoint.write(self.folder / "checkpoints", len(reports), states.copied(len(reports), saved), facts, None,
                         config.output.keep)
        self._append(last)
        self._allow(config)

    def _append(self, content: dict[str, Any]) -> None:
        text = lines.write_line(content, self.seal.line, provenance.now())
        self._open.append(lines.FILE, text + "\n")
        self._head = lines.hash_line(text)
        self._board.show(self._open, content)

    def reports(self) -> list[dict[str, Any]]:
        """The committed steps, oldest first."""
        return self._lines().reports

    def rewind(self) -> tuple[Checkpoint | None, list[str]]:
        """The checkpoint to continue from, with warnings about damaged ones; later lines are dropped.

        Raises:
            CheckpointError: steps were committed and no checkpoint is usable, or they are not of one run.
        """
        checkpoint.sweep(self._open)
        known = self._lines()
        saved, faults = checkpoint.latest(self.folder / "checkpoints")
        if saved is None and sealed.was_saved(known):
            raise CheckpointError(f"{self.folder}: its checkpoints are gone; {len(known.reports)} steps were "
                                  "committed, and without one of them none can follow; put one back, or start a new "
                                  "run")
        texts = known.texts[:saved.facts["step"]] if saved is not None else []
        if saved is not None:
            known.check(saved)
            if len(texts) < saved.facts["step"]:        # killed between the checkpoint and its line
                texts.append(lines.restored(saved, known.head()))
        if known.torn or texts != known.texts:
            self._open.write(lines.FILE, "".join(text + "\n" for text in texts))
        self._head = lines.hash_line(texts[-1]) if texts else known.root
        return saved, faults

    def discard(self) -> None:
        """Removes the folder of a run that committed nothing, unless another process has taken it up by now."""
        with Folder.open(self.folder) as folder:
            lock = folder.lock(LOCK) if self._lock is None else self._lock
            if lock is None:
                return
            if not folder.has(lines.FILE):
                shutil.rmtree(self.folder)
            if lock != self._lock:
                os.close(lock)

    def show(self, picture: Picture) -> None:
        """Shows predictions of the model that the run ended with."""
        self._board.picture(self._open, len(self.reports()), picture)

    def conclude(self, summary: dict[str, Any]) -> dict[str, Any]:
        """Writes summary.json: the run is done.

        Returns:
            Its content.
        """
        summary = sealed.seal(summary, self.seal)
        sealed.write(self._open, summary)
        return summary

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *_: object) -> None:
        """Lets another process have the folder."""
        if self._lock is not None:
            os.close(self._lock)
            self._open.__exit__()
            self._lock = None

    def _lines(self) -> lines.Lines:
        return lines.read_lines(self._open, self._root)

    @cached_property
    def _root(self) -> str:
        return identity.read_identity(self._open)["sha256"]


def held(folder: Path) -> bool:
    """Whether some process is running the run of this folder."""
    with Folder.open(folder) as here:
        return here.held(LOCK)
