"""`Files`: what a run folder holds, read as what it must be and checked against what it must belong to.

Nothing of a folder is handed out whose other files say that it is another run's, or that it was changed: a
CheckpointError names the file and the difference. A study's records, `Run` and `raylt verify` all read through this.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from raylt.config import Config, load
from raylt.core import checkpoint, confusions
from raylt.core.checkpoint import Checkpoint, hash_tensors
from raylt.core.confusions import Matrices
from raylt.data.hashes import OUTLINE as OUTLINE_HASH
from raylt.data.hashes import hash_data
from raylt.data.outline import OUTLINE as OUTLINES
from raylt.data.outline import Outline
from raylt.data.split import LIMIT as SPLIT
from raylt.data.split import Split
from raylt.data.task import Task
from raylt.errors import CheckpointError, DataError
from raylt.runs import sealed
from raylt.runs.identity import (
    Guest,
    Identity,
    check_config,
    check_data,
    check_split,
    check_version,
    guests_of,
    read_identity,
)
from raylt.runs.journal import OUTLINE, held
from raylt.runs.lines import Lines, read_lines
from raylt.store import Folder
from raylt.typed import hash_json

State = Literal["missing", "running", "stopped", "done"]


class Files:
    """The files of a run folder; each is read when it is asked for."""

    def __init__(self, folder: Path):
        self.path = folder

    @property
    def state(self) -> State:
        """missing: there is no such run; running: a process is at it; stopped: it can be resumed; done."""
        if not self.path.is_dir():
            return "missing"
        with self._open() as folder:
            names = folder.names()
        if "config.yaml" not in names:
            return "missing"
        if held(self.path):
            return "running"
        return "done" if sealed.FILE in names else "stopped"

    @cached_property
    def identity(self) -> Identity:
        """What the run is."""
        with self._open() as folder:
            return read_identity(folder)

    def config(self) -> Config:
        """The configuration, as it was when the run began; resources and output may be others."""
        with self._open() as folder:
            config = load(folder.place("config.yaml"))
            check_config(self.identity, config, folder)
        return config

    def guests(self) -> list[Guest]:
        """Records of what is not raylt's own."""
        with self._open() as folder:
            return guests_of(self.identity, folder)

    def split(self) -> Split:
        """Who holds which training sample."""
        with self._open() as folder:
            try:
                split = Split.from_json(folder.read("split.json", SPLIT))
            except DataError as error:
                raise DataError(f"{self.path / 'split.json'}: {error}") from None
            check_split(self.identity, split, folder)
        return split

    def outline(self) -> Outline | None:
        """What is kept of the data; None of a run that was made before there was such."""
        with self._open() as folder:
            if (known := self.identity["data"].get(OUTLINE_HASH)) is None:
                return None
            outline = folder.read_json(OUTLINE, OUTLINES)
            if hash_json(outline) != known:
                raise CheckpointError(f"{self.path / OUTLINE}: was changed after the run was made; put the original "
                                      "back")
        return outline

    def check_data(self, task: Task) -> None:
        """Raises a CheckpointError where these are not the data that the run was made with."""
        with self._open() as folder:
            check_data(self.identity, hash_data(task), folder)

    def check_version(self) -> None:
        """Raises a CheckpointError where another raylt made the run."""
        with self._open() as folder:
            check_version(self.identity, folder)

    def lines(self) -> Lines:
        """The committed steps."""
        root = self.identity["sha256"]
        with self._open() as folder:
            return read_lines(folder, root)

    def matrices(self, step: int | None = None) -> Matrices:
        """The counts of the evaluation after a step; by default of the last."""
        judged = {report["step"]: report["confusion"] for report in self.lines().reports if report.get("confusion")}
        if not judged:
            raise CheckpointError(f"{self.path}: keeps no confusion matrices; an older raylt made it, or nothing was "
                                  "judged yet")
        asked = max(judged) if step is None else step
        if asked not in judged:
            raise CheckpointError(f"{self.path}: nothing was judged after step {asked}; evaluations are those after "
                                  f"{', '.join(map(str, judged))}")
        return confusions.read(self.path, asked, judged[asked])

    @property
    def ended(self) -> bool:
        """Whether there is a summary."""
        with self._open() as folder:
            return sealed.FILE in folder.names()

    def summary(self) -> dict[str, Any]:
        """What the run came to."""
        known = self.lines()
        with self._open() as folder:
            return sealed.read_summary(folder, known)

    def checkpoint(self) -> Checkpoint | None:
        """The newest that is undamaged; None where none was committed, or none was kept."""
        saved = checkpoint.latest(self.path / "checkpoints")[0]
        if saved is not None:
            self.lines().check(saved)
        return saved

    def checkpoint_after(self, step: int) -> Checkpoint:
        """The one after a step."""
        try:
            saved = checkpoint.at(self.path / "checkpoints", step)
        except CheckpointError as error:
            raise CheckpointError(f"{self.path}: the checkpoint after round {step} is damaged ({error}); give another "
                                  "round") from None
        self.lines().check(saved)
        return saved

    def model(self) -> dict[str, Tensor]:
        """The tensors of a finished run's model."""
        with self._open() as folder:
            file = folder.place(sealed.MODEL)
        try:
            tensors = load_file(file)
        except SafetensorError as error:
            raise CheckpointError(f"{file}: cannot be read ({' '.join(str(error).split())}); put the original back"
                                  ) from None
        if hash_tensors(tensors) != self.summary()["model_sha256"]:
            raise CheckpointError(f"{file}: is another model than {sealed.FILE} tells of; put the original back")
        return tensors

    @contextmanager
    def _open(self) -> Iterator[Folder]:
        with Folder.open(self.path) as folder:
            yield folder
