"""`Journal`: the run folder, for the process that writes it; `Run` (run.py) reads it.

    config.yaml      resolved; what `raylt resume` runs
    split.json       index lists per client and their SHA-256
    origins.json     where what is not raylt's own came from, with its SHA-256; absent when all is
    metrics.jsonl    one line per committed step
    checkpoints/     see checkpoint.py
    events.*         TensorBoard
    provenance.jsonl what made it: versions and machine, a line for each start
    summary.json     when the run is done; model.safetensors beside it

A step is committed in this order: checkpoint renamed into its place, then its line. A run that was killed in between
has the line in the checkpoint.
"""

import fcntl
import json
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from raylt.config import Config, notation
from raylt.core import checkpoint
from raylt.core.checkpoint import Checkpoint
from raylt.core.report import Report
from raylt.data.split import Split
from raylt.errors import CheckpointError
from raylt.runs import provenance

LOCK_ATTEMPTS = 5


class Journal:
    """A run folder, held by one process at a time."""

    def __init__(self, folder: Path):
        self.folder = folder
        try:
            self._lock = (folder / ".lock").open("w")
        except OSError as error:
            raise CheckpointError(f"{folder}: {error.strerror}; it must be writable to run there") from None
        for attempt in range(LOCK_ATTEMPTS):
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if attempt == LOCK_ATTEMPTS - 1:
                    self._lock.close()
                    raise CheckpointError(f"{folder}: another process is running this; wait for it or stop it"
                                          ) from None
                time.sleep(0.05)            # it may be someone who only looks whether it is held
        self._events: Any = None

    @classmethod
    def create(cls, folder: Path, config: Config, split: Split, origins: Sequence[dict[str, Any]] = ()) -> "Journal":
        """A new run folder.

        Args:
            origins: records of the guests that the configuration names, see raylt/registry.py.

        Raises:
            CheckpointError: it exists already.
        """
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            raise CheckpointError(f"{folder}: exists already; give another --name, or continue it with "
                                  f"raylt resume {folder}") from None
        except OSError as error:
            raise CheckpointError(f"{folder}: {error.strerror}; give another --out") from None
        journal = cls(folder)
        split.save(folder / "split.json")
        if origins:
            _write(folder / "origins.json", json.dumps(list(origins), indent=2) + "\n")
        # written last: a folder with a config.yaml can be resumed
        _write(folder / "config.yaml", notation.write(config.model_dump(mode="json")))
        return journal

    def append(self, report: Report) -> None:
        """Records a committed step."""
        content = asdict(report)
        line = json.dumps({"schema": provenance.SCHEMA, "date": provenance.now(), **content})
        with (self.folder / "metrics.jsonl").open("a") as stream:
            stream.write(line + "\n")
            stream.flush()
            os.fsync(stream.fileno())
        self._board(content)

    def reports(self) -> list[dict[str, Any]]:
        """The committed steps, oldest first."""
        return read_reports(self.folder)

    def rewind(self) -> tuple[Checkpoint | None, list[str]]:
        """The checkpoint to continue from, with warnings about damaged ones; later lines are dropped.

        Raises:
            CheckpointError: steps were committed and no checkpoint is usable.
        """
        saved, faults = checkpoint.latest(self.folder / "checkpoints")
        step = 0 if saved is None else saved.facts["step"]
        lines = [json.dumps(report) for report in read_reports(self.folder) if report["step"] <= step]
        if saved is not None and len(lines) < step:     # killed between the checkpoint and its line
            lines.append(json.dumps({"schema": provenance.SCHEMA, "date": None, **saved.facts["report"]}))
        _write(self.folder / "metrics.jsonl", "".join(line + "\n" for line in lines))
        return saved, faults

    def discard(self) -> None:
        """Removes the folder of a run that committed nothing."""
        if not self.reports():
            shutil.rmtree(self.folder)

    def conclude(self, summary: dict[str, Any]) -> None:
        """Writes summary.json: the run is done."""
        _write(self.folder / "summary.json", json.dumps(summary, indent=2) + "\n")

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *_: object) -> None:
        """Lets another process have the folder."""
        if self._events is not None:
            self._events.close()
        self._lock.close()

    def _board(self, report: dict[str, Any]) -> None:
        if self._events is None:
            from tensorboardX import SummaryWriter  # a second of imports that --help need not wait for
            self._events = SummaryWriter(str(self.folder), purge_step=report["step"], flush_secs=5)
        for name, value in _scalars(report):
            if name != "step":
                self._events.add_scalar(name, value, report["step"])


def read_reports(folder: Path) -> list[dict[str, Any]]:
    """The committed steps of a run folder, oldest first; a line cut off by a kill, and what follows it, is none."""
    file, reports = folder / "metrics.jsonl", []
    for line in file.read_text().splitlines() if file.exists() else []:
        try:
            reports.append(json.loads(line))
        except ValueError:
            break
    return reports


def held(folder: Path) -> bool:
    """Whether some process is running the run of this folder."""
    try:
        with (folder / ".lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:                                     # never run by anyone, or nobody's to look at
        return False
    return False


def _scalars(tree: dict[str, Any], path: str = "") -> list[tuple[str, float]]:
    found: list[tuple[str, float]] = []
    for key, value in tree.items():
        here = f"{path}/{key}" if path else key
        if isinstance(value, dict):
            found += _scalars(value, here)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found.append((here, value))
    return found


def _write(file: Path, text: str) -> None:
    """Replaces a file in one step."""
    beside = file.with_name(f".{file.name}.writing")
    with beside.open("w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    beside.replace(file)
    checkpoint.sync(file.parent)
